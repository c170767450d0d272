"""Curves of how cold a call is by what was touched since."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from opcast.datasets.devices import Device, DeviceError
from opcast.datasets.reuse import ReuseCurves

CURVES: dict[str, Any] = {
    "distances": (0.0, 2.0**20, 2.0**24),
    "code": {"pointwise": (0.0, 0.2, 0.6)},
    "data": {"pointwise": (0.1, 0.5, 1.0), "gemm": (0.4, 0.9, 1.0)},
    "code_us": 12.0,
    "host_us": (1.0, 1.5, 4.0),
}
CPU = {
    "id": "cpu_of_mine",
    "name": "CPU of mine",
    "vendor": "cpu",
    "architecture": "avx2",
    "compute_units": 2,
    "clock_mhz": 2500.0,
    "tensor_tflops": {"fp32": 0.2},
    "vector_tflops": 0.06,
    "memory_gib": 8.0,
    "memory_gbps": 40.0,
    "l2_mib": 16.0,
    "l2_gbps": 200.0,
}


def test_shares_are_read_off_between_distances_and_held_beyond_them() -> None:
    curves = ReuseCurves.from_dict(CURVES)
    found = curves.share("data", "gemm", np.array([0.0, 1.0, 2.0**20, 2.0**22, 2.0**24, np.inf]))
    assert found == pytest.approx([0.4, 0.4, 0.9, 0.95, 1.0, 1.0])
    assert curves.host(np.array([0.0, 2.0**30])) == pytest.approx([1.0, 4.0])


def test_a_family_without_a_curve_has_the_usual_one() -> None:
    curves = ReuseCurves.from_dict(CURVES)
    assert curves.share("code", "gemm", np.array([2.0**20])) == pytest.approx([0.2])
    assert ReuseCurves.from_dict({**CURVES, "host_us": ()}).host(np.array([5.0, 9.0])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"distances": ()}, "need distances"),
        ({"data": {"gemm": (0.0, 0.5, 1.0)}}, "curve of pointwise"),
        ({"code": {"pointwise": (0.0, 1.0)}}, "a number for each distance"),
        ({"host_us": (1.0, float("nan"), 2.0)}, "a number for each distance"),
        ({"code_us": "much"}, "must be microseconds"),
        ({"odd": 1}, "odd"),
    ],
)
def test_what_are_no_curves_is_said(change: dict[str, Any], says: str) -> None:
    with pytest.raises(DeviceError, match=r"device\.reuse") as raised:
        Device.from_dict({**CPU, "reuse": {**CURVES, **change}})
    assert says in str(raised.value)


def test_a_device_keeps_its_curves_there_and_back() -> None:
    device = Device.from_dict({**CPU, "reuse": CURVES})
    again = Device.from_dict(device.to_dict())
    assert again == device
    assert again.curves == device.curves
    assert Device.from_dict(CPU).curves is None
