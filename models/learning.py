"""Learning one table: every candidate answers for groups it has not seen, the best is fitted on all rows.

What is learned is ln(measured / analytical), never raw time, so that beyond the data physics remains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .candidates import Options, Task
from .correction import Correction
from .envelope import Envelope, surround
from .features import Frame, feature_names
from .intervals import Intervals, calibrate_grouped, classes_of
from .splits import Split, even_folds, split, splits
from .table import MeasurementTable

BASELINE = "calibrated"
NEAR_TIE = 1.01  # times the least error: the simpler of candidates that are so near is taken
REHEARSAL = 8000  # rows from which the growth of errors outside is read
WIDTHS, WIDTH_MULTIPLE = ("n", "k"), 64  # of a product: a model's widths are multiples of it, as a rule
OF_MODELS = 4.0  # times as much as another row of a product counts one with such widths: a judgement
LARGE = 20_000  # rows from which three folds tell as much as five


@dataclass(frozen=True, eq=False)
class Learned:
    """What a table taught: the chosen correction, its interval and envelope, and how every candidate did.

    ``residuals``: ln(measured / predicted) [n] by candidate, from the fold that left the row's group out; NaN for
    rows that were never held out.
    """

    correction: Correction
    intervals: Intervals
    envelope: Envelope
    chosen: str
    residuals: Mapping[str, np.ndarray]
    folds: Split
    names: Sequence[str]

    def answer(self, ops: Frame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Latency in us, half-width of its interval in ln units, and radii outside the envelope, of n ops."""
        excess = self.envelope.excess(ops.matrix)
        latency = ops.analytical_us * np.exp(self.correction.predict(ops.matrix))
        return latency, self.intervals.widths(ops.analytical_us, excess, classes_of(self.names, ops.matrix)), excess


def task_of(table: MeasurementTable, ops: Frame, options: Options) -> Task:
    """A table as candidates take it."""
    target = np.log(table.latency_us / ops.analytical_us)
    weights = weights_of(table, ops, options)
    return Task(feature_names(table.kind), ops.matrix, target, weights, options.seed)


def learn(table: MeasurementTable, ops: Frame, options: Options, folds: Split | None = None) -> Learned:
    """Try all candidates on held-out groups, fit the best on every row, calibrate its interval.

    ``options`` as :meth:`Options.for_kind` gives them. Deterministic for a seed.
    """
    task = task_of(table, ops, options)
    folds = folds or split(table.kind, table.columns, fold_count(len(table), options), options.seed)
    prepared = prepare(task, options)
    residuals = held_out(task, folds, prepared, options)
    scored = folds.scored
    name = choose(residuals, task.weights, scored)
    correction = options.candidate(name).fit(task, prepared[name])
    classes = classes_of(task.names, ops.matrix)[scored]
    intervals = calibrate_grouped(
        residuals[name][scored], ops.analytical_us[scored], classes, folds.fold[scored], options.coverage
    )
    intervals = _widened(intervals, table, task, ops, options, name)
    if table.noise is not None:
        intervals = intervals.at_least(table.noise, ops.analytical_us, classes_of(task.names, ops.matrix))
    envelope = surround(ops.matrix, task.names, options.seed)
    return Learned(correction, intervals, envelope, name, residuals, folds, task.names)


def _widened(
    intervals: Intervals, table: MeasurementTable, task: Task, ops: Frame, options: Options, name: str
) -> Intervals:
    """Intervals that grow outside the envelope as errors do when the far end of this very table is left out."""
    for folds in splits(table.kind, "extrapolate", table.columns, options.folds, options.seed)[0].values():
        train_rows, test_rows = (_some(rows, options.seed) for rows in folds.held_out(0))
        candidate, train = options.candidate(name), task.rows(train_rows)
        fitted = candidate.fit(train, candidate.prepare(train))
        excess = surround(train.matrix, task.names, options.seed).excess(task.matrix[test_rows])
        residual = task.target[test_rows] - fitted.predict(task.matrix[test_rows])
        classes = classes_of(task.names, task.matrix[test_rows])
        intervals = intervals.widened(residual, ops.analytical_us[test_rows], excess, classes)
    return intervals


def _some(rows: np.ndarray, seed: int) -> np.ndarray:
    if len(rows) <= REHEARSAL:
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, REHEARSAL, replace=False))


def fold_count(rows: int, options: Options) -> int:
    """Folds for a table: as asked, at most three for a large one."""
    return min(options.folds, 3) if rows > LARGE else options.folds


def held_out(task: Task, folds: Split, prepared: Mapping[str, Any], options: Options) -> dict[str, np.ndarray]:
    """ln(measured / predicted) [n] by each candidate, from the fold that left the row out; NaN where none did."""
    residuals = {name: np.full(len(task.target), np.nan) for name in prepared}
    for index in range(folds.count):
        train_rows, test_rows = folds.held_out(index)
        train = task.rows(train_rows)
        for name, work in prepared.items():
            fitted = options.candidate(name).fit(train, work)
            residuals[name][test_rows] = task.target[test_rows] - fitted.predict(task.matrix[test_rows])
    return residuals


def choose(loss: Mapping[str, np.ndarray], weights: np.ndarray, rows: np.ndarray) -> str:
    """The candidate with least weighted mean absolute log error on some rows; the simpler (first) one at a near tie.

    Errors count up to a factor of two, so that one outlier row decides nothing.
    """
    scores = {
        name: float(np.average(np.minimum(np.abs(losses[rows]), np.log(2.0)), weights=weights[rows]))
        for name, losses in loss.items()
    }
    least = min(scores.values())
    return next(name for name, score in scores.items() if score <= least * NEAR_TIE)


def best(task: Task, groups: np.ndarray, options: Options) -> Correction:
    """The correction of the best candidate, fitted on all rows; ``groups`` int64 [n] are held out together."""
    codes = np.unique(groups, return_inverse=True)[1].reshape(-1)
    folds = even_folds(codes, fold_count(len(codes), options), options.seed, "grouped")
    prepared = prepare(task, options)
    name = choose(held_out(task, folds, prepared, options), task.weights, np.arange(len(codes)))
    return options.candidate(name).fit(task, prepared[name])


def weights_of(table: MeasurementTable, ops: Frame, options: Options) -> np.ndarray:
    """Weights [n] with mean 1 of a table's rows: by time (:func:`weigh`), and those of products as models have them.

    Campaigns time ragged sizes too, which take up to twice as long and teach what a tail costs; but widths of models
    are multiples of 64. Counted alike, errors of ragged ones decide what is chosen and fitted, which is then worse for
    the shapes of steps.
    """
    weights = weigh(ops.analytical_us, options.weight_power)
    if not set(WIDTHS) <= set(table.columns):
        return weights
    aligned = np.all([table.columns[name] % WIDTH_MULTIPLE == 0 for name in WIDTHS], axis=0)
    weights = weights * np.where(aligned, OF_MODELS, 1.0)
    return np.asarray(weights / weights.mean())


def weigh(analytical_us: np.ndarray, power: float) -> np.ndarray:
    """Weights [n] with mean 1 that grow as time to a power, within a factor of four: step time is what counts."""
    weights = np.clip((analytical_us / np.median(analytical_us)) ** power, 0.25, 4.0)
    return np.asarray(weights / weights.mean())


def prepare(task: Task, options: Options) -> dict[str, Any]:
    """Candidates that suit the table, by name, with their work done once a table."""
    rows = len(task.target)
    names = [name for name in options.candidates if options.candidate(name).able(rows)] or [BASELINE]
    return {name: options.candidate(name).prepare(task) for name in names}
