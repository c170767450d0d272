"""Layers of linear and sparse attention among ranks: who has which heads, and that no work is lost or done twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from opcast.datasets.clusters import load_cluster
from opcast.datasets.ops import KINDS
from opcast.simulator.graph import Graph, Node
from opcast.simulator.passes.context import context_parallel
from opcast.simulator.passes.fuse import fuse
from opcast.simulator.passes.serving import serve
from opcast.simulator.passes.tensor import tensor_parallel
from opcast.simulator.question.plan import Parallel, Plan, PlanError, Stack, load_stack
from opcast.simulator.trace import Workload, trace
from opcast.simulator.trace.models import resolve

CLUSTER = load_cluster("dgx_h100")
HYBRID = dict(resolve("nemotron_3_nano_30b_a3b").config or {}) | {
    "hybrid_override_pattern": "M*-M",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 512,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 4,
    "chunk_size": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SPARSE = dict(resolve("glm_5").config or {}) | {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "head_dim": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "vocab_size": 512,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "first_k_dense_replace": 2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def plan(stack: str = "megatron", **parallel: Any) -> Plan:
    return Plan(Parallel(**parallel), CLUSTER, load_stack(stack))


def flops(graph: Graph) -> Counter[tuple[str, str]]:
    """Of products and mixers, by phase and kind."""
    found: Counter[tuple[str, str]] = Counter()
    for node, times in graph.weighted():
        if node.op is not None and KINDS[node.op.kind].family in ("gemm", "attention", "linear_attention"):
            found[node.phase, node.op.kind] += times * float(node.op.cost.flops)
    return found


@pytest.fixture(scope="module")
def hybrid() -> Graph:
    return fuse(trace(HYBRID, Workload("train", batch=2, seq_len=64, attention="fused")), plan())


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_ranks_share_all_work_of_a_hybrid(hybrid: Graph, ranks: int, sequence: bool) -> None:
    shared = tensor_parallel(hybrid, plan(tp=ranks, sequence_parallel=sequence))
    whole, own = flops(hybrid), flops(shared)
    assert whole["backward", "linear_attention_backward"] > 0
    assert own.keys() == whole.keys()
    for key, work in whole.items():
        assert own[key] * ranks == pytest.approx(work), key
    scans = {node.op.groups for node, _ in shared.weighted() if node.op and node.op.kind.startswith("linear")}
    assert scans == {4 // ranks}


def count(graph: Graph, phase: str, name: str) -> int:
    """Nodes of a name in the mixers of a graph."""
    return sum(
        times for node, times in graph.weighted() if (node.phase, node.source) == (phase, name) and node.op is not None
    )


@pytest.mark.parametrize("batch", [1, 2])
def test_megatron_gates_in_the_scan_and_convolves_again(batch: int) -> None:
    eager = trace(HYBRID, Workload("train", batch=batch, seq_len=64, attention="fused"))
    apart = fuse(eager, Plan(Parallel(), CLUSTER, Stack(fusion=("rms_norm",))))
    one = fuse(eager, Plan(Parallel(), CLUSTER, Stack(fusion=("rms_norm", "mamba"))))
    scans = count(eager, "forward", "opcast.linear_attention_prefill")
    assert scans == count(one, "backward", "opcast.linear_attention_backward") == 2
    assert count(apart, "backward", "opcast.causal_conv1d") == 0
    assert count(one, "backward", "opcast.causal_conv1d") == scans
    assert count(one, "forward", "fused.pointwise") == count(one, "backward", "fused.pointwise") == scans
    assert count(apart, "backward", "aten.cat") == 2 * scans  # of what the mixer's parts got, and of its first product
    several = scans if batch > 1 else 0
    assert count(one, "backward", "aten.cat") == several
    assert count(one, "forward", "aten.clone") - count(apart, "forward", "aten.clone") == 2 * several
    halves = tensor_parallel(one, plan(tp=2))
    for phase, tensors in (("forward", 2), ("backward", 6)):
        moved = {node.op.cost.bytes for node, _ in halves.weighted() if gating(node, phase) and node.op}
        assert moved == {tensors * batch * 64 * 8 * 16 * 2 / 2}


def gating(node: Node, phase: str) -> bool:
    return node.source == "fused.pointwise" and node.phase == phase and node.path.endswith("mixer")


def test_heads_that_ranks_cannot_share_are_named(hybrid: Graph) -> None:
    with pytest.raises(PlanError, match="does not divide the 8 attention heads"):
        tensor_parallel(hybrid, plan(tp=3))


@pytest.mark.parametrize("style", ["ring", "allgather", "ulysses"])
def test_context_ranks_exchange_heads_of_scans_whatever_attention_does(hybrid: Graph, style: str) -> None:
    shared = context_parallel(hybrid, plan(cp=2, cp_style=style))
    whole, own = flops(hybrid), flops(shared)
    for kind in ("linear_attention_prefill", "linear_attention_backward"):
        key = ("backward" if kind.endswith("backward") else "forward", kind)
        assert own[key] * 2 == pytest.approx(whole[key])
    exchanged = [
        node for node, _ in shared.weighted() if node.op and node.op.kind == "all_to_all" and "mixer" in node.path
    ]
    assert len(exchanged) >= 8  # two before and after each of two scans, forward and backward
    channels = {node.op.rows for node, _ in shared.weighted() if node.op and node.op.kind.startswith("causal_conv1d")}
    assert channels == {64}


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_engines_attend_sparsely_to_latents(kind: str) -> None:
    workload = Workload(kind, batch=2, seq_len=64, attention="fused", cache="static")
    served = serve(trace(SPARSE, workload), plan("sglang"))
    (op,) = {node.op for node, _ in served.weighted() if node.op and node.op.kind == f"sparse_attention_{kind}"}
    assert (op.latent, op.heads_q, op.heads_kv, op.head_dim, op.v_head_dim, op.topk) == (1, 8, 1, 24, 16, 8)
    ranks = tensor_parallel(served, plan("sglang", tp=4))
    kinds = {node.op.kind: node.op for node, _ in ranks.weighted() if node.op}
    assert kinds[f"sparse_attention_{kind}"].heads_q == 2
    assert kinds[f"sparse_index_{kind}"].heads == 2  # every rank chooses for itself
    with pytest.raises(PlanError, match=r"an indexer chooses; take parallel\.cp=1"):
        context_parallel(served, plan("sglang", cp=2))


def test_scans_leave_their_states_where_engines_keep_them(assert_sound):
    workload = Workload("prefill", batch=2, seq_len=32, cache="static", optimizer="none", attention="fused")
    graph = trace(HYBRID, workload, "bf16")
    served = serve(graph, Plan(Parallel(), CLUSTER, Stack("engine", fusion=("paged_attention",))))
    assert_sound(served)
    copies = [
        {n.source for n in g.nodes() for t in n.writes if g.tensor(t).role == "cache"} & {"aten.zeros", "aten.copy_"}
        for g in (graph, served)
    ]
    assert copies == [{"aten.zeros", "aten.copy_"}, set()]
    kept = [sum(t.size_bytes * t.count for t in g.tensors if t.role == "cache") for g in (graph, served)]
    assert kept[0] == kept[1] > 0
