"""Rules and constraints: parsed, never run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.simulator.search.expressions import contradiction, parse

COLUMNS = {
    "tp": np.array([1, 2, 4, 8]),
    "pp": np.array([8, 4, 2, 1]),
    "recompute": np.array(["none", "full"] * 2, object),
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("tp <= 4", [1, 1, 1, 0]),
        ("2 <= tp < 8 and recompute == 'full'", [0, 1, 0, 0]),
        ("tp * pp == 8 and not pp // 2 % 2", [1, 1, 0, 1]),
        ("tp in [1, 8] or recompute in ('full',)", [1, 1, 0, 1]),
        ("tp not in [1, 8]", [0, 1, 1, 0]),
        ("-tp > -3", [1, 1, 0, 0]),
        ("True", [1, 1, 1, 1]),
    ],
)
def test_what_holds(text: str, holds: list[int]) -> None:
    assert parse(text, list(COLUMNS), "rules").holds(COLUMNS).tolist() == [bool(each) for each in holds]


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "tp.__class__",
        "(lambda: 1)()",
        "[tp for tp in (1,)]",
        "tp ** 99",
        "f'{tp}'",
        "tp if pp else 1",
        "(tp := 3)",
        "tp[0]",
        "tp <",
        "",
        "tp\n=1",
        "(" * 300 + "tp" + ")" * 300,
        "not " * 200 + "tp",
        "tp + None",
    ],
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="rules"):
        parse(text, list(COLUMNS), "rules").holds(COLUMNS)


def test_an_unknown_name_is_said_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown name 'recomputation'; did you mean recompute\?"):
        parse("recomputation == 'full'", list(COLUMNS), "rules")


def test_what_cannot_be_compared_is_said() -> None:
    with pytest.raises(ValueError, match="cannot be worked out"):
        parse("recompute - 1 > 0", list(COLUMNS), "rules").holds(COLUMNS)


@pytest.mark.parametrize(
    ("texts", "both"),
    [
        (["tp > 4", "tp < 3"], True),
        (["tp > 4", "tp <= 4"], True),
        (["tp >= 4", "4 >= tp"], False),
        (["tp == 4", "pp > 1 and tp == 2"], True),
        (["1 < tp < 8", "tp == 4"], False),
        (["tp > 4 or pp > 1", "tp < 3"], False),
    ],
)
def test_contradictions_are_seen(texts: list[str], both: bool) -> None:
    assert (contradiction([parse(text, list(COLUMNS), "rules") for text in texts]) is not None) is both


@given(
    st.integers(-9, 9), st.integers(-9, 9), st.sampled_from(["<", "<=", ">", ">=", "=="]), st.sampled_from(["<", ">="])
)
def test_a_contradiction_is_never_seen_where_a_value_meets_both(one: int, two: int, first: str, second: str) -> None:
    rules = [parse(f"tp {first} {one}", ["tp"], "rules"), parse(f"tp {second} {two}", ["tp"], "rules")]
    columns = {"tp": np.arange(-40, 41) / 4}
    met = np.logical_and(*(rule.holds(columns) for rule in rules)).any()
    assert (contradiction(rules) is None) or not met
