"""How far labs are apart: widths by length of ops, and how the benchmark finds them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from opcast.models.labs import EDGES_US, WIDTHS, apart, band, widths
from opcast.tests.benchmarks.labs import COVERAGE, LEVELS, Missed, half_widths, level_of, of_one

FOREIGN = {"sources": {"source": ["aiconfigurator"]}}


def table(family: str, name: str, error: float, rows: int = 40, long: int = 1) -> Missed:
    """Ops of one length that all miss by as much."""
    return Missed(family, name, np.full(rows, error), np.full(rows, 0.05), np.full(rows, long))


def test_short_ops_of_another_lab_are_the_least_sure() -> None:
    found = apart("gemm", FOREIGN, np.array([5.0, 100.0, 5000.0]))
    assert found[0] > found[1] > found[2] > 0.1
    assert found == pytest.approx(widths()["gemm"])


@pytest.mark.parametrize("card", [{}, {"sources": {"source": ["harness"]}}, {"sources": {"source": ["harness", "x"]}}])
def test_ones_own_timings_are_not_widened(card: dict[str, object]) -> None:
    assert not apart("gemm", card, np.array([5.0, 5000.0])).any()
    assert not apart("collective", FOREIGN, np.array([5.0, 5000.0])).any()


def test_ops_without_an_answer_have_a_width() -> None:
    assert band(np.array([1.0, *EDGES_US, np.nan])).tolist() == [0, 1, 2, 2]


def test_widths_hold_tables_that_were_left_out_as_stated() -> None:
    told = json.loads(WIDTHS.read_text("utf-8"))["families"]
    held = [one["held"] for of in told.values() for one in of["tables"].values()]
    assert len(held) >= 5
    assert np.mean(held) >= COVERAGE - 0.005


def test_a_family_of_few_tables_has_the_width_of_all() -> None:
    products = [table("gemm", str(place), 0.3) for place in range(3)]
    norm = table("norm", "x", 0.6)
    known = [*products, *(table("gemm", f"{place}", 0.3, long=other) for other in (0, 2) for place in range(3)), norm]
    assert half_widths("gemm", known, COVERAGE) == pytest.approx(np.sqrt(0.3**2 - 0.05**2))
    assert half_widths("norm", known, COVERAGE)[1] == pytest.approx(np.sqrt(0.6**2 - 0.05**2))


def test_the_level_rises_where_tables_do_not_hold_each_other() -> None:
    generator = np.random.default_rng(0)
    known = [
        Missed("gemm", f"{place}", np.abs(generator.normal(0.1 * place, 0.1, 90)), np.full(90, 0.05), np.arange(90) % 3)
        for place in range(4)
    ]
    level = level_of(known)
    assert LEVELS[0] < level
    assert np.mean([of_one(each, known, level)["held"] for each in known]) > np.mean(
        [of_one(each, known, LEVELS[0])["held"] for each in known]
    )


def test_a_file_says_what_is_used(tmp_path: Path) -> None:
    path = tmp_path / "labs.json"
    path.write_text(json.dumps({"families": {"moe": {"half_width": [0.3, 0.2, 0.1]}}}))
    assert {name: found.tolist() for name, found in widths(path).items()} == {"moe": [0.3, 0.2, 0.1]}
