"""Honest errors: nothing that is scored was used to fit, to choose or to calibrate.

Where folds are alike (groups, random ops), every row is predicted once by a model that saw neither its group nor,
through the choice of candidate or the interval's width, its residual: fold i is answered by the candidate that did
best on the other folds, with the interval calibrated on the other folds. Where the held-out part is unlike the rest
(the far end of a size, an unseen rank count), the whole procedure runs on the rest and answers it as a predictor
would, with its envelope.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from .baselines import BASELINES, SAMPLE
from .candidates import Options
from .features import Frame
from .intervals import calibrate, calibrate_grouped, classes_of
from .learning import Learned, choose, fold_count, held_out, learn, prepare, task_of
from .splits import Split, splits
from .table import MeasurementTable, take

ALIKE = ("groups", "random")


@dataclass(frozen=True)
class CrossFit:
    """Held-out answers of the whole procedure (choose, fit, calibrate) for the scored rows."""

    rows: np.ndarray  # int64 [s]: positions in the table
    residual: np.ndarray  # ln(measured / predicted)
    inside: np.ndarray  # whether the interval held
    width: np.ndarray  # ln half-width of the interval
    chosen: tuple[str, ...]  # candidate by fold

    @classmethod
    def of(cls, rows: np.ndarray, residual: np.ndarray, width: np.ndarray, chosen: Sequence[str]) -> Self:
        """Those of the ``rows`` that are scored, from residuals and widths of all rows."""
        residual, width = residual[rows], width[rows]
        return cls(rows, residual, np.abs(residual) <= width, width, tuple(chosen))


def evaluate(
    table: MeasurementTable, ops: Frame, options: Options, mode: str, learned: Learned
) -> tuple[dict[str, dict[str, Any]], dict[str, CrossFit]]:
    """Reports of one mode by name, and the held-out answers behind them.

    ``learned`` is what the whole table taught; a mode that the table cannot answer has an ``error``.
    """
    if mode == "groups":
        folds_of = {mode: learned.folds}
        why = ""
    else:
        folds_of, why = splits(table.kind, mode, table.columns, fold_count(len(table), options), options.seed)
    if not folds_of:
        return {mode: {"error": why}}, {}
    reports, crossed = {}, {}
    for name, folds in folds_of.items():
        if mode in ALIKE:
            crossed[name] = _alike(table, ops, options, folds, learned if mode == "groups" else None)
        else:
            crossed[name] = _unlike(table, ops, options, folds)
        reports[name] = report(table, ops, folds, crossed[name], options.seed)
    return reports, crossed


def _alike(table: MeasurementTable, ops: Frame, options: Options, folds: Split, learned: Learned | None) -> CrossFit:
    task = task_of(table, ops, options)
    residuals = learned.residuals if learned else held_out(task, folds, prepare(task, options), options)
    classes = classes_of(task.names, ops.matrix)
    return cross_fit(residuals, ops.analytical_us, classes, task.weights, folds, options.coverage)


def _unlike(table: MeasurementTable, ops: Frame, options: Options, folds: Split) -> CrossFit:
    def answer(train_rows: np.ndarray, test_ops: Frame) -> tuple[np.ndarray, np.ndarray, str]:
        learned = learn(table.take(train_rows), take(ops, train_rows), options)
        latency, width, _ = learned.answer(test_ops)
        return latency, width, learned.chosen

    return unlike(table, ops, folds, answer)


def unlike(
    table: MeasurementTable,
    ops: Frame,
    folds: Split,
    answer: Callable[[np.ndarray, Frame], tuple[np.ndarray, np.ndarray, str]],
) -> CrossFit:
    """Each fold answered by the whole procedure on the other rows: ``answer`` takes these rows and the fold's ops, and
    gives latencies, widths and the candidate that was chosen."""
    residual, width, chosen = np.full(len(table), np.nan), np.full(len(table), np.nan), []
    for index in range(folds.count):
        train_rows, test_rows = folds.held_out(index)
        latency, width[test_rows], name = answer(train_rows, take(ops, test_rows))
        residual[test_rows] = np.log(table.latency_us[test_rows] / latency)
        chosen.append(name)
    return CrossFit.of(folds.scored, residual, width, chosen)


def cross_fit(
    residuals: Mapping[str, np.ndarray],
    analytical_us: np.ndarray,
    classes: np.ndarray,
    weights: np.ndarray,
    folds: Split,
    coverage: float,
    grouped: bool = True,
) -> CrossFit:
    """Score the procedure from each candidate's held-out residuals [n]; ``classes`` [n] as intervals take them.

    ``grouped``: whether the procedure calibrates its intervals by groups, as :func:`.learning.learn` does.
    """
    count = len(analytical_us)
    residual, width, chosen = np.full(count, np.nan), np.full(count, np.nan), []
    for index in range(folds.count):
        rows_of_fold = np.flatnonzero(folds.fold == index)
        others = np.flatnonzero((folds.fold != index) & (folds.fold >= 0))
        name = choose(residuals, weights, others)
        chosen.append(name)
        residual[rows_of_fold] = residuals[name][rows_of_fold]
        training = residuals[name][others], analytical_us[others], classes[others]
        intervals = (
            calibrate_grouped(*training, folds.fold[others], coverage) if grouped else calibrate(*training, coverage)
        )
        width[rows_of_fold] = intervals.widths(
            analytical_us[rows_of_fold], np.zeros(len(rows_of_fold)), classes[rows_of_fold]
        )
    return CrossFit.of(folds.scored, residual, width, chosen)


def report(table: MeasurementTable, ops: Frame, folds: Split, crossed: CrossFit, seed: int = 0) -> dict[str, Any]:
    """One evaluation as JSON has it: errors, intervals, errors by dtype, and what simpler answers would have cost."""
    dtype = table.dtype[crossed.rows]
    kinds = [str(name) for name in np.unique(dtype)]
    return {
        "split": folds.label,
        "n": len(crossed.rows),
        **summarise(crossed.residual),
        "coverage": float(np.mean(crossed.inside)),
        "interval_width": float(np.median(np.expm1(crossed.width))),
        "chosen": list(crossed.chosen),
        "by_dtype": {
            name: {
                "n": int((dtype == name).sum()),
                **summarise(crossed.residual[dtype == name]),
                "coverage": float(np.mean(crossed.inside[dtype == name])),
            }
            for name in kinds
        },
        "baselines": baselines(table, ops, folds, seed),
    }


def baselines(table: MeasurementTable, ops: Frame, folds: Split, seed: int) -> dict[str, dict[str, float]]:
    """Errors of answers without learning, fitted on the same folds; each fold scored on at most 4,000 of its rows."""
    errors: dict[str, list[np.ndarray]] = {name: [] for name in BASELINES}
    for index in range(folds.count):
        train_rows, test_rows = folds.held_out(index)
        if len(test_rows) > SAMPLE:
            test_rows = np.sort(np.random.default_rng(seed).choice(test_rows, SAMPLE, replace=False))
        train, test = table.take(train_rows), table.take(test_rows)
        for name, answer in BASELINES.items():
            guess = answer(train, take(ops, train_rows), test, take(ops, test_rows))
            errors[name].append(np.log(test.latency_us / guess))
    return {name: summarise(np.concatenate(parts)) for name, parts in errors.items()}


def ape(log_ratio: np.ndarray) -> np.ndarray:
    """|predicted - measured| / measured in percent, from ln(measured / predicted)."""
    return 100.0 * np.abs(np.expm1(-log_ratio))


def summarise(log_ratio: np.ndarray) -> dict[str, float]:
    """Median, mean, p90, maximum APE and bias (mean signed error) in percent, from ln(measured / predicted)."""
    errors = ape(log_ratio)
    return {
        "median_ape": float(np.median(errors)),
        "mean_ape": float(np.mean(errors)),
        "p90_ape": float(np.quantile(errors, 0.9)),
        "max_ape": float(np.max(errors)),
        "bias": float(100.0 * np.mean(np.expm1(-log_ratio))),
    }
