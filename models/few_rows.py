"""A device with few rows: answered as others know it and corrected by the rows where that is better, and its scores.

Up to :data:`ENOUGH_ROWS`, tables of this very device by other labs are tried; up to :data:`FEW_ROWS`, other devices'
predictors and rows of other kernels of this one as well.

What is registered is scored as any other predictor (:mod:`.evaluation`): by answers to rows that neither fitted it nor
chose the way, whatever way was chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .evaluation import ALIKE, CrossFit, cross_fit, report, unlike
from .features import Frame
from .intervals import classes_of
from .learning import fold_count
from .outcome import TrainingOutcome
from .predictor import Predictor
from .registry import Registry
from .splits import Split, splits
from .table import MeasurementTable
from .threads import one_thread
from .transfer import ALONE, Ways, adapted, bases_of, learned_ways

FEW_ROWS = 1000  # up to which a model over devices may know more than a table does
ENOUGH_ROWS = 4000  # of one kind and backend: more know themselves what a table of another lab could tell


@one_thread()
def mended(
    outcome: TrainingOutcome, registries: Sequence[Registry], others: Sequence[MeasurementTable] = ()
) -> TrainingOutcome:
    """The outcome of few rows as it was, of another predictor that these rows correct, or of these rows and those of
    ``others``: kernels of the same kind and device.

    All ways are compared on groups that were held out, so a predictor that has seen rows of this device is left out.
    """
    table = outcome.table
    if len(table) > ENOUGH_ROWS or table.device.synchronous:
        return outcome
    few = len(table) <= FEW_ROWS
    bases = [base for base in bases_of(registries, table) if few or _same_device(base, table)]
    others = others if few and "sites" not in outcome.result else ()
    ways = learned_ways(bases, table, outcome.options, alone=outcome.learned, others=others)
    if ways.chosen == ALONE:
        return outcome
    reports, crossed = _evaluations(bases, ways, others)
    main = next(name for name in [*outcome.result["evaluations"], "groups"] if name in crossed)
    adapted_predictor, chief = adapted(ways), reports[main]
    told = ("adapted_from", "learned_with", "candidates", "chosen")
    card: dict[str, Any] = {name: adapted_predictor.card[name] for name in told if name in adapted_predictor.card}
    card |= {f"test_{name}": chief[name] for name in ("median_ape", "mean_ape", "p90_ape", "max_ape", "bias")}
    card |= {name: chief[name] for name in ("coverage", "interval_width", "split")}
    card["evaluations"] = {**outcome.result["evaluations"], **reports}
    predictor = dataclasses.replace(
        adapted_predictor, card={**outcome.predictor.card, **adapted_predictor.card, **card}
    )
    return dataclasses.replace(
        outcome,
        predictor=predictor,
        result={**outcome.result, **card},
        held_out=crossed[main].rows,
        held_out_us=table.latency_us[crossed[main].rows] / np.exp(crossed[main].residual),
    )


def _same_device(base: Predictor, table: MeasurementTable) -> bool:
    return base.device_id == table.device.id


def _evaluations(
    bases: Sequence[Predictor], ways: Ways, others: Sequence[MeasurementTable]
) -> tuple[dict[str, dict[str, Any]], dict[str, CrossFit]]:
    """Reports by name, and the answers behind them, of the modes asked for; by groups where none of them can be."""
    table, options = ways.table, ways.options
    by_mode: dict[str, tuple[Split, CrossFit]] = {}
    reports: dict[str, dict[str, Any]] = {}
    for mode in options.evaluations:
        if mode == "groups":
            by_mode[mode] = ways.folds, _alike(ways)
        elif mode != "device":  # needs other devices' tables: the store's affair
            split, why = splits(table.kind, mode, table.columns, fold_count(len(table), options), options.seed)
            reports |= {} if split else {mode: {"error": why}}
            for name, folds in split.items():
                again = learned_ways(bases, table, options, folds, others=others) if mode in ALIKE else None
                by_mode[name] = folds, _alike(again) if again else _unlike(bases, ways, folds, others)
    if not by_mode:
        by_mode["groups"] = ways.folds, _alike(ways)
    for name, (folds, crossed) in by_mode.items():
        reports[name] = report(table, ways.ops, folds, crossed, options.seed)
    return reports, {name: crossed for name, (_, crossed) in by_mode.items()}


def _alike(ways: Ways) -> CrossFit:
    """Each fold answered by the way that did best on the others, with the interval calibrated on these."""
    classes = classes_of(ways.names, ways.ops.matrix)
    coverage = ways.options.coverage
    return cross_fit(ways.loss, ways.ops.analytical_us, classes, ways.weights, ways.folds, coverage, grouped=False)


def _unlike(bases: Sequence[Predictor], ways: Ways, folds: Split, others: Sequence[MeasurementTable]) -> CrossFit:
    def answer(train_rows: np.ndarray, test_ops: Frame) -> tuple[np.ndarray, np.ndarray, str]:
        learned = learned_ways(bases, ways.table.take(train_rows), ways.options, others=others)
        answered = adapted(learned).predict_frame(test_ops)
        return answered.latency_us, np.log(answered.high_us / answered.latency_us), learned.chosen

    return unlike(ways.table, ways.ops, folds, answer)
