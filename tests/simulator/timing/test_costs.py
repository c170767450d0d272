"""What the host spends on a node: a framework's Python by kind and by expert, and where it waits for routing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opcast.datasets.clusters import load_cluster
from opcast.datasets.ops import make_op
from opcast.simulator.graph import Node
from opcast.simulator.question.plan import Parallel, Plan, Stack
from opcast.simulator.timing.costs import issue_of
from opcast.simulator.timing.phases import PhaseTime, beside_another, routing_waits

ISSUE = {"gemm": 80.0, "norm": 50.0, "expert": 20.0, "expert_fp8": 70.0, "grouped_gemm": 100.0, "*": 15.0}
WAITING = Plan(Parallel(ep=8), load_cluster("dgx_h100"), Stack(waits_for_routing=True))


@pytest.mark.parametrize(
    ("op", "us"),
    [
        (make_op("gemm", m=8, n=8, k=8), 80),
        (make_op("rms_norm", rows=8, cols=8), 50),
        (make_op("elementwise", numel=8), 15),
        (make_op("grouped_gemm", experts=16, tokens=64, n=8, k=8), 100 + 16 * 20),
        (make_op("grouped_gemm", "fp8", "bf16", experts=16, tokens=64, n=8, k=8), 100 + 16 * 70),
        (make_op("grouped_gemm", "mxfp8", "bf16", experts=16, tokens=64, n=8, k=32), 100 + 16 * 20),
        (None, 15),
    ],
)
def test_python_before_a_kernel_goes_by_kind_family_and_experts(op: object, us: float) -> None:
    assert issue_of(op, ISSUE) == us


def nodes(phase: str, *kinds: str) -> list[Node]:
    dims = {"tokens": 64, "hidden": 8, "topk": 2, "experts": 16, "ranks": 8}
    ops = {
        "ep_dispatch": make_op("ep_dispatch", **dims),
        "moe_route": make_op("moe_route", tokens=64, topk=2, experts=16),
        "gemm": make_op("gemm", m=8, n=8, k=8),
    }
    return [Node(ops[kind], kind, "mlp", phase, (), (), 0) for kind in kinds]


def test_the_host_waits_for_routing_in_forward_alone() -> None:
    forward = nodes("forward", "gemm", "moe_route", "ep_dispatch", "gemm")
    found = routing_waits(forward, WAITING)
    assert found is not None
    assert found.tolist() == [False, False, True, False]
    alone = routing_waits(nodes("forward", "gemm", "moe_route", "gemm"), WAITING)
    assert alone is not None
    assert alone.tolist() == [False, True, False]
    assert routing_waits(nodes("backward", "ep_dispatch", "gemm"), WAITING) is None
    assert routing_waits(nodes("forward", "gemm"), WAITING) is None


@pytest.mark.parametrize("options", [{"capacity": 1.5}, {"token_drop": True}])
def test_experts_of_a_fixed_capacity_need_no_wait(options: dict[str, object]) -> None:
    assert routing_waits(nodes("forward", "ep_dispatch"), replace(WAITING, options=options)) is None
    assert routing_waits(nodes("forward", "ep_dispatch"), replace(WAITING, stack=Stack())) is None


@pytest.mark.parametrize(("exchange", "left"), [(30.0, 0.0), (90.0, 30.0)])
def test_exchanges_hide_beside_as_much_computing_as_there_is(exchange: float, left: float) -> None:
    plan = Plan(Parallel(ep=8), load_cluster("dgx_h100"), Stack(compute_slowdown=0.1))
    alone = PhaseTime(60.0 + exchange + 5.0, 60.0, {"ep": exchange}, {}, 5.0)
    found = beside_another(alone, plan)
    assert found.exposed_us == {"ep": pytest.approx(left)}
    assert found.hidden_us == {"ep": pytest.approx(exchange - left)}
    assert found.total_us == pytest.approx(found.compute_us + left + found.host_us)
    assert found.compute_us == pytest.approx(60.0 + 0.1 * (exchange - left))
