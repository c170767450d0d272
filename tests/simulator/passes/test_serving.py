"""What engines run in place of transformers' own code: the same weights and caches, other kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from opcast.datasets.clusters import load_cluster
from opcast.simulator.graph import Graph
from opcast.simulator.passes.order import fuse_rest
from opcast.simulator.passes.quantize import quantize
from opcast.simulator.passes.serving import drop_precomputed, fuse_quantization, serve, ungroup_heads
from opcast.simulator.question.plan import Parallel, Plan, Stack
from opcast.simulator.trace import Workload, trace

EVERYTHING = ("paged_attention", "rope_in_attention", "absorbed_mla", "fused_moe")


def plan(*names: str, **changes: object) -> Plan:
    return Plan(
        Parallel(), replace(load_cluster("dgx_h100"), devices_per_node=1), Stack("engine", fusion=names), **changes
    )


def step(model: object, kind: str = "decode", batch: int = 3, length: int = 17) -> Graph:
    workload = Workload(kind, batch=batch, seq_len=length, cache="static", optimizer="none", attention="fused")
    return trace(model, workload, "bf16")


def kinds(graph: Graph) -> Counter[str]:
    return Counter(n.op.kind if n.op else n.source for n, times in graph.weighted() for _ in range(times))


def ops(graph: Graph, kind: str) -> list:
    return [node.op for node, _ in graph.weighted() if node.op is not None and node.op.kind == kind]


def weight_bytes(graph: Graph) -> int:
    read = {t for node in graph.nodes() for t in node.reads}
    return int(sum(graph.tensor_bytes[t] for t in read if graph.tensor(t).role == "weight"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_weights_stay_and_reads_come_after_writes(family, kind, small_model, assert_sound):
    before = step(small_model(family), kind)
    after = drop_precomputed(serve(before, plan(*EVERYTHING)), plan(*EVERYTHING))
    assert_sound(after)
    assert weight_bytes(after) == weight_bytes(before)
    assert after.parameters == before.parameters
    assert len(list(after.nodes())) < len(list(before.nodes()))
    assert {block.repeat for block in after.blocks} == {block.repeat for block in before.blocks}


def test_without_names_a_graph_is_the_same_object(small_model):
    graph = step(small_model("llama"))
    assert drop_precomputed(serve(graph, plan()), plan()) is graph
    assert fuse_quantization(graph, plan()) is graph
    assert ungroup_heads(graph, plan()) is graph


def test_kernels_append_to_caches_as_large_as_before(small_model):
    graph = step(small_model("llama"))
    served = serve(graph, plan("paged_attention"))
    assert {(op.heads_q, op.heads_kv, op.seq_q) for op in ops(served, "attention_decode")} == {(4, 2, 1)}
    assert not any(node.source == "aten.index_copy_" for node in served.nodes())
    caches = [sum(t.size_bytes * t.count for t in g.tensors if t.role == "cache") for g in (graph, served)]
    assert caches[0] == caches[1] > 0


def test_kernels_of_a_prompt_write_the_cache_of_a_window_themselves(small_model, assert_sound):
    graph = step(small_model("gemma2"), "prefill", length=17)
    served = serve(graph, plan("paged_attention"))
    assert_sound(served)
    assert {"aten.zeros", "aten.copy_"} <= filling(graph)
    assert not {"aten.zeros", "aten.copy_"} & filling(served)
    caches = [sum(t.size_bytes * t.count for t in g.tensors if t.role == "cache") for g in (graph, served)]
    assert caches[0] == caches[1] > 0


def filling(graph: Graph) -> set[str]:
    return {node.source for node in graph.nodes() for t in node.writes if graph.tensor(t).role == "cache"}


def test_only_kernels_of_an_engine_are_left(small_model):
    names = plan("paged_attention")
    found = kinds(drop_precomputed(serve(step(small_model("llama")), names), names))
    assert found["rope"] == found["attention_decode"] == 3
    assert found["copy"] == 0
    inside = plan("paged_attention", "rope_in_attention")
    assert kinds(drop_precomputed(serve(step(small_model("llama")), inside), inside))["rope"] == 0


def test_latent_attention_decodes_from_its_latent_cache(small_model):
    graph = step(small_model("deepseek_v3"), batch=3, length=17)
    served = serve(graph, plan("absorbed_mla"))
    (op,) = set(ops(served, "mla_decode"))
    assert (op.heads, op.seq_kv, op.kv_lora_rank, op.qk_nope_head_dim, op.qk_rope_head_dim) == (4, 18, 16, 16, 8)
    assert not ops(served, "attention_decode")
    assert all(gemm.m <= 3 for gemm in ops(served, "gemm"))  # no cached token is projected again
    prompt = serve(step(small_model("deepseek_v3"), "prefill"), plan("absorbed_mla"))
    assert {op.kind for op in ops(prompt, "mla_prefill")} == {"mla_prefill"}


def test_latents_of_a_prompt_are_written_before_products_read_them(small_model):
    names = plan(*EVERYTHING, "rms_norm")
    served = fuse_rest(serve(step(small_model("deepseek_v3"), "prefill"), names), names)
    written: set[int] = set()
    for node in served.nodes():
        if node.op is not None and node.op.kind == "gemm":
            assert {t for t in node.reads if served.tensor(t).role == "cache"} <= written
        written |= set(node.writes)
    latents = [op for op in ops(served, "rms_norm") if op.cols == 16]
    assert len(latents) == len(ops(served, "mla_prefill")) > 0


def test_latents_are_one_product_and_absorbed_projections_keep_16_bits(small_model):
    names = plan("absorbed_mla", "latent_down", quantization="fp8")
    graph = step(small_model("deepseek_v3"))
    made = quantize(fuse_rest(serve(graph, names), names), names)
    down = [node.op for node, _ in made.weighted() if node.source == "fused.latent_down"]
    assert {(op.n, op.k, op.dtype) for op in down} == {(24 + 16 + 8, 64, "fp8")}
    absorbed = [node.op for node, _ in made.weighted() if node.source.startswith("fused.absorb")]
    assert {op.dtype for op in absorbed} == {"bf16"}
    assert weight_bytes(serve(graph, names)) == weight_bytes(graph)


def test_routed_experts_are_one_kernel_of_the_same_arithmetic(small_model):
    graph = step(small_model("qwen3_moe"), "prefill", batch=2, length=16)
    served = serve(graph, plan("fused_moe"))
    (op,) = set(ops(served, "fused_moe"))
    assert (op.tokens, op.experts, op.topk, op.inter, op.gated) == (32, 8, 2, 32, 1)
    grouped = sum(float(each.cost.flops) for each in ops(graph, "grouped_gemm"))
    assert float(op.cost.flops) == pytest.approx(grouped)
    assert kinds(served)["moe_route"] == 3
    assert not ops(served, "grouped_gemm")


def test_decode_kernels_that_share_nothing_read_more(small_model):
    graph = serve(step(small_model("llama", num_attention_heads=8)), plan("paged_attention"))
    (op,), (alone,) = (set(ops(g, "attention_decode")) for g in (graph, ungroup_heads(graph, plan("ungrouped_decode"))))
    assert op.heads_kv < alone.heads_kv == alone.heads_q < op.heads_q
