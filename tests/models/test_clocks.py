"""Clocks under a power limit: what is known of one chip holds for its kin, and physics' order is kept."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.devices import DeviceError, load_device, overridden
from opcast.datasets.vocabulary import OpColumns
from opcast.models import analytical, clocks, power
from opcast.models.power import Limits

H100, H200, A100, GB300 = (load_device(name) for name in ("h100_sxm", "h200_sxm", "a100_sxm_80gb", "gb300"))
ANCHORED = st.sampled_from(["a100_sxm_80gb", "h100_sxm", "h200_sxm", "h100_pcie", "b200_sxm", "gb300"]).map(load_device)
WATTS = st.floats(300.0, 1500.0)
SIZES = st.sampled_from([64, 512, 1024, 4096, 8192])


def product_us(device, m: int, n: int, k: int, cap_w: float, dtype: str = "bf16", out_dtype: str = "bf16") -> float:
    """Microseconds of a product that the device runs for long under a cap."""
    op = {name: np.array([value]) for name, value in zip("m n k batch layout".split(), (m, n, k, 1, 1), strict=True)}
    burst = analytical.latency_us(OpColumns("gemm", op, dtype, out_dtype, "cold"), device)
    held = power.drawn(None, OpColumns("gemm", op, dtype, out_dtype, "cold"), device, Limits(cap_w), burst)
    return float((burst * held.slower)[0])


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [("h200_sxm", "bf16", 674), ("a100_sxm_40gb", "fp16", 254), ("b200_sxm", "nvfp4", 3600), ("gb200", "fp8", 2900)],
)
def test_a_measured_chip_sustains_what_was_measured(name: str, dtype: str, tflops: float) -> None:
    device = load_device(name)
    assert clocks.steady_rate(device, dtype, device.tdp_w) == pytest.approx(tflops)


def test_kin_are_found_by_what_a_unit_does_a_clock() -> None:
    """Hopper's other chips sustain by H200, formats of Blackwell by who was measured in them."""
    assert clocks.anchor(load_device("h800_sxm"), "bf16") == clocks.anchor(H200, "bf16")
    assert clocks.anchor(load_device("b200_sxm"), "mxfp8") == clocks.anchor(load_device("gb200"), "fp8")
    assert clocks.anchor(load_device("b300_sxm"), "nvfp4") == clocks.anchor(GB300, "nvfp4")
    assert clocks.anchor(load_device("gb200"), "nvfp4") != clocks.anchor(GB300, "nvfp4")
    for name, dtype in (("h20_sxm", "bf16"), ("rtx_pro_6000_server", "bf16"), ("l40s", "bf16"), ("h100_sxm", "fp32")):
        assert clocks.anchor(load_device(name), dtype) is None
        assert clocks.steady_rate(load_device(name), dtype, 100.0) == math.inf


def test_the_law_carries_over_power_limits() -> None:
    """H100 at 500 W, of which FBGEMM's pull request 2546 has six products; GB300 at 500 W, of which 617 TFLOP/s are
    reported (facebookexperimental/triton, PR 2023)."""
    limited = load_device("h100_96gb_hbm2e")
    assert 750 / clocks.steady_rate(limited, "bf16", 500.0) == pytest.approx(1.37, abs=0.01)
    for dtype, reported in (("bf16", (585, 575, 546)), ("fp8", (1126, 1083, 1141))):
        assert clocks.steady_rate(limited, dtype, 500.0) == pytest.approx(np.median(reported), rel=0.06)
    assert clocks.steady_rate(GB300, "bf16", 500.0) == pytest.approx(617, rel=0.02)


@given(ANCHORED, WATTS, WATTS, st.sampled_from(["bf16", "fp16"]))
def test_more_watts_or_units_never_sustain_less(device, watts: float, other: float, dtype: str) -> None:
    less, more = sorted((watts, other))
    rate = clocks.steady_rate(device, dtype, less)
    assert 0.0 <= rate <= clocks.steady_rate(device, dtype, more) <= device.tensor_rate(dtype)
    larger = overridden(device, {"compute_units": device.compute_units + 10})
    assert clocks.steady_rate(larger, dtype, less) >= rate
    assert clocks.core_w(device, dtype, np.array(rate)) <= clocks.core_w(device, dtype, np.array(1.1 * rate))


@given(ANCHORED, SIZES, SIZES, SIZES, WATTS, WATTS)
def test_a_long_product_is_never_faster_under_a_lower_cap(device, m: int, n: int, k: int, watts: float, other: float):
    less, more = sorted((watts, other))
    slow, fast = (product_us(device, m, n, k, cap) for cap in (less, more))
    assert slow >= fast * (1 - 1e-9)


@given(ANCHORED, SIZES, SIZES, SIZES, WATTS, st.integers(1, 60))
def test_a_long_product_is_never_slower_on_more_units(device, m: int, n: int, k: int, watts: float, units: int) -> None:
    larger = overridden(device, {"compute_units": device.compute_units + units})
    assert product_us(larger, m, n, k, watts) <= product_us(device, m, n, k, watts) * (1 + 1e-9)


def test_a_saturating_product_runs_at_the_steady_rate_and_a_small_one_as_it_was() -> None:
    long = product_us(H200, 8192, 8192, 8192, 700.0)
    assert 2 * 8192**3 / long * 1e-6 == pytest.approx(674, rel=0.03)
    few = {"m": 16, "n": 8192, "k": 8192}
    assert product_us(H200, **few, cap_w=700.0) == product_us(H200, **few, cap_w=1e4)
    assert product_us(H100, 8192, 8192, 8192, 700.0, "fp8") == pytest.approx(  # its table lies below what it sustains
        product_us(H100, 8192, 8192, 8192, 1e4, "fp8"), rel=0.16
    )


@pytest.mark.parametrize(("device", "steady"), [(H200, 674.0), (load_device("b200_sxm"), 1340.0)])
@pytest.mark.parametrize(("share", "longer"), [(0.85, 1.045), (0.95, 1.105), (1.05, 1.14), (1.15, 1.18)])
def test_products_below_the_steady_rate_are_slowed_too(device, steady: float, share: float, longer: float) -> None:
    """As much as bf16 products of vLLM 0.22.0 (timed for a second) over 0.24.0 (for milliseconds), both chips' mean."""
    op = {
        name: np.array([value])
        for name, value in zip("m n k batch layout".split(), (8192, 8192, 8192, 1, 1), strict=True)
    }
    burst = np.array([2 * 8192**3 / (share * steady) * 1e-6])
    limits = Limits(device.tdp_w)
    slower = power.drawn(None, OpColumns("gemm", op, "bf16", "bf16", "warm"), device, limits, burst).slower
    assert slower[0] == pytest.approx(longer, abs=0.03)


def test_half_the_clock_is_never_throttled() -> None:
    slow = overridden(H100, {"clock_mhz": H100.clock_mhz / 2})
    assert product_us(slow, 8192, 8192, 8192, 700.0) == product_us(slow, 8192, 8192, 8192, 1e4)


def test_figures_of_power_are_checked() -> None:
    with pytest.raises(DeviceError, match=r"device\.alpha=4\.0 must lie between 1"):
        dataclasses.replace(H100, alpha=4.0)
    with pytest.raises(DeviceError, match="steady_tflops"):
        dataclasses.replace(H100, steady_tflops=674.0)
    with pytest.raises(DeviceError, match=r"device\.idle_w=-1"):
        dataclasses.replace(H100, idle_w=-1)
    own = dataclasses.replace(A100, id="mine", steady_tflops={"bf16": 200.0})
    assert clocks.steady_rate(own, "bf16", own.tdp_w) == pytest.approx(200.0)


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "low", "high"),
    [
        ("b200_sxm", 57344, 8192, 4096, 1.04, 1.09),  # SimuMax's B200: 1.064; 1.058 in the median of 17 large ones
        ("b200_sxm", 7168, 2048, 32768, 1.0, 1.02),
        ("a100_pcie_80gb", 57344, 8192, 4096, 1.03, 1.07),  # its A100 in PCIe: 1.062, and 1.05 to 1.07 of others
        ("a100_pcie_80gb", 4096, 7168, 33024, 1.0, 1.02),  # 0.99
    ],
)
def test_products_that_add_to_fp32_sums_clock_lower(name: str, m: int, n: int, k: int, low: float, high: float) -> None:
    device = load_device(name)
    usual, adding = (product_us(device, m, n, k, device.tdp_w, out_dtype=out) for out in ("bf16", "fp32"))
    assert low <= adding / usual <= high


@given(ANCHORED, SIZES, SIZES, SIZES, WATTS)
def test_a_product_that_adds_is_never_faster(device, m: int, n: int, k: int, watts: float) -> None:
    usual, adding = (product_us(device, m, n, k, watts, out_dtype=out) for out in ("bf16", "fp32"))
    assert adding >= usual * (1 - 1e-9)
