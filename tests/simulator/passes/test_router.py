"""Routers on matrix units: which products leave fp32, for what, and that nothing else changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from opcast.datasets.clusters import Cluster
from opcast.simulator.graph import Graph
from opcast.simulator.passes.fuse import fuse
from opcast.simulator.question.plan import Parallel, Plan, Stack
from opcast.simulator.trace import Workload, trace

CLUSTER = Cluster("c", "c", "h100_sxm")


def fused(graph: Graph, *rules: str) -> Graph:
    return fuse(graph, Plan(Parallel(), CLUSTER, Stack(fusion=rules)))


@pytest.fixture(scope="module")
def deepseek(small_model: Callable[..., dict[str, Any]]) -> Graph:
    return trace(
        small_model("deepseek_v3", layers=4), Workload("train", batch=2, seq_len=16, attention="fused"), "bf16"
    )


def kernels(graph: Graph, source: str) -> Counter[str]:
    nodes = [(node, count) for node, count in graph.weighted() if node.source == source and node.path.endswith("gate")]
    return Counter({phase: sum(k for n, k in nodes if n.phase == phase) for phase in ("forward", "backward")})


def gates(graph: Graph) -> Counter[tuple[str, str, str]]:
    return Counter(
        (node.phase, node.op.dtype, node.op.out_dtype)
        for node, _ in graph.weighted()
        if node.op is not None and node.op.kind == "gemm" and node.path.endswith("gate")
    )


def test_routers_multiply_in_16_bits_forward_and_tf32_backward(deepseek: Graph) -> None:
    before, after = fused(deepseek, "moe"), fused(deepseek, "moe", "router")
    assert {dtype for _, dtype, _ in gates(before)} == {"fp32"}
    assert {key[1:] for key in gates(after) if key[0] == "forward"} == {("bf16", "fp32")}
    assert {key[1:] for key in gates(after) if key[0] == "backward"} == {("tf32", "fp32")}
    assert gates(after).total() == gates(before).total()


def test_rows_of_experts_move_in_their_own_bits_and_arithmetic_stays(deepseek: Graph) -> None:
    before, after = fused(deepseek, "moe"), fused(deepseek, "moe", "router")
    moves = {n.op.dtype for n, _ in after.weighted() if n.op and n.op.kind == "moe_permute"}
    assert moves == {"bf16"}
    flops = [
        sum(k * n.op.cost.flops for n, k in g.weighted() if n.op and n.op.cost.unit == "tensor")
        for g in (before, after)
    ]
    assert flops[0] == flops[1]


def test_routers_that_never_were_in_fp32_stay(small_model: Callable[..., dict[str, Any]]) -> None:
    graph = trace(small_model("qwen3_moe", layers=4), Workload("train", batch=2, seq_len=16, attention="fused"), "bf16")
    assert gates(fused(graph, "moe", "router")) == gates(fused(graph, "moe"))


def test_routers_in_kernels_of_torch_select_three_times(deepseek: Graph) -> None:
    before, after = fused(deepseek, "moe"), fused(deepseek, "moe", "router_apart")
    layers = kernels(before, "fused.moe")["forward"]
    assert layers > 0
    assert kernels(before, "aten.topk").total() == 0
    assert kernels(after, "aten.topk") == Counter({"forward": 3 * layers, "backward": 0})
    added = kernels(after, "fused.pointwise") - kernels(before, "fused.pointwise")
    assert added == Counter({"forward": layers, "backward": layers})
    ops = [n.op for n, _ in after.weighted() if n.source == "aten.topk"]
    assert {(op.kind, op.kernels) for op in ops if op is not None} == {("moe_route", 1)}


def test_an_eager_router_chooses_by_topk_alone_and_a_fused_one_by_its_own_kernel(
    small_model: Callable[..., dict[str, Any]],
) -> None:
    """The softmax of the eager one is an operator of its own: nothing of it may be in the choice."""
    graph = trace(small_model("qwen3_moe"), Workload("prefill", 2, 16), "bf16")
    router = {node.source for node in graph.nodes() if node.path.endswith("gate")}
    assert {"aten._softmax", "aten.topk"} <= router
    choices = [
        {node.op.kernels for node in each.nodes() if node.op is not None and node.op.kind == "moe_route"}
        for each in (graph, fused(graph, "moe"))
    ]
    assert choices == [{1}, {0}]
