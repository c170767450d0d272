"""The search for parameters: deterministic, no worse than where it began, and honest about the rows it saw."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from opcast.models.candidates import OptionError, Options
from opcast.models.table import MeasurementTable
from opcast.models.training import fit
from opcast.models.tuning import search_rows, searched

pytest.importorskip("optuna")


@pytest.fixture(scope="module")
def seeking(fast: Options) -> Options:
    return dataclasses.replace(fast, candidates=("calibrated", "lightgbm"), trials=4)


def test_a_search_is_deterministic_and_stays_within_what_is_served(
    measurements: MeasurementTable, seeking: Options
) -> None:
    ops = measurements.frame()
    first, folds = searched(measurements, ops, seeking)
    again, _ = searched(measurements, ops, seeking)
    assert first == again
    assert first.lightgbm.trees == seeking.lightgbm.trees
    assert first.lightgbm.leaves <= 127
    assert dataclasses.replace(first, lightgbm=seeking.lightgbm) == seeking
    assert (folds.fold[search_rows(measurements, seeking.seed)] == -1).all()


def test_rows_of_the_search_are_trained_on_but_never_scored(measurements: MeasurementTable, seeking: Options) -> None:
    outcome = fit(measurements, seeking)
    rows = search_rows(measurements, seeking.seed)
    assert 20 < len(rows) < 120
    assert not set(rows) & set(outcome.held_out)
    assert outcome.result["evaluations"]["groups"]["n"] == 240 - len(rows)
    assert outcome.result["tuned"] == outcome.predictor.card["tuned"] == dataclasses.asdict(outcome.options.lightgbm)


def test_whole_groups_are_searched(measurements: MeasurementTable) -> None:
    rows = search_rows(measurements, 0)
    sites = np.stack([measurements.columns["n"], measurements.columns["k"]], axis=1)
    rest = np.setdiff1d(np.arange(len(measurements)), rows)
    assert not {tuple(each) for each in sites[rows]} & {tuple(each) for each in sites[rest]}


def test_a_table_too_small_for_trees_is_not_searched(measurements: MeasurementTable, seeking: Options) -> None:
    small = measurements.take(np.arange(60))
    made, _ = searched(small, small.frame(), seeking)
    assert made == seeking


def test_impossible_numbers_of_trials_are_named() -> None:
    with pytest.raises(OptionError, match=r"predictor\.trials=-1 must be 0"):
        Options(trials=-1)
