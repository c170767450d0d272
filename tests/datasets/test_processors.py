"""Work is shared over the processors that this process may use, not over those that the machine has."""

from __future__ import annotations

import os

import pytest

from opcast.datasets.processors import MOST, usable_processors


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no process is bound to processors here")
def test_processors_are_those_it_is_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MOST, raising=False)
    before = os.sched_getaffinity(0)
    assert usable_processors() == len(before)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_processors() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(("bound", "expected"), [("1", 1), ("3", 3), ("64", 8), ("", 8), ("0", 8), ("many", 8)])
def test_no_more_than_the_user_lets_joblib_have(bound: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv(MOST, bound)
    assert usable_processors() == expected
