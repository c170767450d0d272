"""The list of what changes a kernel's time: each entry does something, and can be left out by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.simulator.engines.analytical import AnalyticalEngine
from opcast.simulator.graph import Block, Graph, Node, Tensor
from opcast.simulator.passes.order import apply_passes
from opcast.simulator.question.options import TIME_MODIFIERS
from opcast.simulator.question.plan import Parallel, Plan, PlanError, Stack
from opcast.simulator.timing.costs import Costs, cost_graphs
from opcast.simulator.timing.modifiers import MODIFIERS, Run, modify, table
from opcast.simulator.trace import Workload, trace

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-it-works.md"
H100 = load_device("h100_sxm")
SHARED = {"size_bytes": 2**20, "link": "nvlink"}
OPS = {
    "mlp": (make_op("gemm", m=8192, n=8192, k=8192), ""),
    "lm_head": (make_op("gemm", m=64, n=1024, k=512), ""),
    "attention": (
        make_op("attention_prefill", batch=1, heads_q=8, heads_kv=8, head_dim=64, v_head_dim=64, seq_q=512, seq_kv=512),
        "",
    ),
    "gathered": (make_op("all_gather", ranks=8, ranks_per_node=8, **SHARED), "dp"),
    "reduced": (make_op("all_reduce", ranks=16, ranks_per_node=8, **SHARED), "tp"),
}
OWN_TIME = {  # what turns each modifier on, and the nodes whose time it changes
    "older_products": ({"products": "cublas_12_1"}, {}, {"mlp", "lm_head"}),
    "power_limit": ({}, {}, {"mlp"}),  # the other one draws little
    "older_attention": ({"attention": "flash2"}, {}, {"attention"}),
    "ring_steps": ({"step_us": {"all_reduce": 5.0}}, {}, {"reduced"}),
    "older_rings": ({"ring_factor": 1.5}, {}, {"gathered"}),
    "draw": ({}, {"sampling": "top_p"}, {"lm_head"}),
    "calibration": ({"scale": {"h100_sxm": {"*": 2.0}}}, {}, set(OPS)),
    "shard_copies": ({"share_us": 10.0}, {}, {"gathered"}),
    "collective_checks": ({"check_us": 10.0}, {}, {"reduced"}),
    "prompt_issue": ({"prompt_issue_us": 80.0}, {}, set(OPS)),
}


@pytest.fixture(scope="module")
def costs() -> Costs:
    made = [Node(op, op.kind, path, "forward", (0,), (1,), 0, group=group) for path, (op, group) in OPS.items()]
    tensors = Tensor(0, 2**20, "bf16", "weight"), Tensor(1, 2**20, "bf16", "activation")
    graph = Graph("ops", (Block(tuple(made)),), tensors, 0, 0.0)
    return cost_graphs([graph], H100, AnalyticalEngine(H100))[0]


def changed(costs: Costs, framework: dict[str, Any], options: dict[str, Any], only: tuple[str, ...] = ()) -> set[str]:
    """The nodes whose kernels or host take another time."""
    plan = Plan(Parallel(), load_cluster("dgx_h100"), Stack(**framework), options=options)
    run = Run(plan, H100, lambda now: [1e9] * len(now), [plan.scales(H100.id, "train")], [True])
    (found,) = modify([costs], run, only)
    differ = (found.kernel_us != costs.kernel_us) | (found.host_us != costs.host_us)
    return {node.path for node, differs in zip(costs.nodes, differ.tolist(), strict=True) if differs}


def test_every_modifier_has_a_case() -> None:
    assert set(OWN_TIME) == {each.name for each in MODIFIERS if each.change is not None}


@pytest.mark.parametrize("name", OWN_TIME)
def test_a_modifier_changes_its_nodes_and_can_be_left_out(costs: Costs, name: str) -> None:
    framework, options, nodes = OWN_TIME[name]
    rest = [each for each in TIME_MODIFIERS if each != name]
    assert changed(costs, framework, {**options, "without": rest}) == nodes
    assert changed(costs, framework, options, only=(name,)) == nodes
    assert changed(costs, framework, {**options, "without": list(TIME_MODIFIERS)}) == set()


def test_the_power_limit_acts_on_the_library_that_runs(costs: Costs) -> None:
    """Its step is as busy as older products keep it, and the calibration's factor is on top of both."""
    plan = Plan(Parallel(), load_cluster("dgx_h100"), Stack(products="cublas_12_1", scale={"h100_sxm": {"*": 2.0}}))
    asked: list[float] = []

    def busy_us(now: Any) -> list[float]:
        asked.append(float(now[0].kernel_us[0]))
        return [0.0]

    modify([costs], Run(plan, H100, busy_us, [plan.scales(H100.id, "train")], [True]))
    assert asked == [pytest.approx(1.13 * costs.kernel_us[0])]


def test_costs_start_without_cold_caches_and_the_host(small_model: Callable[..., dict[str, Any]]) -> None:
    graph = trace(small_model("llama", layers=2), Workload("train", batch=1, seq_len=64), "bf16")
    graph = apply_passes(graph, Plan(Parallel(), load_cluster("dgx_h100")))
    small = replace(H100, l2_mib=0.01)
    engine = AnalyticalEngine(small)
    (usual,) = cost_graphs([graph], small, engine)
    (warm,) = cost_graphs([graph], small, engine, without=("cold_caches",))
    (alone,) = cost_graphs([graph], small, engine, without=("host_issue",))
    assert warm.kernel_us.sum() < usual.kernel_us.sum()
    assert np.array_equal(warm.host_us, usual.host_us)
    assert usual.host_us.sum() > 0.0
    assert not alone.host_us.any()
    assert np.array_equal(alone.kernel_us, usual.kernel_us)


def test_the_options_and_the_page_have_the_same_list() -> None:
    assert tuple(each.name for each in MODIFIERS) == TIME_MODIFIERS
    assert table() in PAGE.read_text("utf-8"), "put the output of opcast.simulator.timing.modifiers.table() there"


@pytest.mark.parametrize(
    ("value", "wrong"),
    [("power_limit", "must be a list of names"), (["power_limits"], "did you mean power_limit?"), ([3], "must be")],
)
def test_an_unknown_modifier_is_refused_in_one_line(value: Any, wrong: str) -> None:
    with pytest.raises(PlanError, match=wrong) as refused:
        Plan(Parallel(), load_cluster("dgx_h100"), options={"without": value})
    assert "\n" not in str(refused.value)
