"""Overlap: collectives leave the compute stream, bytes and arithmetic stay, dependences hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from opcast.datasets.clusters import Cluster
from opcast.simulator.graph import REST_SUFFIX, Graph
from opcast.simulator.passes.fuse import fuse
from opcast.simulator.passes.overlap import overlap
from opcast.simulator.passes.tensor import tensor_parallel
from opcast.simulator.question.plan import Parallel, Plan, Stack

CLUSTER = Cluster("c", "c", "h100_sxm", nodes=1)
RULES = ("rms_norm", "silu_mul", "rope", "qkv", "gate_up", "cross_entropy")
Traced = Callable[..., Graph]


def plan(sequence: bool, *groups: str) -> Plan:
    return Plan(Parallel(tp=2, sequence_parallel=sequence), CLUSTER, Stack(fusion=RULES, overlap=groups))


def shared(graph: Graph, sequence: bool) -> Graph:
    return tensor_parallel(fuse(graph, plan(sequence)), plan(sequence))


def totals(graph: Graph) -> tuple[float, float, float]:
    """FLOPs of products, and bytes and weights of communication."""
    nodes = [(n, k) for n, k in graph.weighted() if n.op is not None]
    flops = sum(k * float(n.op.cost.flops) for n, k in nodes if n.op is not None and n.op.cost.unit == "tensor")
    sent = sum(k * n.op.size_bytes for n, k in nodes if n.op is not None and n.group)
    weights = sum(t.size_bytes * t.count for t in graph.tensors if t.role == "weight")
    return flops, sent, weights


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_bytes_and_arithmetic_stay(
    model: str, sequence: bool, traced_small: Traced, assert_sound: Callable[..., None]
) -> None:
    graph = shared(traced_small(model), sequence)
    made = overlap(graph, plan(sequence, "tp", "dp"))
    assert totals(made) == totals(graph)
    assert_sound(made)
    streams = {n.stream for n, _ in made.weighted() if n.group == "tp" and n.op is not None and n.phase != "optimizer"}
    assert streams == {"comm:tp"}


def test_only_named_groups_move(traced_small: Traced) -> None:
    graph = shared(traced_small("llama"), True)
    assert overlap(graph, plan(True, "dp", "pp")) is graph
    assert overlap(graph, plan(True)) is graph


def test_gathers_and_products_are_cut_in_chunks(traced_small: Traced) -> None:
    made = overlap(shared(traced_small("llama"), True), plan(True, "tp"))
    forward = next(b for b in made.blocks if b.repeat > 1 and b.nodes[0].phase == "forward")
    qkv = [n for n in forward.nodes if n.source.removesuffix(REST_SUFFIX) == "fused.qkv"]
    gathers = [n for n in forward.nodes if n.source.removesuffix(REST_SUFFIX) == "nccl.all_gather"]
    assert [n.op.m for n in qkv if n.op is not None] == [16, 16]
    assert gathers[0].writes[0] in qkv[0].reads  # the first piece waits for the first chunk alone
    assert gathers[1].writes[0] in qkv[1].reads
    assert gathers[1].writes[0] not in qkv[0].reads


def test_tensor_ranks_may_overlap_in_forward_passes_alone(
    traced_small: Traced, assert_sound: Callable[..., None]
) -> None:
    graph = shared(traced_small("llama"), True)
    made = overlap(graph, plan(True, "tp_forward"))
    assert totals(made) == totals(graph)
    assert_sound(made)
    sent = [n for n, _ in made.weighted() if n.group == "tp" and n.op is not None]
    assert {n.stream for n in sent if n.phase == "forward"} == {"comm:tp"}
    assert {n.stream for n in sent if n.phase == "backward"} == {"compute"}
    assert not any(n.source.endswith(REST_SUFFIX) for n, _ in made.weighted() if n.phase == "backward")


def test_without_chunks_a_ranks_own_rows_run_beside_a_whole_gather(
    traced_small: Traced, assert_sound: Callable[..., None]
) -> None:
    graph = shared(traced_small("llama"), True)
    whole = plan(True, "tp")
    made = overlap(graph, replace(whole, stack=replace(whole.stack, tensor_chunks=False)))
    assert totals(made) == totals(graph)
    assert_sound(made)
    forward = next(b for b in made.blocks if b.repeat > 1 and b.nodes[0].phase == "forward")
    qkv = [n for n in forward.nodes if n.source.removesuffix(REST_SUFFIX) == "fused.qkv"]
    gather = next(n for n in forward.nodes if n.source == "nccl.all_gather")
    assert [n.op.m for n in qkv if n.op is not None] == [16, 16]
    assert gather.writes[0] not in qkv[0].reads
    assert set(gather.reads) <= set(qkv[0].reads)
    assert gather.writes[0] in qkv[1].reads
    sources = [n.source for n in forward.nodes if n.op is not None and n.group == "tp"]
    assert len(sources) == 4  # two gathers, two scatters
    assert not any(each.endswith(REST_SUFFIX) for each in sources)


@pytest.mark.parametrize("sequence", [False, True])
def test_weight_gradients_run_while_input_gradients_are_summed(sequence: bool, traced_small: Traced) -> None:
    made = overlap(shared(traced_small("llama"), sequence), plan(sequence, "tp"))
    backward = next(b for b in made.blocks if b.repeat > 1 and b.nodes[0].phase == "backward")
    sums = ("nccl.reduce_scatter", "nccl.all_reduce")
    last = max(i for i, n in enumerate(backward.nodes) if n.source.removesuffix(REST_SUFFIX) in sums)
    names = [n.op.kind if n.op is not None else "" for n in backward.nodes[last + 1 :]]
    assert "gemm" in names[: names.index("rms_norm_backward")]
