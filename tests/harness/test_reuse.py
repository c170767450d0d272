"""How latency grows with what was touched in between, on the machine at hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from opcast.datasets.reuse import USUAL, ReuseCurves  # noqa: E402
from opcast.harness import reuse  # noqa: E402
from opcast.harness.probe import one_thread  # noqa: E402
from opcast.harness.reuse import CODE, DATA, Apart, Seen, curves_of, isotonic, without_disturbed  # noqa: E402


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_the_nearest_rising_sequence_rises_and_keeps_the_mean(values: list[float]) -> None:
    found = isotonic(values)
    assert len(found) == len(values)
    assert all(one <= other + 1e-9 for one, other in itertools.pairwise(found))
    assert np.mean(found) == pytest.approx(np.mean(values))
    assert isotonic(sorted(values)) == pytest.approx(sorted(values))


def test_shares_lie_between_the_loop_and_the_empty_cache() -> None:
    code = Seen(CODE, "gemm", 1.0, [1.0, 2.0, 6.0], 11.0)
    assert code.shares == pytest.approx([0.0, 0.1, 0.5])
    data = Seen(DATA, "gemm", 10.0, [15.0, 20.0, 30.0], 40.0)
    assert data.shares == pytest.approx([0.25, 0.5, 1.0])
    assert curves_of([data], DATA)["gemm"] == pytest.approx((0.25, 0.5, 1.0))


def test_probes_that_a_busy_machine_spoilt_are_left_out() -> None:
    plain = [Seen(CODE, family, 1.0, [1.0, 3.0], 11.0) for family in ("gemm", USUAL, "copy")]
    late = Seen(CODE, "attention", 7.0, [9.0, 5000.0], 6000.0)
    none = Seen(CODE, "gather", 10.0, [10.0, 9.0], 10.1)
    kept = without_disturbed([*plain, late, none])
    assert kept == plain
    assert set(curves_of(kept, CODE)) == {"gemm", USUAL, "copy"}
    assert curves_of(kept[:1], CODE)[USUAL] == curves_of(kept[:1], CODE)["gemm"]


def test_a_call_apart_is_not_in_the_time() -> None:
    apart = Apart(lambda: sum(range(200_000)))
    inside = apart.timed_us(lambda: apart())
    assert inside < apart.spent_ns / 1e3


def test_curves_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured are curves: of this machine's Python, too."""
    monkeypatch.setattr(reuse, "distances", lambda: [0, 1 << 20, 1 << 24])
    monkeypatch.setattr(reuse, "ROUNDS", 3)
    monkeypatch.setattr(reuse, "without_disturbed", lambda seen: list(seen))
    monkeypatch.setattr(reuse, "PROBES", tuple(p for p in reuse.PROBES if p[1] in ("elementwise", "copy")))
    with one_thread():  # on a busy machine two threads would wait for each other all the time
        found = reuse.measure_reuse()
    curves = ReuseCurves.from_dict(found)
    assert set(curves.code) == set(curves.data) == {"pointwise", "copy"}
    for curve in (*curves.code.values(), *curves.data.values()):
        assert all(0 <= one <= other <= 1 for one, other in itertools.pairwise(curve))
    assert len(curves.host_us) == 3
    assert all(0 <= us < 1e4 for us in curves.host_us)
