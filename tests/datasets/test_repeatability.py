"""How well two campaigns agree: rows are matched by op, backend and cache, and only good ones count."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.ops import make_op
from opcast.datasets.repeatability import agreement, agreements
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store

LATENCIES = st.dictionaries(st.tuples(st.integers(0, 9)), st.floats(0.1, 1e6), max_size=8)


def filled(path: Path, latencies_us: list[float], status: str = "ok", cache: str = "warm") -> Store:
    store = Store(path)
    rows = [
        Measurement(
            op=make_op("gemm", m=8 * (i + 1), n=64, k=64, dtype="bf16"),
            device_id="h100_sxm",
            run_id="run",
            cache=cache,
            status=status,
            latency_us=us if status == "ok" else None,
            measured_at=datetime(2026, 11, 1, tzinfo=UTC),
        )
        for i, us in enumerate(latencies_us)
    ]
    store.write(rows, "run")
    return store


def test_rows_are_matched_and_their_differences_summed_up(tmp_path: Path) -> None:
    first, second = filled(tmp_path / "a", [10.0, 20.0, 30.0, 40.0]), filled(tmp_path / "b", [11.0, 20.0, 27.0])
    (found,) = agreements(first, second)
    assert (found.kind, found.device, found.rows, found.only_one) == ("gemm", "h100_sxm", 3, 1)
    assert found.median_percent == pytest.approx(10.0)
    assert found.most_percent == pytest.approx(10.0)
    assert found.bias_percent == pytest.approx(0.0)


def test_failures_and_another_state_of_the_cache_are_no_repeats(tmp_path: Path) -> None:
    first = filled(tmp_path / "a", [10.0])
    assert agreements(first, filled(tmp_path / "b", [10.0], status="oom")) == []
    assert agreements(first, filled(tmp_path / "c", [10.0], cache="cold")) == []


@given(LATENCIES, st.floats(0.5, 2.0))
def test_a_slower_machine_shows_as_bias_and_the_same_one_as_zero(one: dict, factor: float) -> None:
    same = agreement("gemm", "x", one, one)
    slower = agreement("gemm", "x", one, {key: us * factor for key, us in one.items()})
    if not one:
        assert same is slower is None
        return
    assert same is not None
    assert slower is not None
    assert (same.most_percent, same.only_one, same.rows) == (0.0, 0, len(one))
    assert slower.bias_percent == pytest.approx(100 * (factor - 1), abs=1e-6)
