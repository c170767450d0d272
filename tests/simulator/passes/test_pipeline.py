"""Chunks of a pipeline: nothing lost, nothing twice, everything in its place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from opcast.datasets.clusters import load_cluster
from opcast.datasets.ops import make_op
from opcast.simulator.graph import ROLES, Graph, Node
from opcast.simulator.passes.pipeline import boundaries, layer_stack, split_pipeline
from opcast.simulator.passes.rewriting.draft import Draft, Item
from opcast.simulator.question.plan import Parallel, Plan, PlanError
from opcast.simulator.trace import Workload, trace

CLUSTER = replace(load_cluster("dgx_h100"), nodes=2)
WORK = Workload("train", batch=2, seq_len=16, attention="fused")


@pytest.fixture(scope="module", params=[("llama", 6), ("gemma2", 6), ("deepseek_v3", 7), ("gpt2", 5)])
def graph(request, small_model) -> Graph:
    return trace(small_model(*request.param), WORK)


def plan(pp: int, vpp: int = 1, stages: tuple[int, ...] = ()) -> Plan:
    return Plan(Parallel(pp=pp, vpp=vpp, stages=stages), CLUSTER)


def work(graph: Graph, phase: str) -> list[Node]:
    return [node for node in graph.nodes() if node.phase == phase]


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_chunks_one_after_the_other_are_the_graph(graph: Graph, pp: int) -> None:
    chunks = split_pipeline(graph, plan(pp))
    if len({id(chunk.graph) for chunk in chunks}) < len(chunks):
        pytest.skip("chunks are shared")
    names: list[set[tuple[int, int]]] = [set() for _ in chunks]  # (id in the chunk, id in the graph)
    for phase, turn in (("forward", 1), ("backward", -1)):
        whole = iter(work(graph, phase))
        for chunk, own in list(zip(chunks, names, strict=True))[::turn]:
            for node in work(chunk.graph, phase):
                of = next(whole)
                assert (node.source, node.path, node.op) == (of.source, of.path, of.op)
                for here, there in ((node.reads, of.reads), (node.writes, of.writes), (node.frees, of.frees)):
                    own.update(zip(here, there, strict=True))
        assert next(whole, None) is None
    for chunk, own in zip(chunks, names, strict=True):
        here, there = np.array(sorted(own)).T
        assert (np.diff(here) > 0).all()  # one name each, in the same order
        assert (np.diff(there) > 0).all()
        assert (chunk.graph.tensor_bytes[here] == graph.tensor_bytes[there]).all()
        assert (chunk.graph.tensor_roles[here] == graph.tensor_roles[there]).all()


def test_a_chunk_has_no_tensors_of_others(graph: Graph) -> None:
    for chunk in split_pipeline(graph, plan(2)):
        named = {t for node in chunk.graph.nodes() for t in (*node.reads, *node.writes, *node.frees)}
        assert named == set(range(chunk.graph.tensor_count))
        working = {t for node in chunk.graph.nodes() if node.phase != "optimizer" for t in (*node.reads, *node.writes)}
        gradients = {t for t in named if chunk.graph.tensor(t).role == "gradient"}
        assert gradients <= working


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2)])
def test_work_weights_and_optimizer_are_shared_out(graph: Graph, pp: int, vpp: int) -> None:
    chunks = split_pipeline(graph, plan(pp, vpp))
    assert [chunk.stage for chunk in chunks] == [c % pp for c in range(pp * vpp)]
    assert sum(chunk.layers for chunk in chunks) == layer_stack(graph)[1]
    assert flops(graph) == pytest.approx(sum(flops(chunk.graph) for chunk in chunks))
    held = sum(chunk.graph.parameters for chunk in chunks)
    embedding = 256 * 64
    assert held - graph.parameters in (0, embedding)  # one that the head shares stands on the first and the last stage
    updated = sum(n.op.numel for chunk in chunks for n, _ in chunk.graph.weighted() if n.op and n.op.kind == "adamw")
    assert updated == pytest.approx(held, rel=1e-3)


def test_optimizer_nodes_without_weights_stay(small_model) -> None:
    """A norm of gradients is shared out by the gradients that a chunk has; what reads neither runs on every stage."""
    draft = Draft(trace(small_model("llama", 6), WORK))
    last = draft.sections[-1].items
    update = next(item.node for item in last if item.node.op is not None and item.node.op.kind == "adamw")
    gradients = tuple(t for t in update.reads if draft.roles[t] == ROLES.index("gradient"))
    norm = make_op("elementwise", dtype="fp32", numel=60_000)
    last.append(Item(replace(update, op=norm, reads=gradients, writes=(), frees=())))
    last.append(Item(replace(update, op=None, reads=(), writes=(), frees=(), bytes_moved=8)))
    chunks = [chunk.graph for chunk in split_pipeline(draft.graph(), plan(pp=2))]
    ends = [work(chunk, "optimizer")[-2:] for chunk in chunks]
    assert [counter.op for _, counter in ends] == [None, None]
    assert sum(node.op.numel for node, _ in ends) == pytest.approx(norm.numel, abs=2)
    assert all(0 < node.op.numel < norm.numel for node, _ in ends)


def flops(graph: Graph) -> float:
    found = ((node.op.cost, times) for node, times in graph.weighted() if node.op and node.phase != "optimizer")
    return sum(float(cost.flops) * times for cost, times in found)


def test_hidden_states_are_what_is_sent(graph: Graph) -> None:
    *senders, last = split_pipeline(graph, plan(2))
    hidden = 2 * 16 * 64 * 2
    assert [chunk.send_bytes for chunk in senders] == [hidden]
    assert last.send_bytes == 0


def test_middle_chunks_share_one_graph(small_model) -> None:
    chunks = split_pipeline(trace(small_model("llama", 8), WORK), plan(8))
    assert len({id(chunk.graph) for chunk in chunks}) == 3


def test_stages_of_the_users_own_choice(small_model) -> None:
    graph = trace(small_model("llama", 6), WORK)
    assert [chunk.layers for chunk in split_pipeline(graph, plan(2, stages=(4, 2)))] == [4, 2]
    with pytest.raises(PlanError, match=r"add up to the 6"):
        split_pipeline(graph, plan(2, stages=(4, 4)))
    with pytest.raises(PlanError, match="at most 6"):
        split_pipeline(graph, plan(16))
    alone = split_pipeline(graph, plan(8))
    assert [chunk.layers for chunk in alone] == [0, 1, 1, 1, 1, 1, 1, 0]
    assert all(chunk.send_bytes == 2 * 16 * 64 * 2 for chunk in alone[:-1])


def test_ends_are_the_shortest() -> None:
    assert boundaries(10, 4, (), "model") == [0, 2, 5, 8, 10]
    assert boundaries(8, 4, (), "model") == [0, 2, 4, 6, 8]


class Bare(nn.Module):
    """A module without a list of layers, and what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x).relu()).square().mean()

    def example_inputs(self, work: Workload) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(work.batch, 32),)


def test_a_model_without_layers_is_one_chunk() -> None:
    graph = trace(Bare, WORK, "fp32")
    (whole,) = split_pipeline(graph, plan(1))
    assert whole.graph is graph
    with pytest.raises(PlanError, match=r"no list of layers.* take parallel\.pp=1 parallel\.vpp=1"):
        split_pipeline(graph, plan(2))
