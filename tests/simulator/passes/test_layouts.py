"""What a framework lays out anew: copies of so many elements, in the phases that its source has them in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from opcast.datasets.clusters import load_cluster
from opcast.simulator.graph import Graph
from opcast.simulator.memory.lifetimes import peak_memory
from opcast.simulator.passes.fuse import fuse
from opcast.simulator.passes.layouts import copy_layouts
from opcast.simulator.question.plan import Parallel, Plan, PlanError, Stack
from opcast.simulator.trace import Workload, trace

LAYERS, TOKENS = 3, 16
PLAN = Plan(Parallel(), load_cluster("dgx_h100"), Stack(fusion=("qkv", "gate_up")))


@pytest.fixture(scope="module")
def graph(small_model: Callable[..., dict[str, Any]]) -> Graph:
    traced = trace(small_model("llama", layers=LAYERS), Workload("train", seq_len=TOKENS, attention="fused"), "bf16")
    return fuse(traced, PLAN)


def copied(graph: Graph, phase: str) -> list[int]:
    """Elements of each copy of a phase, by layer."""
    found = [(n, times) for n, times in graph.weighted() if n.source == "aten.copy_" and n.phase == phase]
    assert all(times == LAYERS for _, times in found)
    return [n.op.numel for n, _ in found if n.op is not None]


def with_layouts(graph: Graph, *names: str) -> Graph:
    return copy_layouts(graph, replace(PLAN, stack=replace(PLAN.stack, layouts=names)))


def test_without_a_name_nothing_changes(graph: Graph) -> None:
    assert copy_layouts(graph, PLAN) is graph


def test_queries_keys_and_values_are_copied_three_times_each_way(graph: Graph) -> None:
    made = with_layouts(graph, "qkv")
    op = next(n.op for n in graph.nodes() if n.op and n.op.kind == "attention_prefill")
    keys = TOKENS * op.heads_kv * (op.head_dim + op.v_head_dim)
    whole = TOKENS * op.heads_q * op.head_dim + keys
    assert copied(made, "forward") == [whole, keys, keys]
    assert copied(made, "backward") == [keys, whole, whole]
    assert [block.repeat for block in made.blocks] == [block.repeat for block in graph.blocks]
    assert peak_memory(made).peak_gib == pytest.approx(peak_memory(graph).peak_gib)


def test_gradients_of_halves_are_joined_before_the_merged_product(graph: Graph) -> None:
    made = with_layouts(graph, "gate_up")
    merged = [n.op for n in graph.nodes() if n.source == "fused.gate_up" and n.phase == "backward" and n.op]
    (joined,) = {op.m * op.k for op in merged if op.layout == 0}
    assert copied(made, "forward") == []
    assert copied(made, "backward") == [joined]


def test_names_are_checked() -> None:
    with pytest.raises(PlanError, match="layouts"):
        Stack(layouts=("rows",))
