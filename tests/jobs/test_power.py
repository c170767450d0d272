"""``opcast predict`` under a power cap or at a lower clock, and ``opcast train device=any``, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opcast import predict
from opcast.jobs.cli import main
from opcast.models.power import PowerError

GEMM = ["predict", "op=gemm", "op.m=4096", "op.n=4096", "op.k=4096", "op.dtype=bf16", "device=h200_sxm", "format=json"]


def asked(capsys: pytest.CaptureFixture[str], tmp_path: Path, *more: str) -> dict:
    assert main([*GEMM, f"home={tmp_path}", "engine.order=[analytical]", *more]) == 0
    answer: dict = json.loads(capsys.readouterr().out)
    return answer


def test_power_is_null_where_nothing_is_known(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = asked(capsys, tmp_path, "device=l40s")
    assert found["power_w"] is None
    assert found["energy_mj"] is None
    assert found["energy_in_envelope"] is False


def test_caps_and_clocks_slow_a_product_down(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    free = asked(capsys, tmp_path, "power_cap_w=700")
    capped = asked(capsys, tmp_path, "power_cap_w=350")
    slow = asked(capsys, tmp_path, "sm_clock_mhz=600")
    assert free["latency_us"] < capped["latency_us"] < slow["latency_us"]
    assert capped["power_w"] <= 350.001
    assert capped["energy_mj"] == pytest.approx(capped["power_w"] * capped["latency_us"] * 1e-3)
    assert capped["energy_in_envelope"] is False


@pytest.mark.parametrize("bad", ["power_cap_w=-3", "sm_clock_mhz=0", "power_cap_w=much"])
def test_limits_that_make_no_sense_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, bad: str) -> None:
    assert main([*GEMM, f"home={tmp_path}", bad]) == 2
    message = capsys.readouterr().err
    assert "positive number" in message
    assert len(message.strip().splitlines()) == 1


def test_python_asks_the_same(tmp_path: Path) -> None:
    ask = {"m": 4096, "n": 4096, "k": 4096, "dtype": "bf16", "home": tmp_path}
    free, capped = predict("gemm", "h200_sxm", **ask), predict("gemm", "h200_sxm", power_cap_w=300, **ask)
    assert capped.latency_us > free.latency_us
    with pytest.raises(PowerError, match="positive"):
        predict("gemm", "h200_sxm", sm_clock_mhz=-1, **ask)


def test_any_device_needs_measurements(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", "device=any", f"home={tmp_path}", "format=json"]) == 2
    assert "no measurements" in capsys.readouterr().err
