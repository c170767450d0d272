"""Padding left out: real tokens alone between attentions, rectangles where attention comes in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from opcast.datasets.clusters import Cluster
from opcast.simulator.graph import Graph
from opcast.simulator.passes.packing import remove_padding
from opcast.simulator.passes.quantize import quantize
from opcast.simulator.passes.tensor import tensor_parallel
from opcast.simulator.passes.unfuse import unfuse_attention
from opcast.simulator.question.plan import Parallel, Plan, PlanError, Stack
from opcast.simulator.trace import Workload, trace

BATCH, TOKENS = 8, 64
PLAN = Plan(Parallel(dp=1), Cluster("c", "c", "h100_sxm"), options={"real_tokens": 0.5})


@pytest.fixture(scope="module")
def graph(small_model: Callable[..., dict[str, Any]]) -> Graph:
    return trace(small_model("bert"), Workload("prefill", BATCH, TOKENS, attention="fused"), "fp32")


def flops(graph: Graph, kind: str) -> float:
    return sum(times * float(n.op.cost.flops) for n, times in graph.weighted() if n.op and n.op.kind == kind)


def test_without_padding_nothing_changes(graph: Graph) -> None:
    assert remove_padding(graph, replace(PLAN, options={})) is graph


def test_half_the_tokens_are_half_the_products_and_a_quarter_of_the_pairs(graph: Graph) -> None:
    made = remove_padding(graph, PLAN)
    assert flops(made, "gemm") == pytest.approx(flops(graph, "gemm") / 2)
    assert flops(made, "attention_prefill") == pytest.approx(flops(graph, "attention_prefill") / 4)


def test_attention_in_parts_wants_its_padding_back(graph: Graph) -> None:
    whole = unfuse_attention(graph, replace(PLAN, stack=Stack(attention="unfused")))
    made = remove_padding(whole, PLAN)
    scores = [n.op for n in made.nodes() if n.source.startswith("unfused.")]
    assert scores == [n.op for n in whole.nodes() if n.source.startswith("unfused.")]
    assert flops(made, "layer_norm") == pytest.approx(flops(graph, "layer_norm") / 2)


def test_ranks_exchange_real_tokens_alone(graph: Graph) -> None:
    plan = replace(PLAN, parallel=Parallel(tp=2, dp=1), cluster=Cluster("c", "c", "h100_sxm", devices_per_node=2))
    shared = tensor_parallel(graph, plan)
    exchanged = [
        sum(n.op.size_bytes for n in g.nodes() if n.op and n.op.kind == "all_reduce")
        for g in (shared, remove_padding(shared, plan))
    ]
    assert exchanged[1] * 2 == exchanged[0] > 0


@pytest.mark.parametrize("share", [0, 1.5, "half", True])
def test_a_share_that_is_none_is_one_line(graph: Graph, share: object) -> None:
    with pytest.raises(PlanError, match="share of the tokens"):
        remove_padding(graph, replace(PLAN, options={"real_tokens": share}))


def test_tf32_puts_fp32_products_on_matrix_units(graph: Graph) -> None:
    made = quantize(graph, replace(PLAN, quantization="tf32"))
    assert {(n.op.dtype, n.op.out_dtype) for n in made.nodes() if n.op and n.op.kind == "gemm"} == {("tf32", "fp32")}
    assert {t.dtype for t in made.tensors} == {t.dtype for t in graph.tensors}
