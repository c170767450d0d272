"""Fusion: the kernels a framework runs, nothing gained or lost in arithmetic, never more bytes or memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import Cluster
from opcast.simulator.graph import Graph
from opcast.simulator.memory.lifetimes import peak_memory
from opcast.simulator.passes.fuse import fuse
from opcast.simulator.passes.fusion.rules import SHIPPED
from opcast.simulator.passes.verify import tensor_flops
from opcast.simulator.question.plan import Parallel, Plan, PlanError, Stack

CLUSTER = Cluster("c", "c", "h100_sxm", nodes=1)
APART = "bias_apart"
LARGER = (APART, "log_probs_apart")  # rules that take a kernel apart: they move more
NAMES = [rule.name for rule in SHIPPED if rule.name not in LARGER]
MERGES = ("qkv", "gate_up")  # a merged product needs all of its operands at once
MEGATRON = (
    *("rms_norm", "silu_mul", "gelu", "rope", "cross_entropy_in_place", "qkv", "gate_up", "bias", "moe"),
    *("softcap", "dropout_add", "int_bookkeeping", "zero_fill", "gradient_accumulation"),
)
MODELS = ("llama", "gpt2", "gemma2", "qwen3_moe", "deepseek_v3")
Traced = Callable[..., Graph]


def plan(*rules: str) -> Plan:
    return Plan(Parallel(), CLUSTER, Stack(fusion=rules))


def bytes_moved(graph: Graph) -> int:
    return sum(k * n.bytes_moved for n, k in graph.weighted())


def buffers(graph: Graph) -> int:
    return sum(t.size_bytes * t.count for t in graph.tensors if t.role == "buffer")


def layer(graph: Graph, phase: str) -> list[str]:
    """Kinds of the ops of the layer that repeats most in a phase."""
    blocks = [b for b in graph.blocks if b.repeat > 1 and b.nodes[0].phase == phase]
    return [node.op.kind for node in max(blocks, key=lambda b: b.repeat).nodes if node.op is not None]


def test_a_llama_layer_becomes_what_transformer_engine_runs(traced_small: Traced) -> None:
    fused = fuse(traced_small("llama"), plan(*MEGATRON))
    assert layer(fused, "forward") == [
        *("rms_norm", "gemm", "rope", "attention_prefill", "gemm", "elementwise"),
        *("rms_norm", "gemm", "silu_mul", "gemm", "elementwise"),
    ]
    assert layer(fused, "backward") == [
        *("gemm", "gemm", "silu_mul_backward", "gemm", "gemm", "rms_norm_backward", "elementwise"),
        *("gemm", "gemm", "attention_backward", "rope", "gemm", "gemm", "rms_norm_backward", "elementwise"),
    ]


def test_merged_products_are_as_wide_as_their_parts(traced_small: Traced) -> None:
    block = next(b for b in fuse(traced_small("llama"), plan("qkv", "gate_up")).blocks if b.repeat > 1)
    shapes = {n.source: (n.op.m, n.op.n, n.op.k) for n in block.nodes if n.op is not None and "fused" in n.source}
    assert shapes == {"fused.qkv": (32, 64 + 2 * 32, 64), "fused.gate_up": (32, 2 * 128, 64)}


def test_old_pytorch_adds_biases_by_kernels_of_their_own(
    traced_small: Traced, assert_sound: Callable[..., None]
) -> None:
    graph = traced_small("gpt2", "prefill")
    apart = fuse(graph, plan(APART))
    products = [n for n, k in graph.weighted() for _ in range(k) if n.source == "aten.addmm" and n.op is not None]
    count = Counter(n.source for n, k in apart.weighted() for _ in range(k))
    before = Counter(n.source for n, k in graph.weighted() for _ in range(k))
    assert products
    assert count["aten.add_"] - before["aten.add_"] == len(products)
    assert tensor_flops(apart) == tensor_flops(graph)
    written = sum(n.op.m * n.op.n * 2 for n in products if n.op is not None)
    assert bytes_moved(apart) - bytes_moved(graph) == 2 * written  # read once and written once
    assert_sound(apart)


@settings(deadline=None, max_examples=20)
@given(st.sets(st.sampled_from(NAMES)))
def test_products_with_biases_merge_whole(
    traced_small: Traced, assert_sound: Callable[..., None], names: set[str]
) -> None:
    graph = traced_small("llama", attention_bias=True)
    fused = fuse(graph, plan("bias", "qkv", *sorted(names)))
    assert tensor_flops(fused) == tensor_flops(graph)
    assert bytes_moved(fused) <= bytes_moved(graph)
    assert_sound(fused)


def test_what_is_kept_for_backward_is_what_kernels_keep(traced_small: Traced) -> None:
    """Norms keep input and deviations, SwiGLU its two inputs, products their inputs, attention q, k, v, o and lse."""
    fused = fuse(traced_small("llama"), plan(*MEGATRON))
    written = {t for node in fused.nodes() if node.phase == "forward" for t in node.writes}
    kept = {t for node in fused.nodes() if node.phase == "backward" for t in node.reads if t in written}
    inside = [t for t in kept if fused.tensor(t).size_bytes >= 128]
    tokens, hidden, inter, heads, keys = 32, 64, 128, 4, 32
    norms = 2 * (2 * tokens * hidden + 2 * tokens * hidden + 4 * tokens)
    attention = 2 * tokens * (2 * hidden + 2 * keys) + 4 * heads * tokens
    swiglu = 2 * tokens * 3 * inter
    outside = 2 * tokens * 256 + 2 * 2 * tokens * hidden + 4 * tokens  # logits, last norm's input and output
    assert sum(fused.tensor(t).size_bytes for t in inside) == 4 * (norms + attention + swiglu) + outside


@pytest.mark.parametrize("model", MODELS)
def test_backward_norms_read_no_fp32_copies(model: str, traced_small: Traced) -> None:
    fused = fuse(traced_small(model), plan(*MEGATRON))
    for node, _ in fused.weighted():
        if node.op is not None and node.op.kind == "rms_norm_backward":
            wide = [t for t in node.reads if fused.tensor(t).size_bytes > 8 * node.op.rows]
            assert all(fused.tensor(t).dtype == "bf16" for t in wide)


def test_the_loss_in_place_leaves_no_fp32_logits(traced_small: Traced) -> None:
    graph = traced_small("llama")
    logits = 32 * 256
    for rule, large in (("cross_entropy", ["bf16", "bf16"]), ("cross_entropy_in_place", ["bf16"])):
        fused = fuse(graph, plan(rule))
        used = {t for node in fused.nodes() for t in (*node.reads, *node.writes)}
        found = [fused.tensor(t) for t in used if fused.tensor(t).role == "activation"]
        widths = {"bf16": 2, "fp32": 4}
        assert sorted(t.dtype for t in found if t.size_bytes == logits * widths.get(t.dtype, 1)) == large
    megatron = fuse(graph, plan("cross_entropy_fp32"))
    assert peak_memory(megatron).peak_gib < peak_memory(graph).peak_gib


def test_experts_become_route_permute_products_unpermute(traced_small: Traced) -> None:
    kinds = layer(fuse(traced_small("qwen3_moe"), plan(*MEGATRON)), "forward")
    assert kinds[-7:] == [
        *("moe_route", "moe_permute", "grouped_gemm", "silu_mul", "grouped_gemm", "moe_permute", "elementwise"),
    ]


def test_tied_gradients_are_summed_by_who_makes_them(traced_small: Traced) -> None:
    graph = traced_small("gpt2")
    fused = fuse(graph, plan("gradient_accumulation"))
    adds = [Counter(n.source for n, _ in g.weighted() if "wte" in n.path)["aten.add"] for g in (graph, fused)]
    assert adds == [1, 0]
    writers = [n for n in fused.nodes() if any(fused.tensor(t).role == "gradient" for t in n.writes)]
    makers = Counter(t for n in writers if n.phase == "backward" for t in n.writes)
    assert max(makers.values()) == 2


def test_tables_of_positions_are_there_from_the_start(traced_small: Traced) -> None:
    fused = fuse(traced_small("llama"), plan("int_bookkeeping"))
    assert [n.source for n in fused.blocks[0].nodes] == ["aten.embedding"]
    rotary = {t for n in fused.nodes() for t in n.reads if fused.tensor(t).role == "buffer"}
    assert len(rotary) >= 2


@pytest.mark.parametrize("model", MODELS)
def test_no_rule_changes_nothing_and_every_set_is_stable(model: str, traced_small: Traced) -> None:
    graph = traced_small(model)
    assert fuse(graph, plan()) is graph
    once = fuse(graph, plan(*MEGATRON))
    assert fuse(once, plan("rms_norm", "silu_mul", "qkv", "gate_up")) is once


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(MODELS), st.sets(st.sampled_from(NAMES)))
@example("qwen3_moe", {"router_apart"})  # nothing to take apart
def test_arithmetic_stays_bytes_and_memory_never_grow(
    traced_small: Traced, assert_sound: Callable[..., None], model: str, names: set[str]
) -> None:
    graph = traced_small(model)
    fused = fuse(graph, plan(*sorted(names)))
    assert tensor_flops(fused) == tensor_flops(graph)
    assert bytes_moved(fused) <= bytes_moved(graph)
    assert [b.repeat for b in fused.blocks] == [b.repeat for b in graph.blocks]
    assert sum(t.size_bytes * t.count for t in fused.tensors) == sum(t.size_bytes * t.count for t in graph.tensors)
    assert_sound(fused)
    if not names.intersection(MERGES):
        standing = (buffers(fused) - buffers(graph)) / 2**30  # tables that are made once stay
        assert peak_memory(fused).peak_gib <= peak_memory(graph).peak_gib * (1 + 1e-9) + standing


@pytest.mark.parametrize("model", MODELS)
def test_a_framework_s_rules_together_take_memory_and_time_away(model: str, traced_small: Traced) -> None:
    graph = traced_small(model)
    fused = fuse(graph, plan(*MEGATRON))
    assert peak_memory(fused).peak_gib <= peak_memory(graph).peak_gib
    assert sum(k for _, k in fused.weighted()) < 0.65 * sum(k for _, k in graph.weighted())


def test_a_compiler_leaves_one_kernel_between_products(traced_small: Traced) -> None:
    fused = fuse(traced_small("llama"), plan("pointwise"))
    kinds = layer(fused, "forward")
    assert kinds.count("gemm") == 7
    assert len(kinds) <= 14


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_inference_fuses_too_and_leaves_the_cache_alone(
    kind: str, traced_small: Traced, assert_sound: Callable[..., None]
) -> None:
    graph = traced_small("llama", kind)
    fused = fuse(graph, plan(*MEGATRON))
    assert tensor_flops(fused) == tensor_flops(graph)
    cached = [
        [n.source for n in g.nodes() if any(g.tensor(t).role == "cache" for t in n.writes)] for g in (graph, fused)
    ]
    assert cached[0] == cached[1]
    assert_sound(fused)


def test_unknown_rules_are_named() -> None:
    with pytest.raises(PlanError, match="no rule 'rms_nrom'; did you mean rms_norm"):
        fuse(Graph("g", (), (), 0, 0.0), plan("rms_nrom"))


def test_a_rule_limited_to_the_layers_leaves_the_loss_eager(traced_small: Traced) -> None:
    graph = traced_small("llama")
    everywhere, layers = fuse(graph, plan("pointwise")), fuse(graph, plan("pointwise@layers"))
    assert layer(layers, "forward") == layer(everywhere, "forward")
    assert any(node.source == "aten._log_softmax" for node, _ in layers.weighted())
    assert not any(node.source == "aten._log_softmax" for node, _ in everywhere.weighted())
    with pytest.raises(PlanError, match="limited to 'head'"):
        fuse(graph, plan("pointwise@head"))
