"""Passes and rules of one's own: found by name, and every way to get them wrong is one clear line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from opcast.datasets.clusters import Cluster
from opcast.simulator.graph import Graph
from opcast.simulator.passes.custom import load, load_pass
from opcast.simulator.passes.fuse import fuse
from opcast.simulator.question.plan import Parallel, Plan, PlanError, Stack

CLUSTER = Cluster("c", "c", "h100_sxm", nodes=1)
PLAN = Plan(Parallel(), CLUSTER)
SOURCE = """
from dataclasses import replace
from opcast.datasets.ops import make_op
from opcast.simulator.passes.fusion.patterns import Pattern, Rule

def noted(graph, plan):
    return replace(graph, notes=(*graph.notes, "seen"))

def nothing(graph, plan):
    pass

def broken(graph, plan):
    return graph.no_such_thing

def _kernel(match):
    op = match.find("silu").op
    return make_op("silu_mul", rows=1, cols=op.numel, dtype=op.dtype)

def gate():
    return Rule("my_gate", (Pattern(("silu", "mul"), _kernel, needs=("silu", "mul"), path="mlp"),))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory."""
    name = f"my_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return name


def test_a_pass_is_found_in_the_working_directory(module: str) -> None:
    graph = Graph("g", (), (), 0, 0.0)
    assert load_pass(f"{module}:noted")(graph, PLAN).notes == ("seen",)


def test_a_rule_of_ones_own_fuses(module: str, traced_small: Callable[..., Graph]) -> None:
    fused = fuse(traced_small("llama"), Plan(Parallel(), CLUSTER, Stack(fusion=(f"{module}:gate",))))
    assert sum(k for n, k in fused.weighted() if n.source == "fused.my_gate") == 4


def test_mistakes_are_one_line(module: str) -> None:
    graph = Graph("g", (), (), 0, 0.0)
    wrong = {
        "noted": "not of the form module:function",
        "no_such_module:f": "cannot import no_such_module: ModuleNotFoundError",
        f"{module}:notted": f"{module} has no function notted; did you mean noted",
    }
    for name, message in wrong.items():
        with pytest.raises(PlanError, match=message) as caught:
            load(name, "pass")
        assert "\n" not in str(caught.value)
    with pytest.raises(PlanError, match="returned NoneType, not a Graph"):
        load_pass(f"{module}:nothing")(graph, PLAN)
    with pytest.raises(PlanError, match="failed: AttributeError"):
        load_pass(f"{module}:broken")(graph, PLAN)
