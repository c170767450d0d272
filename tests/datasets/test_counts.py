"""Counts in words: one of a thing is in the singular."""

from __future__ import annotations

import pytest

from opcast.datasets.counts import counted


@pytest.mark.parametrize(
    ("number", "words", "text"),
    [
        (1, ("point",), "1 point"),
        (0, ("point",), "0 points"),
        (2000, ("GPU",), "2,000 GPUs"),
        (1, ("life", "lives"), "1 life"),
        (12, ("life", "lives"), "12 lives"),
    ],
)
def test_a_count_agrees_with_its_noun(number: float, words: tuple[str, ...], text: str) -> None:
    assert counted(number, *words) == text
