"""A mistyped name gets the one that was meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.devices import known_devices
from opcast.datasets.near import did_you_mean, likeliest, meant

NAMES = known_devices()


@pytest.mark.parametrize(
    ("asked", "first"),
    [
        ("h10", "h100"),  # a beginning goes before a10, which differs in one letter, too
        ("h100", "h100"),
        ("H100x", "h100"),
        ("h100-sxm", "h100_sxm"),
        ("h100sxm", "h100_sxm"),
        ("4090", "rtx_4090"),
        ("mi300", "mi300"),
    ],
)
def test_the_first_is_the_one_that_was_meant(asked: str, first: str) -> None:
    assert likeliest(asked, NAMES)[0].startswith(first)


def test_what_is_not_near_is_not_guessed() -> None:
    assert likeliest("xyzzy", NAMES) == []
    assert did_you_mean("xyzzy", NAMES, "look elsewhere") == "look elsewhere"
    assert meant("xyzzy", NAMES) == ""
    assert meant("chek", ("check", "drift")) == "; did you mean check?"


@given(st.sampled_from([name for name in NAMES if len(name) > 5]), st.data())
def test_a_letter_too_few_is_forgiven(name: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(name) - 1))
    assert name in likeliest(name[:at] + name[at + 1 :], NAMES, 8)


@given(st.text(max_size=12), st.integers(1, 5))
def test_answers_are_known_names_and_not_too_many(asked: str, most: int) -> None:
    found = likeliest(asked, NAMES, most)
    assert set(found) <= set(NAMES)
    assert len(found) == len(set(found)) <= most


@given(st.sampled_from(NAMES))
def test_a_known_name_means_itself(name: str) -> None:
    assert likeliest(name, NAMES)[0] == name
