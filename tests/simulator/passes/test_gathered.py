"""Gathered operands that stay: fewer collectives, more memory, the same work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from opcast.datasets.clusters import Cluster
from opcast.simulator.graph import Graph
from opcast.simulator.memory.lifetimes import peak_memory
from opcast.simulator.passes.gathered import keep_gathered
from opcast.simulator.passes.recompute import recompute
from opcast.simulator.passes.tensor import tensor_parallel
from opcast.simulator.question.plan import Parallel, Plan, Stack
from opcast.simulator.trace import Workload, trace

CLUSTER = Cluster("c", "c", "h100_sxm", devices_per_node=2)
Make = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def shared(small_model: Make) -> dict[str, Graph]:
    workload = Workload("train", batch=2, seq_len=32, attention="fused")
    found = {family: trace(small_model(family, layers=4), workload, "bf16") for family in ("llama", "gemma2")}
    return {family: tensor_parallel(graph, plan()) for family, graph in found.items()}


def plan(**stack: Any) -> Plan:
    return Plan(Parallel(tp=2, sequence_parallel=True), CLUSTER, Stack(**stack))


def gathers(graph: Graph, phase: str) -> int:
    return sum(n.op is not None and n.op.kind == "all_gather" and n.phase == phase for n in graph.nodes())


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_what_stays_is_not_gathered_again(family: str, policy: str, shared: dict[str, Graph]):
    graph = shared[family]
    made = recompute(keep_gathered(graph, plan(keep_gathered=True)), replace(plan(), recompute=policy))
    assert gathers(made, "forward") == gathers(graph, "forward")
    assert gathers(graph, "backward") - gathers(made, "backward") == 2 * 4
    if policy == "none":
        assert peak_memory(made).activations_gib > peak_memory(graph).activations_gib
    written: set[int] = set()
    freed: set[int] = set()
    for node in made.nodes():
        assert not freed & {*node.reads, *node.writes}, node
        for tensor in node.reads:
            assert tensor in written or tensor in node.writes or made.tensor(tensor).role != "activation", node
        written.update(node.writes)
        assert not freed & set(node.frees), node
        freed.update(node.frees)


def test_others_keep_their_graph(shared: dict[str, Graph]):
    assert keep_gathered(shared["llama"], plan()) is shared["llama"]
    alone = Plan(Parallel(), CLUSTER, Stack(keep_gathered=True))
    assert keep_gathered(shared["llama"], alone) is shared["llama"]
