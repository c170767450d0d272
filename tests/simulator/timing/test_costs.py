"""What the host spends on a node: a framework's Python, where it waits for routing, and turns that ranks take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.models.choice import ANY, OWN
from opcast.simulator.engines import Witness
from opcast.simulator.graph import REST_SUFFIX, Graph, Node
from opcast.simulator.question.plan import Parallel, Plan, Stack
from opcast.simulator.timing.costs import Costs, issue_of
from opcast.simulator.timing.hosts import add_collective_checks, add_shard_copies
from opcast.simulator.timing.older_kernels import (
    BACKWARD,
    FORWARD,
    SLOWER_ATTENTION,
    SLOWER_PRODUCTS,
    slow_attention,
    slow_products,
)
from opcast.simulator.timing.phases import PhaseTime, beside_another, routing_waits
from opcast.simulator.timing.rings import add_ring_steps, slow_rings

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


def costs_of(*parts: tuple[str, str, int, str]) -> Costs:
    """Collectives of kind, group and ranks, eight a node, that take 1 us each; sources end with what is given."""
    made = [
        Node(
            make_op(kind, size_bytes=2**20, ranks=ranks, ranks_per_node=min(ranks, 8)),
            kind + end,
            "",
            "forward",
            (),
            (),
            0,
        )
        for kind, _, ranks, end in parts
    ]
    nodes = [replace(node, group=group) for node, (_, group, *_) in zip(made, parts, strict=True)]
    ones, nobody = np.ones(len(nodes)), np.zeros(len(nodes))
    names = np.full(len(nodes), "network", dtype=object)
    witness = np.full(len(nodes), Witness(), dtype=object)
    return Costs(
        Graph("g", (), (), 0, 0), nodes, nobody, ones, ones, nobody, 1.0, 1.0, ones, ones, names, nobody == 0, witness
    )


def test_checks_hold_the_host_before_collectives_but_not_before_coalesced_ones() -> None:
    costs = costs_of(
        ("all_gather", "tp", 4, ""),
        ("all_gather", "tp", 4, REST_SUFFIX),
        ("all_gather", "tp", 16, ""),
        ("all_reduce", "dp", 4, ""),
        ("reduce_scatter", "dp", 4, ""),
        ("all_reduce", "", 4, ""),
    )
    held = add_collective_checks(costs, Stack(check_us=10.0, check_inside_us=5.0))
    assert held.host_us.tolist() == [20.0, 0.0, 160.0, 20.0, 0.0, 0.0]
    assert held.kernel_us.tolist() == costs.kernel_us.tolist()
    assert add_collective_checks(costs, Stack()) is costs
    assert add_collective_checks(costs, Stack(check_us=10.0)).host_us.tolist() == [40.0, 0.0, 160.0, 40.0, 0.0, 0.0]


def test_shares_of_weights_are_cut_one_by_one_for_each_rank() -> None:
    """Two layers of seven weights, of which three and two are merged: four each."""
    costs = costs_of(("reduce_scatter", "dp", 16, ""), ("all_gather", "dp", 16, ""), ("all_reduce", "dp", 16, ""))
    phases, tensors = ("backward", "optimizer", "backward"), (7, 14, 14)
    nodes = [
        replace(node, phase=phase, reads=tuple(range(count)))
        for node, phase, count in zip(costs.nodes, phases, tensors, strict=True)
    ]
    merged = [replace(nodes[0], source=source, phase="forward", group="") for source in ("fused.qkv", "fused.gate_up")]
    size = len(nodes) + len(merged)
    costs = replace(
        costs,
        nodes=[*nodes, *merged],
        host_us=np.zeros(size),
        kernel_us=np.ones(size),
        repeats=np.array([2, 1, 1, 2, 2]),
    )
    found = add_shard_copies(costs, 10.0).host_us
    assert found == pytest.approx([10 * 16 * 4, 10 * 16 * 8, 0, 0, 0])
    assert add_shard_copies(costs, 0.0) is costs


def test_steps_of_rings_between_nodes_take_longer() -> None:
    costs = costs_of(
        ("all_gather", "tp", 16, ""),
        ("reduce_scatter", "dp", 16, ""),
        ("all_reduce", "dp", 16, ""),
        ("all_gather", "tp", 8, ""),
    )
    slow = add_ring_steps(costs, {"tp": 50.0, "*": 20.0, "all_reduce": 5.0})
    assert slow.kernel_us.tolist() == [1 + 15 * 50, 1 + 15 * 20, 1 + 30 * 5, 1]
    assert add_ring_steps(costs, {}) is costs


def test_older_rings_take_longer_inside_a_node_alone() -> None:
    costs = costs_of(
        ("all_gather", "tp", 8, ""),
        ("reduce_scatter", "dp", 4, ""),
        ("all_gather", "tp", 16, ""),
        ("all_reduce", "tp", 8, ""),
    )
    assert slow_rings(costs, 1.5).kernel_us.tolist() == [1.5, 1.5, 1.0, 1.0]
    assert slow_rings(costs, 1.0) is costs


def test_an_older_attention_takes_longer_on_the_gpus_that_it_was_not_written_for() -> None:
    dims = {"batch": 1, "seq_q": 64, "seq_kv": 64, "heads_q": 2, "heads_kv": 2, "head_dim": 64, "v_head_dim": 64}
    ops = [make_op("attention_prefill", **dims), make_op("attention_backward", **dims), make_op("gemm", m=8, n=8, k=8)]
    usual = costs_of(*[("all_reduce", "dp", 8, "")] * 3)
    costs = replace(usual, nodes=[replace(n, op=op, group="") for n, op in zip(usual.nodes, ops, strict=True)])
    hopper, ampere = load_device("h100_sxm"), load_device("a100_sxm_80gb")
    second, first = (slow_attention(costs, name, hopper).kernel_us.tolist() for name in ("flash2", "flash1"))
    assert second == [
        SLOWER_ATTENTION["flash2"]["hopper"][FORWARD],
        SLOWER_ATTENTION["flash2"]["hopper"][BACKWARD],
        1.0,
    ]
    assert first == [2 * second[0], 2 * second[1], 1.0]
    timed = replace(costs, witness=np.array([Witness(OWN), Witness(ANY), Witness(OWN)], dtype=object))
    assert slow_attention(timed, "flash2", hopper).kernel_us.tolist() == [1.0, second[1], 1.0]
    assert slow_attention(costs, "flash1", ampere).kernel_us.tolist() == [2.0, 2.0, 1.0]
    assert slow_attention(costs, "flash1_triton", ampere).kernel_us.tolist() == [1.8, 1.8, 1.0]
    assert slow_attention(costs, "flash2", ampere) is costs
    assert slow_attention(costs, "fused", hopper) is costs


def test_an_older_library_takes_longer_for_16_bit_products_on_hopper_alone() -> None:
    ops = [make_op("gemm", m=8, n=8, k=8, dtype=name) for name in ("bf16", "fp16", "fp8")]
    usual = costs_of(*[("all_reduce", "dp", 8, "")] * 4)
    nodes = [replace(n, op=op, group="") for n, op in zip(usual.nodes, (*ops, usual.nodes[3].op), strict=True)]
    costs, (hopper, ampere) = replace(usual, nodes=nodes), map(load_device, ("h100_sxm", "a100_sxm_80gb"))
    longer = SLOWER_PRODUCTS["cublas_12_1"]["hopper"]
    assert slow_products(costs, "cublas_12_1", hopper).kernel_us.tolist() == [longer, longer, 1.0, 1.0]
    assert slow_products(costs, "cublas_12_1", ampere) is costs
    assert slow_products(costs, "current", hopper) is costs
