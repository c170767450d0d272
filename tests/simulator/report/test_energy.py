"""Joules of a step: kernels draw what holds them back, the rest of the step waits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.simulator.report.energy import COMPUTING, MEMORY, WAITING, DrawnEnergy, bounds_of, cost, drawn_by, energy

H100 = load_device("h100_sxm")
PRODUCT = make_op("gemm", m=8192, n=8192, k=8192)
COPY = make_op("elementwise", numel=2**28)
REDUCED = make_op("all_reduce", size_bytes=2**28, ranks=8, ranks_per_node=8)


def test_a_device_waits_for_what_no_kernel_fills() -> None:
    """0.4 s at 500 W, and 0.6 s of waiting, on each of eight devices."""
    found = energy(H100, 8, DrawnEnergy(200.0, 0.4, 50.0), 1.0)
    joules = 200.0 + WAITING * H100.tdp_w * 0.6
    assert found.power_w == pytest.approx(joules)
    assert found.energy_j == pytest.approx(8 * joules)
    assert found.measured == pytest.approx(50.0 / joules)
    longer = energy(H100, 8, DrawnEnergy(200.0, 0.4, 50.0), 2.0)
    assert longer.energy_j == pytest.approx(8 * (joules + WAITING * H100.tdp_w))


def test_a_device_that_never_waits_draws_what_its_kernels_do() -> None:
    assert energy(H100, 1, DrawnEnergy(500.0, 1.0, 0.0), 1.0).power_w == pytest.approx(500.0)
    assert energy(H100, 1, DrawnEnergy(500.0, 1.5, 0.0), 1.0).power_w == pytest.approx(500.0)  # two streams at a time


def test_no_device_draws_more_than_its_limit() -> None:
    found = energy(H100, 2, DrawnEnergy(1500.0, 1.0, 750.0), 1.0)
    assert (found.power_w, found.energy_j) == (pytest.approx(H100.tdp_w), pytest.approx(2 * H100.tdp_w))
    assert found.measured == pytest.approx(0.5)
    unknown = energy(replace(H100, tdp_w=0.0), 1, DrawnEnergy(1.0, 1.0, 0.0), 1.0)
    assert (unknown.power_w, unknown.energy_j) == (None, None)


def test_kernels_draw_by_what_holds_them_back() -> None:
    ops = [PRODUCT, COPY, REDUCED, None]
    assert bounds_of(ops, H100) == ["compute", "memory", "network", "memory"]
    us = np.array([1e6, 2e6, 4e6, 8e6])
    found = drawn_by(ops, us, H100, [])
    assert found.joules == pytest.approx(H100.tdp_w * (COMPUTING * 1.0 + MEMORY * (2.0 + 8.0)))
    assert found.busy_s == pytest.approx(1.0 + 2.0 + 8.0)  # who waits for the network is not busy
    assert found.measured_j == 0.0


def test_a_price_is_per_hour_of_every_device() -> None:
    assert cost(3.0, 8, 1800.0) == pytest.approx(12.0)
    assert cost(0.0, 8, 1800.0) is None
