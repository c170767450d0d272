"""The Python face: answers are kept from call to call, and what is added since is seen."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import opcast
from opcast.datasets.ops import make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store

SHAPE = {"m": 300, "n": 640, "k": 384, "dtype": "bf16"}


def test_a_measurement_that_is_added_answers_the_next_call(tmp_path: Path) -> None:
    before = opcast.predict("gemm", "l4", home=tmp_path, **SHAPE)
    assert before.engine != "measured"
    now = datetime(2026, 1, 1, tzinfo=UTC)
    row = Measurement(op=make_op("gemm", **SHAPE), device_id="l4", run_id="test", measured_at=now, latency_us=123.0)
    Store(tmp_path / "store").write([row], "test")
    after = opcast.predict("gemm", "l4", home=tmp_path, **SHAPE)
    assert (after.engine, after.latency_us) == ("measured", 123.0)


def test_the_same_question_again_takes_well_under_a_millisecond(tmp_path: Path) -> None:
    first = opcast.predict("gemm", "l4", home=tmp_path, **SHAPE)
    times = []
    for _ in range(50):
        began = time.perf_counter()
        assert opcast.predict("gemm", "l4", home=tmp_path, **SHAPE) == first
        times.append(time.perf_counter() - began)
    assert np.median(times) < 2e-3


def test_devices_folders_and_options_are_told_apart(tmp_path: Path) -> None:
    device = opcast.load_device("l4")
    base = opcast.predict("gemm", device, home=tmp_path, **SHAPE)
    assert opcast.predict("gemm", "l4", home=tmp_path, **SHAPE) == base
    assert opcast.predict("gemm", "l4", home=tmp_path, cache="cold", **SHAPE).latency_us >= base.latency_us
    assert opcast.predict("gemm", "l4", home=tmp_path, engines=["analytical"], **SHAPE).engine == "analytical"
    assert opcast.predict("gemm", "h100_sxm", home=tmp_path, **SHAPE).latency_us < base.latency_us
