"""No constant that times or memory rest on stands without saying where it comes from (stacks: test_stack.py)."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from opcast.simulator.network import nccl_times, tunings

ROOT = Path(__file__).resolve().parents[3]
FITTED = re.compile(r"^([A-Z][A-Z0-9_]*(?:, [A-Z][A-Z0-9_]*)*)(?:: [^=]+)? = \(*-?\d*\.\d")  # constants with a fraction
ROOMS = ("models", *(f"simulator/{name}" for name in (
    *("contention", "engines", "execution", "memory", "network", "passes", "predict", "question", "report"),
    *("search", "serving", "step", "timing", "validation"),
)))  # fmt: skip
PICTURES = ("picture_layout.py", "picture.py")  # sizes of drawings


def unexplained(text: str) -> list[str]:
    """Constants with a fraction that have no comment on their line or above it."""
    lines = text.splitlines()
    found = []
    for at, line in enumerate(lines):
        named = FITTED.match(line)
        if named and "#" not in line and not lines[at - 1].startswith("#"):
            found.append(named[1])
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_every_constant_says_what_it_rests_on(room: str) -> None:
    missing = {
        path.name: found
        for path in (ROOT / room).rglob("*.py")
        if path.name not in PICTURES and (found := unexplained(path.read_text()))
    }
    assert not missing


def test_a_constant_without_a_word_is_found() -> None:
    assert unexplained("A = 0.5\n# of peak (a page)\nB = 0.7\nC = 1.5  # a page\nD, E = 2.5, 3.0\nCOUNT = 3\n") == [
        "A",
        "D, E",
    ]


def test_the_network_is_fitted_by_its_own_command() -> None:
    """Constants by device are those of the fit, whose data and errors the module names."""
    assert "Fitted on" in (tunings.__doc__ or "")
    names = {each.name for each in fields(nccl_times.Tuning)}
    assert all({each.name for each in fields(tuning)} == names for tuning in tunings.TUNINGS.values())


@pytest.mark.parametrize("path", sorted((ROOT / "models" / "analytical").glob("*.py")), ids=lambda path: path.stem)
def test_no_number_of_the_law_stands_without_a_name(path: Path) -> None:
    """A fraction inside a function is a constant that no page names: all but halves and units."""
    functions = [each for each in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(each, ast.FunctionDef)]
    numbers = {each.value for one in functions for each in ast.walk(one) if isinstance(each, ast.Constant)}
    fractions = {value for value in numbers if isinstance(value, float) and value % 1.0}
    assert not fractions - {0.5, 1e-3, 1e-6}


def test_the_page_of_constants_names_each_with_its_value() -> None:
    """Where a constant is changed, `tests/benchmarks/constants.py STORE --write` says what tables make of it."""
    from opcast.tests.benchmarks.constants import PAGE, constants

    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| (\S+) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert rows == [(each.module, each.name, f"{each.value:g}") for each in constants()]
    assert len(rows) > 20
