"""Quantization: products in few bits, operands rounded once, weights that weigh what they are stored in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import Cluster
from opcast.datasets.devices import load_device
from opcast.datasets.dtypes import itemsize
from opcast.datasets.ops import KINDS
from opcast.simulator.graph import Graph, Node
from opcast.simulator.memory.lifetimes import peak_memory
from opcast.simulator.passes.fuse import fuse
from opcast.simulator.passes.quantize import RECIPES, quantize, shard_scales
from opcast.simulator.passes.tensor import tensor_parallel
from opcast.simulator.passes.verify import tensor_flops
from opcast.simulator.question.plan import Parallel, Plan, PlanError, Stack

CLUSTER = Cluster("c", "c", "h100_sxm", nodes=1)
BOTH = next(dim for dim in KINDS["quantize"].dims if dim.name == "part").choices.index("both")
TRAINING = [name for name, recipe in RECIPES.items() if recipe.copies]
MODELS = ("llama", "qwen3_moe", "deepseek_v3")
RULES = ("rms_norm", "silu_mul", "rope", "qkv", "gate_up", "cross_entropy")
Traced = Callable[..., Graph]


def plan(quantization: str = "fp8", tp: int = 1, **options: Any) -> Plan:
    return Plan(Parallel(tp=tp), CLUSTER, Stack(fusion=RULES), quantization=quantization, options=options)


def products(graph: Graph) -> list[Node]:
    return [n for n, _ in graph.weighted() if n.op is not None and n.op.kind in ("gemm", "grouped_gemm")]


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(MODELS), st.sampled_from(TRAINING), st.booleans())
def test_arithmetic_and_weights_stay_and_operands_are_there(
    traced_small: Traced, assert_sound: Callable[..., None], model: str, recipe: str, fused: bool
) -> None:
    graph = traced_small(model)
    graph = fuse(graph, plan()) if fused else graph
    made = quantize(graph, plan(recipe))
    assert tensor_flops(made) == tensor_flops(graph)
    assert made.parameters == graph.parameters
    assert [b.repeat for b in made.blocks] == [b.repeat for b in graph.blocks]
    assert_sound(made)
    for node in products(made):
        assert node.op is not None
        if node.op.dtype == recipe:
            assert node.op.out_dtype == "bf16"
            large = [made.tensor(t) for t in node.reads if made.tensor(t).role == "activation"]
            assert all(t.dtype != "bf16" or t.size_bytes < 2 * node.op.n for t in large)


def test_heads_routers_and_attention_stay(traced_small: Traced) -> None:
    made = quantize(traced_small("qwen3_moe"), plan("fp8"))
    kept = {n.path.split(".")[-1] for n in products(made) if n.op is not None and n.op.dtype == "bf16"}
    assert kept == {"lm_head", "gate"}
    assert all("attention" not in n.op.kind or n.op.dtype == "bf16" for n, _ in made.weighted() if n.op is not None)
    skipped = quantize(traced_small("qwen3_moe"), plan("fp8", quantize_skip="o_proj"))
    assert {n.op.dtype for n in products(skipped) if n.op is not None and "o_proj" in n.path} == {"bf16"}


@pytest.mark.parametrize(("skip", "kept"), [(r"layers\.3\.", {3}), (r"layers\.[12]\.", {1, 2}), (r"layers\.0\.", {0})])
def test_layers_that_a_pattern_names_stay(
    skip: str, kept: set[int], traced_small: Traced, assert_sound: Callable[..., None]
) -> None:
    graph = traced_small("llama")
    made = quantize(graph, plan("mxfp8", quantize_skip=skip))
    assert_sound(made)
    assert tensor_flops(made) == tensor_flops(graph)
    for node in made.unrolled().nodes():
        if node.op is not None and node.op.kind == "gemm" and ".layers." in f".{node.path}":
            layer = int(node.path.split("layers.")[1].split(".")[0])
            assert (node.op.dtype == "bf16") == (layer in kept), node.path


def test_an_operand_is_rounded_once_for_all_that_read_it(traced_small: Traced) -> None:
    made = quantize(traced_small("llama"), plan("fp8"))
    forward = next(b for b in made.blocks if b.repeat > 1 and b.nodes[0].phase == "forward")
    reads = Counter(n.reads[0] for n in forward.nodes if n.op is not None and n.op.kind == "quantize")
    assert max(reads.values()) == 1
    activations = [n for n in forward.nodes if n.source == "fused.quantize"]
    assert len(activations) == 4  # for q, k, v together; for the output; for gate and up; for down
    assert sum(n.source == "refresh.fused.quantize" for n in forward.nodes) == 7  # weights, once a step


def test_backward_reads_the_copy_that_forward_made(traced_small: Traced) -> None:
    graph = fuse(traced_small("llama"), plan())
    made = quantize(graph, plan("fp8_block"))
    copies = {t for n in made.nodes() if n.phase == "forward" and n.op and n.op.kind == "quantize" for t in n.writes}
    wgrads = [n for n in made.nodes() if n.op and n.op.kind == "gemm" and n.op.layout == 2 and n.op.dtype != "bf16"]
    assert wgrads
    assert all(copies.intersection(n.reads) for n in wgrads)
    assert peak_memory(made).activations_gib <= peak_memory(graph).activations_gib


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_weights_of_inference_weigh_what_they_are_stored_in(recipe: str, traced_small: Traced) -> None:
    graph = traced_small("llama", "decode")
    made = quantize(graph, plan(recipe))
    linear = {t for n in products(graph) if "lm_head" not in n.path for t in n.reads}
    before = [t for t in graph.tensors if t.role in ("weight", "frozen") and t.size_bytes > 4096]
    assert before
    stored = RECIPES[recipe].weight
    for tensor in graph.tensors:
        if tensor.id in linear and tensor.role in ("weight", "frozen"):
            assert made.tensor(tensor.id).dtype == stored
            assert made.tensor(tensor.id).size_bytes == tensor.size_bytes / 2 * itemsize(stored)
    rounded = sum(k for n, k in made.weighted() if n.op is not None and n.op.kind == "quantize")
    assert (rounded > 0) == bool(RECIPES[recipe].activation)
    assert tensor_flops(made) == tensor_flops(graph)


def test_scales_are_counted(traced_small: Traced) -> None:
    made = quantize(traced_small("llama", "decode"), plan("w4a16"))
    scales = sum(t.size_bytes * t.count for t in made.tensors if t.role == "buffer" and t.dtype == "uint8")
    weights = sum(t.size_bytes * 2 * t.count for t in made.tensors if t.dtype == "int4")
    assert scales == pytest.approx(weights / 128 * 2)


def test_scales_are_shared_out_with_their_weights(traced_small: Traced) -> None:
    whole = quantize(traced_small("llama", "decode"), plan("w4a16"))
    made = shard_scales(tensor_parallel(whole, plan("w4a16", tp=2)), plan("w4a16", tp=2))

    def bytes_of(graph: Graph, dtype: str) -> int:
        return sum(t.size_bytes * t.count for t in graph.tensors if t.dtype == dtype)

    assert bytes_of(made, "int4") == bytes_of(whole, "int4") / 2
    assert bytes_of(made, "uint8") == pytest.approx(bytes_of(whole, "uint8") / 2)


def test_current_scaling_looks_for_the_maximum_first(traced_small: Traced) -> None:
    graph = traced_small("llama")
    delayed, current = quantize(graph, plan("fp8")), quantize(graph, plan("fp8", fp8_scaling="current"))
    counts = [sum(k for n, k in g.weighted() if n.source.endswith("amax")) for g in (delayed, current)]
    assert counts[0] == 0 < counts[1]


def test_one_kernel_writes_both_copies_where_the_framework_has_it(traced_small: Traced, assert_sound: Any) -> None:
    graph = traced_small("llama")
    for recipe in TRAINING:
        apart = plan(recipe)
        at_once = replace(apart, stack=replace(apart.stack, rounds_both=True))
        made, whole = quantize(graph, apart), quantize(graph, at_once)
        assert_sound(whole)
        assert [node.op for node in products(made)] == [node.op for node in products(whole)]
        rounded = [n for n, _ in whole.weighted() if n.source == "fused.quantize" and n.op is not None]
        both = [n for n in rounded if n.op is not None and n.op.part == BOTH]
        assert bool(both) == (recipe != "nvfp4")
        assert all(len(n.writes) == 2 * len(n.reads) for n in both)
        assert not [n for n, _ in whole.weighted() if n.source == "fused.transpose"]


def test_products_of_blackwell_take_operands_of_one_scale_either_way(traced_small: Traced) -> None:
    graph = traced_small("llama")

    def read_and_written(device: str, recipe: str) -> float:
        cluster = Cluster("c", "c", device, nodes=1)
        own = Plan(Parallel(), cluster, Stack(rounds_both=True), quantization=recipe)
        made = quantize(graph, own)
        return sum(k * float(n.op.cost.bytes) for n, k in made.weighted() if n.op and n.op.kind == "quantize")

    assert read_and_written("b200_sxm", "fp8") < read_and_written("h100_sxm", "fp8")
    assert read_and_written("b200_sxm", "fp8_block") == read_and_written("h100_sxm", "fp8_block")

    own = replace(load_device("b200_sxm"), id="of_my_own")
    mine = replace(plan("fp8"), cluster=Cluster("c", "c", own.id), stack=Stack(rounds_both=True), device=own)
    rounded = [n.op for n, _ in quantize(graph, mine).weighted() if n.op and n.op.kind == "quantize"]
    assert rounded
    assert BOTH not in {op.part for op in rounded}


def test_scales_of_nvfp4_have_one_of_the_tensor_above_them(traced_small: Traced) -> None:
    graph = traced_small("llama")
    trained = Counter(n.source for n, _ in quantize(graph, plan("nvfp4")).weighted())
    assert trained["fused.amax"] > 0
    assert trained["fused.quantize"] > trained["fused.amax"]  # along rows, and once more along columns
    prompt = traced_small("llama", "prefill")
    assert not [n for n, _ in quantize(prompt, plan("nvfp4")).weighted() if n.source == "fused.amax"]


def test_rows_with_their_own_scale_are_rounded_along_both_dimensions(traced_small: Traced) -> None:
    graph = traced_small("llama")
    delayed, rowwise = quantize(graph, plan("fp8")), quantize(graph, plan("fp8", fp8_scaling="rowwise"))
    counts = [Counter(n.source.rpartition(".")[2] for n, _ in g.weighted()) for g in (delayed, rowwise)]
    assert counts[0]["transpose"] > 0 == counts[1]["transpose"]
    assert counts[1]["quantize"] == counts[0]["quantize"] + counts[0]["transpose"]


def test_tensor_ranks_gather_16_bits_where_rows_have_their_own_scale(traced_small: Traced) -> None:
    def gathered(scaling: str) -> set[str]:
        own = plan("fp8", fp8_scaling=scaling)
        own = replace(own, parallel=Parallel(tp=2, sequence_parallel=True))
        made = tensor_parallel(quantize(fuse(traced_small("llama"), own), own), own)
        layers = [n for n, _ in made.weighted() if ".layers." in f".{n.path}" and n.op is not None]
        return {n.op.dtype for n in layers if n.op is not None and n.op.kind == "all_gather"}

    assert gathered("current") == {"fp8"}
    assert gathered("rowwise") == {"bf16"}


def test_attention_in_fp8_rounds_what_comes_in(traced_small: Traced, assert_sound: Callable[..., None]) -> None:
    graph = traced_small("llama")
    made = quantize(graph, plan("", attention_dtype="fp8"))
    assert tensor_flops(made) == tensor_flops(graph)
    assert_sound(made)
    attends = [n.op for n, _ in made.weighted() if n.op is not None and n.op.kind.startswith("attention")]
    assert {op.dtype for op in attends} == {"fp8"}
    assert {n.op.dtype for n in products(made) if n.op is not None} == {"bf16"}
    assert {n.phase for n, _ in made.weighted() if n.source == "fused.quantize"} == {"forward", "backward"}


def test_the_cache_in_fp8_is_half_as_large(traced_small: Traced) -> None:
    graph = traced_small("llama", "decode")
    made = quantize(graph, plan("", kv_dtype="fp8"))
    sizes = [sum(t.size_bytes * t.count for t in g.tensors if t.role == "cache") for g in (graph, made)]
    assert sizes[0] == 2 * sizes[1] > 0
    assert {n.op.kv_dtype for n, _ in made.weighted() if n.op is not None and "attention" in n.op.kind} == {1}


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_tensor_ranks_share_the_rounding(recipe: str, traced_small: Traced) -> None:
    graph = quantize(fuse(traced_small("llama"), plan()), plan(recipe))
    shared = tensor_parallel(graph, plan(recipe, tp=2))

    def rounded(g: Graph) -> float:
        refreshed = [(n, k) for n, k in g.weighted() if n.source == "refresh.fused.quantize" and n.op is not None]
        return sum(k * n.op.rows * n.op.cols for n, k in refreshed if n.op is not None)

    assert rounded(shared) == rounded(graph) / 2
    assert tensor_flops(shared) == tensor_flops(graph) / 2


def test_bad_formats_are_named(traced_small: Traced) -> None:
    graph = traced_small("llama")
    assert quantize(graph, plan("")) is graph
    with pytest.raises(PlanError, match="'fp9' has no recipe; did you mean fp8"):
        quantize(graph, plan("fp9"))
    with pytest.raises(
        PlanError, match=r"w4a16 is for inference, .*lora_rank=16; .* take fp8, fp8_block, mxfp8, nvfp4"
    ):
        quantize(graph, plan("w4a16"))
    with pytest.raises(PlanError, match="kv_dtype='fp3' is not one of same, fp8, int8"):
        quantize(graph, plan("", kv_dtype="fp3"))
