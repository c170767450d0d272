"""``opcast predict`` under a power cap or at a lower clock, and ``opcast train device=any``, as a user calls them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from opcast import predict
from opcast.datasets.ops import make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.jobs.cli import main
from opcast.models.power import PowerError

GEMM = ["predict", "op=gemm", "op.m=4096", "op.n=4096", "op.k=4096", "op.dtype=bf16", "device=h200_sxm", "format=json"]


def asked(capsys: pytest.CaptureFixture[str], tmp_path: Path, *more: str) -> dict:
    assert main([*GEMM, f"home={tmp_path}", "engine.order=[analytical]", *more]) == 0
    answer: dict = json.loads(capsys.readouterr().out)
    return answer


def test_power_is_an_estimate_where_nobody_measured_it_and_null_where_the_limit_is_not_known(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = asked(capsys, tmp_path, "device=l40s")
    assert 200.0 < found["power_w"] <= 350.0
    assert found["energy_mj"] == pytest.approx(found["power_w"] * found["latency_us"] * 1e-3)
    assert found["energy_in_envelope"] is False
    unknown = asked(capsys, tmp_path, "device=l40s", "device.tdp_w=0")
    assert (unknown["power_w"], unknown["energy_mj"]) == (None, None)


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


@pytest.mark.slow
def test_watts_in_the_store_reach_predictors_and_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Rows of products that draw 120 W: training learns it, an op and a step then draw less than physics says."""
    store, draw = Store(tmp_path / "store"), np.random.default_rng(3)
    rows = []
    for m in 2 ** np.arange(0, 12):
        for n, k in ((256, 768), (768, 768), (2048, 768), (4096, 768), (768, 2048), (16384, 768)):
            op = make_op("gemm", m=int(m), n=n, k=k, dtype="fp16")
            values = {"latency_us": 5.0 + m * n * k / 1e8, "power_w": 120.0 * float(np.exp(0.01 * draw.normal()))}
            values |= {"device_id": "l40s", "backend": "torch", "cache": "warm"}
            rows.append(Measurement(op=op, status="ok", run_id="r", measured_at=datetime.now(UTC), **values))
    store.write(rows, "r")
    step = ["simulate", "workload=prefill", "model=tiny_llama_100m", "device=l40s", "workload.input_len=512"]
    step += ["precision=fp16", f"home={tmp_path}", f"store={tmp_path}/store", "format=json"]

    def simulated() -> dict:
        assert main(step) == 0
        answer: dict = json.loads(capsys.readouterr().out)
        return answer

    before = simulated()
    words = [
        "train",
        "device=l40s",
        "op=gemm",
        "power=true",
        "tracking=null",
        f"home={tmp_path}",
        f"store={tmp_path}/store",
        "format=json",
    ]
    assert main([*words, "predictor.folds=3", "predictor.workers=1", "predictor.candidates=[calibrated]"]) == 0
    capsys.readouterr()
    product = asked(capsys, tmp_path, "device=l40s", "op.dtype=fp16", "op.m=512", "op.n=768", "op.k=768")
    assert product["power_w"] == pytest.approx(120.0, rel=0.2)
    after = simulated()
    assert (before["energy_measured"], after["energy_measured"] > 0.05) == (0.0, True)
    assert after["power_w"] < before["power_w"]
    assert after["energy_j"] == pytest.approx(after["power_w"] * after["e2e_ms"] * 1e-3)
