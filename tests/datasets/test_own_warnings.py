"""Warnings of opcast reach a user, those of other packages do not, and a user's own are as they were afterwards."""

from __future__ import annotations

import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from opcast.datasets.own_warnings import OpcastWarning, own_warnings

PROGRAM = """
import warnings
from opcast.datasets.own_warnings import OpcastWarning, own_warnings
with own_warnings():
    warnings.warn("a renamed argument", FutureWarning)
    warnings.warn("not simulated: --x", OpcastWarning)
warnings.warn("of the user's own code", FutureWarning)
"""


def said(*flags: str) -> str:
    """What a program that warns says."""
    return subprocess.run([sys.executable, "-P", *flags, "-c", PROGRAM], capture_output=True, text=True).stderr


def test_only_our_own_are_shown() -> None:
    shown = said()
    assert "renamed argument" not in shown
    assert "OpcastWarning: not simulated: --x" in shown
    assert "FutureWarning: of the user's own code" in shown


def test_who_asks_for_all_sees_all() -> None:
    assert "renamed argument" in said("-W", "default")
    assert "Traceback" in said("-W", "error")


@own_warnings()
def warn_of(category: type[Warning]) -> None:
    warnings.warn("this", category, stacklevel=2)


def test_what_our_own_are_can_be_caught(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.warns(OpcastWarning, match="this"):
        warn_of(OpcastWarning)
    warn_of(FutureWarning)
    assert not recwarn.list


def test_calls_that_overlap_leave_nothing_behind() -> None:
    before = list(warnings.filters)
    both = Barrier(2)

    @own_warnings()
    def first() -> None:
        both.wait()
        both.wait()

    def second() -> None:
        both.wait()
        with own_warnings():
            both.wait()

    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(first), threads.submit(second)]:
            each.result()
    assert warnings.filters == before
    with pytest.raises(KeyError), own_warnings():
        raise KeyError
    assert warnings.filters == before
