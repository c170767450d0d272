"""Errors of peaks by framework: known spreads found again, few rows drawn to the pooled one, tables left out."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

SPEC = importlib.util.spec_from_file_location(
    "memory_errors", Path(__file__).parents[2] / "benchmarks" / "memory_errors.py"
)
assert SPEC is not None
assert SPEC.loader is not None
SCRIPT: Any = importlib.util.module_from_spec(SPEC)
sys.modules["memory_errors"] = SCRIPT
SPEC.loader.exec_module(SCRIPT)
PRIOR, ObservedPeak = SCRIPT.PRIOR, SCRIPT.ObservedPeak
density, normal, scored, spreads = SCRIPT.density, SCRIPT.normal, SCRIPT.scored, SCRIPT.spreads


def runs(table: str, stack: str, spread: float, rows: int, seed: int = 0) -> list[Any]:
    errors = np.random.default_rng(seed).standard_t(4, rows) * spread / math.sqrt(2)
    return [ObservedPeak(table, stack, float(error), bool(error < 0.1), 0.1) for error in errors]


def test_known_spreads_are_found_again() -> None:
    found = spreads([*runs("a", "sure", 0.02, 4000), *runs("b", "unsure", 0.3, 4000, 1)])
    assert found["sure"]["spread"] == pytest.approx(0.02, rel=0.15)
    assert found["unsure"]["spread"] == pytest.approx(0.3, rel=0.15)
    assert found[""]["spread"] == pytest.approx(math.sqrt((0.02**2 + 0.3**2) / 2), rel=0.1)
    assert found["sure"]["rows"] == 4000
    assert abs(found["unsure"]["bias"]) < 0.02


def test_few_rows_are_drawn_to_what_all_frameworks_show() -> None:
    few = [ObservedPeak("a", "few", 0.0, None, 0.0)]
    found = spreads([*few, ObservedPeak("b", "other", 0.2, None, 0.0)])
    pooled = 0.2**2 / 2
    assert found["few"]["spread"] == pytest.approx(math.sqrt(PRIOR * pooled / (PRIOR + 1)), abs=1e-3)


def test_a_table_is_scored_by_the_others() -> None:
    alike = [*runs("a", "x", 0.1, 500), *runs("b", "x", 0.1, 500, 1)]
    made = scored(alike)["a"]
    assert made["coverage"] == pytest.approx(0.9, abs=0.04)
    assert made["density"] > made["density_before"]
    assert made["fits"] > made["fits_before"]
    assert scored(runs("a", "x", 0.1, 5)) == {}


def test_densities_are_those_of_the_textbook() -> None:
    scale = 0.2 / math.sqrt(2)
    assert density(0.1, 0.2) == pytest.approx(stats.t.logpdf(0.1 / scale, 4) - math.log(scale))
    assert normal(0.1, 0.2) == pytest.approx(stats.norm.logpdf(0.1, 0, 0.2))
