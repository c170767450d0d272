"""Attention in parts: all pairs are computed, scores stay for the backward pass, lifetimes are sound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from opcast.datasets.clusters import Cluster
from opcast.simulator.graph import Graph
from opcast.simulator.memory.lifetimes import peak_memory
from opcast.simulator.passes.context import context_parallel
from opcast.simulator.passes.unfuse import unfuse_attention
from opcast.simulator.question.plan import Parallel, Plan, PlanError, Stack
from opcast.simulator.trace import Workload, trace

BATCH, TOKENS, LAYERS = 8, 64, 4
PLAN = Plan(Parallel(), Cluster("c", "c", "h100_sxm"), Stack(attention="unfused"))


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def graph(request: pytest.FixtureRequest, small_model: Callable[..., dict[str, Any]]) -> Graph:
    workload = Workload("train", batch=BATCH, seq_len=TOKENS, attention="fused")
    return trace(small_model(request.param, layers=LAYERS), workload, "bf16")


def test_a_stack_with_fused_attention_changes_nothing(graph: Graph) -> None:
    assert unfuse_attention(graph, Plan(Parallel(), PLAN.cluster, Stack())) is graph


@pytest.mark.parametrize("style", ["ring", "ring_allgather"])
def test_a_ring_that_trains_needs_a_fused_kernel(graph: Graph, style: str) -> None:
    plan = replace(PLAN, parallel=Parallel(cp=2, cp_style=style))
    with pytest.raises(PlanError, match=f"cp_style={style} merges what fused .*; take parallel.cp_style=allgather"):
        unfuse_attention(context_parallel(graph, plan), plan)
    gathers = replace(plan, parallel=Parallel(cp=2, cp_style="allgather"))
    assert unfuse_attention(context_parallel(graph, gathers), gathers) is not graph


def test_every_pair_is_computed_and_folding_is_kept(graph: Graph) -> None:
    made = unfuse_attention(graph, PLAN)
    assert [block.repeat for block in made.blocks] == [block.repeat for block in graph.blocks]
    fused = [n.op for n, _ in graph.weighted() if n.op and n.op.kind.startswith("attention")]
    assert fused
    assert not [n for n, _ in made.weighted() if n.op and n.op.kind.startswith("attention")]
    pairs = BATCH * fused[0].heads_q * TOKENS**2
    products = [(n.op, times) for n, times in made.weighted() if n.op and n.op.kind == "gemm" and n.op.batch > 1]
    assert sum(times for _, times in products) == 6 * LAYERS
    assert {float(op.cost.flops) for op, _ in products} == {2.0 * pairs * fused[0].head_dim}


def test_eager_attention_scales_and_masks_scores_by_kernels_of_their_own(graph: Graph) -> None:
    eager = unfuse_attention(graph, replace(PLAN, stack=Stack(attention="eager")))
    op = next(n.op for n in graph.nodes() if n.op and n.op.kind == "attention_prefill")
    pairs = BATCH * op.heads_q * TOKENS**2

    def kernels(made: Graph, phase: str) -> int:
        scores = [(n, times) for n, times in made.weighted() if n.op and n.op.kind == "elementwise"]
        return sum(times for n, times in scores if n.op.numel == pairs and n.phase == phase)

    plain = unfuse_attention(graph, PLAN)
    for phase in ("forward", "backward"):
        assert kernels(eager, phase) - kernels(plain, phase) == 2 * LAYERS
    assert peak_memory(eager).peak_gib == pytest.approx(peak_memory(plain).peak_gib)


def test_heads_are_gathered_and_put_back_where_products_want_them_in_one_piece(graph: Graph) -> None:
    def moved(attention: str, name: str, phase: str) -> list[int]:
        made = unfuse_attention(graph, replace(PLAN, stack=Stack(attention=attention)))
        return [n.op.numel for n in made.nodes() if n.op and n.source == f"unfused.{name}" and n.phase == phase]

    op = next(n.op for n in graph.nodes() if n.op and n.op.kind == "attention_prefill")
    out = BATCH * TOKENS * op.heads_q * op.head_dim
    inputs = out + 2 * BATCH * TOKENS * op.heads_kv * op.head_dim
    assert moved("unfused", "by_head", "forward") == moved("unfused", "put_back", "forward") == []
    for attention, kernels in (("transposed", 1), ("eager", 3)):
        gathered = moved(attention, "by_head", "forward")
        assert sum(gathered) * kernels == pytest.approx(inputs * len(gathered), rel=1e-4)
        assert set(moved(attention, "put_back", "forward")) == set(moved(attention, "by_head", "backward")) == {out}
        assert len(moved(attention, "put_back", "backward")) == len(gathered)


def test_five_bytes_a_pair_stay_for_the_backward_pass(graph: Graph) -> None:
    made = unfuse_attention(graph, PLAN)
    op = next(n.op for n in graph.nodes() if n.op and n.op.kind == "attention_prefill")
    kept = 5 * BATCH * op.heads_q * TOKENS**2 * LAYERS / 2**30
    more = peak_memory(made).peak_gib - peak_memory(graph).peak_gib
    assert kept * 0.8 < more < kept * 1.8


def test_lifetimes_are_sound(graph: Graph) -> None:
    written: set[int] = set()
    freed: set[int] = set()
    made = unfuse_attention(graph, PLAN)
    for node in made.nodes():
        assert not freed & {*node.reads, *node.writes}, node
        for tensor in node.reads:
            assert tensor in written or tensor in node.writes or made.tensor(tensor).role != "activation", node
        written.update(node.writes)
        freed.update(node.frees)
