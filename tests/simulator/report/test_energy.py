"""Joules of a step: idle power all the time, and what kernels add for their bytes and FLOPs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import opcast
from opcast.datasets.devices import load_device
from opcast.datasets.ops import Op, make_op
from opcast.models import clocks, power
from opcast.simulator.report.energy import DrawnEnergy, cost, drawn_by, energy, least_w, watts_of

H100 = load_device("h100_sxm")
COPY = make_op("elementwise", numel=2**28)
REDUCED = make_op("all_reduce", size_bytes=2**28, ranks=8, ranks_per_node=8)
HOST = make_op("host_overhead", what="launch", calls=100, dtype="fp32")


def product_w(m: int, tflops: float = 0.0, gbps: float = 0.0) -> float:
    """Watts of a product of m rows at a rate, or at one of memory."""
    op = make_op("gemm", m=m, n=8192, k=8192)
    took_us = op.cost.flops / tflops * 1e-6 if tflops else op.cost.bytes / gbps * 1e-3
    return float(watts_of([op], np.array([took_us]), H100)[0])


def test_a_device_draws_idle_power_throughout_a_step() -> None:
    """200 J of kernels beyond idle in a step of a second, on each of eight devices; a longer step only adds idle."""
    found = energy(H100, 8, DrawnEnergy(200.0, 50.0), 1.0)
    joules = 200.0 + least_w(H100)
    assert found.power_w == pytest.approx(joules)
    assert found.energy_j == pytest.approx(8 * joules)
    assert found.measured == pytest.approx(50.0 / joules)
    longer = energy(H100, 8, DrawnEnergy(200.0, 50.0), 2.0)
    assert longer.energy_j == pytest.approx(8 * (joules + least_w(H100)))


def test_no_device_draws_more_than_its_limit() -> None:
    found = energy(H100, 2, DrawnEnergy(1500.0, 750.0), 1.0)
    assert (found.power_w, found.energy_j) == (pytest.approx(H100.tdp_w), pytest.approx(2 * H100.tdp_w))
    assert 0.0 < found.measured < 0.5
    unknown = energy(replace(H100, tdp_w=0.0), 1, DrawnEnergy(1.0, 0.0), 1.0)
    assert (unknown.power_w, unknown.energy_j) == (None, None)


def test_large_products_draw_the_limit_and_those_that_wait_for_memory_far_less() -> None:
    assert product_w(8192, tflops=650.0) == pytest.approx(H100.tdp_w)
    few_rows = product_w(1, gbps=0.9 * H100.memory_gbps)
    floor = clocks.idle_w(H100) + clocks.MEMORY_PJ * 1e-3 * 0.9 * H100.memory_gbps
    assert few_rows == pytest.approx(floor, rel=0.03)
    assert product_w(64, gbps=0.9 * H100.memory_gbps) > 1.2 * few_rows


@given(
    st.floats(1.0, 1e6),
    st.floats(1.01, 100.0),
    st.sampled_from([COPY, REDUCED, make_op("gemm", m=512, n=4096, k=4096)]),
)
def test_a_faster_call_never_draws_less_and_none_more_than_the_limit(us: float, times: float, op: Op) -> None:
    fast, slow = watts_of([op, op], np.array([us, us * times]), H100)
    assert least_w(H100) <= slow <= fast <= H100.tdp_w


@pytest.mark.parametrize("name", ["h20_sxm", "h20_141gb", "a100_sxm_80gb", "h100_sxm", "h200_sxm", "b200_sxm"])
def test_memory_alone_is_not_what_meets_the_limit(name: str) -> None:
    """An H20 has an H200's memory and two fifths of its limit; it streams at full rate all the same."""
    device = load_device(name)
    watts = watts_of([None], np.array([100.0]), device)[0]
    assert least_w(device) < watts < 0.95 * device.tdp_w


def test_kernels_add_to_what_the_device_draws_idle() -> None:
    ops = [COPY, REDUCED, None, HOST]
    call_us = np.array([400.0, 2000.0, 100.0, 50.0])
    watts = watts_of(ops, call_us, H100)
    active = power.ACTIVE_SHARE * H100.tdp_w
    copied_w, streamed_w = clocks.MEMORY_PJ * 1e-6 * COPY.cost.bytes / 400.0, clocks.MEMORY_PJ * 1e-3 * H100.memory_gbps
    most_w = power.MOST_MEMORY_SHARE * H100.tdp_w
    assert watts[0] == pytest.approx(least_w(H100) + active + min(copied_w, most_w))
    assert watts[2] == pytest.approx(least_w(H100) + active + min(streamed_w, most_w))
    assert watts[3] == least_w(H100)
    us = 1000.0 * call_us
    found = drawn_by(ops, us, call_us, H100, [])
    assert found.joules == pytest.approx(float((watts - least_w(H100)) @ us) * 1e-6)
    assert found.measured_j == 0.0


@pytest.mark.parametrize("device", ["h100_sxm", "a100_sxm_80gb", "l40s"])
def test_decoding_one_sequence_draws_far_less_than_a_prompt(device: str) -> None:
    def watts(workload: str, **more: int) -> float:
        found = opcast.simulate("llama3_8b", workload, device=device, stack="vllm", **more).power_w
        assert found is not None
        return float(found)

    one, many = (watts("decode", batch=batch, seq_len=1024) for batch in (1, 256))
    prompt = watts("prefill", seq_len=4096)
    limit = load_device(device).tdp_w
    assert 0.3 * limit < one < 0.65 * limit
    assert one < many < prompt
    assert 0.85 * limit < prompt <= limit


def test_a_price_is_per_hour_of_every_device() -> None:
    assert cost(3.0, 8, 1800.0) == pytest.approx(12.0)
    assert cost(0.0, 8, 1800.0) is None
