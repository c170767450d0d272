"""Nodes under a power limit: long steps run products at steady clocks, a cap holds for every op."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.devices import load_device, overridden
from opcast.datasets.ops import make_op
from opcast.models.clocks import steady_rate
from opcast.models.power import PowerError, capped
from opcast.simulator.engines import build_engine
from opcast.simulator.graph import Block, Graph, Node
from opcast.simulator.timing.clocks import limit_power
from opcast.simulator.timing.costs import cost_graphs

H100 = load_device("h100_sxm")
OPS = [
    make_op("gemm", m=8192, n=8192, k=8192),
    make_op("gemm", m=8192, n=8192, k=8192, dtype="fp8"),
    make_op("gemm", m=16, n=8192, k=8192),
    make_op(
        "attention_prefill", batch=4, heads_q=32, heads_kv=8, head_dim=128, v_head_dim=128, seq_q=4096, seq_kv=4096
    ),
    make_op("copy", size_bytes=2**28),
    make_op("all_reduce", size_bytes=2**26, ranks=8, ranks_per_node=8, link="nvlink"),
]
BF16, FP8, FEW, ATTENTION, COPY, RING = range(len(OPS))
LONG = 1e6  # us


@pytest.fixture(scope="module")
def costs():
    nodes = tuple(Node(op, "aten.mm", "", "forward", (), (), 0) for op in OPS)
    return cost_graphs([Graph("ops", (Block(nodes),), (), 0, 0.0)], H100, build_engine(H100, [], []))


def times(costs, device=H100, busy_us: float = LONG) -> np.ndarray:
    (found,) = limit_power(costs, device, [busy_us])
    return found.kernel_us / costs[0].kernel_us


def test_products_of_a_long_step_run_at_the_steady_rate(costs) -> None:
    factor = times(costs)
    assert factor[BF16] > 1.05
    rate = OPS[BF16].cost.flops / (costs[0].kernel_us[BF16] * factor[BF16]) * 1e-6
    assert rate == pytest.approx(steady_rate(H100, "bf16", H100.tdp_w), rel=0.03)
    assert (factor[[FEW, ATTENTION, COPY, RING]] == 1.0).all()


def test_a_short_step_is_a_burst(costs) -> None:
    assert (times(costs, busy_us=2e4) == 1.0).all()
    half = times(costs, busy_us=6.5e4)
    assert half[BF16] - 1.0 == pytest.approx(0.5 * (times(costs)[BF16] - 1.0))


@given(st.floats(140.0, 1000.0), st.floats(140.0, 1000.0), st.sampled_from([1e3, LONG]))
def test_a_lower_cap_is_never_faster(costs, watts: float, other: float, busy_us: float) -> None:
    less, more = (times(costs, overridden(H100, {"tdp_w": each}), busy_us) for each in sorted((watts, other)))
    assert (less >= more * (1 - 1e-9)).all()
    assert less[RING] == 1.0


def test_a_cap_holds_from_the_start_and_for_every_op(costs) -> None:
    held = times(costs, capped(H100, 350.0), busy_us=1e3)
    assert (held[[BF16, FP8, ATTENTION, COPY]] > 1.05).all()
    assert not limit_power(costs, capped(H100, 350.0), [LONG])[0].in_envelope[BF16]
    assert np.array_equal(times(costs, capped(H100, 900.0)), times(costs))
    with pytest.raises(PowerError, match="a cap of 90 W"):
        times(costs, capped(H100, 90.0))
    with pytest.raises(PowerError, match="no tdp_w"):
        capped(replace(H100, tdp_w=0.0), 300.0)


def test_bounds_hold_what_the_clock_of_a_long_step_may_be(costs) -> None:
    nobodys = replace(H100, id="nobody_s", architecture="new")
    (burst,), (long,), (unknown,) = (
        limit_power(costs, device, [us]) for device, us in ((H100, 1e3), (H100, LONG), (nobodys, LONG))
    )
    products = [BF16, FP8, FEW]
    assert burst.high == pytest.approx(costs[0].high)
    assert (long.high[products] > burst.high[products]).all()
    assert long.high[[COPY, RING]] == pytest.approx(burst.high[[COPY, RING]])
    assert long.high[ATTENTION] > burst.high[ATTENTION]  # nobody timed it for long
    assert long.kernel_us[ATTENTION] == burst.kernel_us[ATTENTION]
    assert (unknown.high[products] > long.high[products]).all()
    assert (unknown.low[products] > long.low[products]).all()
    widened = np.log(long.high / burst.high)
    assert widened[FEW] < 0.2 * widened[BF16]  # memory keeps its clock, and few rows wait for it
