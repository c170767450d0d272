"""Kernels of one kind on one device, learned together: they share the chip, and few rows of each are many of all.

ln(measured / analytical) of a kernel is a level, a part that all kernels have (bandwidth, floors and waves of the chip)
and one of its own, both smooth in an op's features: a Gaussian process over features and kernels, with the covariance
k(x, y) (1 + apart [the same kernel]) (Bonilla, Chai and Williams, "Multi-task Gaussian Process Prediction", NIPS 2007).
Levels are those of generalised least squares (Rasmussen and Williams, "Gaussian Processes for Machine Learning",
sec. 2.7); how far kernels are apart is what makes the rows likeliest (sec. 5.4.1).

A campaign times the same ops by several kernels. So groups are left out of all kernels at once: what a step asks is as
a rule an op that none of them was timed on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..datasets.kernels import is_eager
from .candidates import Options
from .choice import is_own
from .correction import Correction
from .envelope import surround
from .features import Frame
from .intervals import calibrate_grouped, classes_of
from .kriging import Kriging, Scales, covariance, doubts, search
from .learning import Learned, fold_count, task_of
from .splits import split
from .table import MeasurementTable

MOST_ROWS = 600  # of other kernels: more take long, and say little of what kernels share (a judgement)
APART = (0.0, 0.03, 0.1, 0.3, 1.0)  # of the variance that kernels share: what is tried for a kernel's own part
METHOD = "interpolation"  # the candidate whose process this is


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of several kernels end to end: scaled features [n, c], ln ratios and noise [n], and ``kernel``, from 0."""

    points: np.ndarray
    target: np.ndarray
    noise: np.ndarray
    kernel: np.ndarray
    features: int  # columns that a predictor has, of which points are some

    def take(self, rows: np.ndarray) -> _Rows:
        return _Rows(self.points[rows], self.target[rows], self.noise[rows], self.kernel[rows], self.features)

    def covariance(self, apart: float) -> np.ndarray:
        """Prior covariance [n, n] of the parts that are smooth, in units of what kernels share."""
        same = self.kernel[:, None] == self.kernel
        return covariance(self.points, self.points) * (1.0 + apart * same)


def learn_together(
    table: MeasurementTable, ops: Frame, others: Sequence[MeasurementTable], options: Options, alone: Learned
) -> Learned:
    """What a table's rows teach beside those of other kernels (:func:`of_own_rows`).

    Its interval is that of rows of all kernels that were held out, as few rows of one say little of how sure it is.
    ``alone`` is what the rows taught by themselves: how fast errors grow outside is taken from there.
    """
    tables = [table, *_some(others, MOST_ROWS, options.seed)]
    frames = [ops, *(other.frame() for other in tables[1:])]
    tasks = [task_of(*rows_of_kernel, options) for rows_of_kernel in zip(tables, frames, strict=True)]
    matrix = np.concatenate([task.matrix for task in tasks])
    kernel = np.repeat(np.arange(len(tasks)), [len(task.target) for task in tasks])
    target = np.concatenate([task.target for task in tasks])
    centred = target - np.array([task.offset for task in tasks])[kernel]
    names, weights = tasks[0].names, np.concatenate([task.weights for task in tasks])
    scales = search(matrix, names, centred - centred.mean(), options.interpolation.search_rows, options.seed)
    noise = scales.noise / np.maximum(weights, 1e-3)
    rows = _Rows(scales.scaled(matrix).astype(np.float32), target, noise, kernel, matrix.shape[1])
    columns = {name: np.concatenate([kernel_table.columns[name] for kernel_table in tables]) for name in table.columns}
    folds = split(table.kind, columns, fold_count(len(kernel), options), options.seed)
    some = np.random.default_rng(options.seed).permutation(len(kernel))[: options.interpolation.search_rows]
    apart = max(APART, key=lambda variance: _likelihood(rows.take(some), len(tasks), variance))
    residual = np.full(len(kernel), np.nan)
    for index in range(folds.count):
        train_rows, test_rows = folds.held_out(index)
        for number, fitted in enumerate(_fit(rows.take(train_rows), len(tasks), scales, apart)):
            own_rows = test_rows[kernel[test_rows] == number]
            residual[own_rows] = target[own_rows] - fitted.predict(matrix[own_rows])
    analytical_us = np.concatenate([frame.analytical_us for frame in frames])
    intervals = calibrate_grouped(residual, analytical_us, classes_of(names, matrix), folds.fold, options.coverage)
    formats = np.concatenate([kernel_table.dtype for kernel_table in tables])
    return dataclasses.replace(
        alone,
        correction=_fit(rows, len(tasks), scales, apart)[0],
        intervals=dataclasses.replace(intervals, growth=alone.intervals.growth),
        envelope=surround(matrix[np.isin(formats, np.unique(table.dtype))], names, options.seed),
        chosen=METHOD,
        residuals={METHOD: residual[: len(table)]},
        folds=dataclasses.replace(folds, fold=folds.fold[: len(table)], label=f"{folds.label} of all kernels"),
    )


def of_own_rows(
    table: MeasurementTable, others: Sequence[MeasurementTable], options: Options
) -> list[MeasurementTable]:
    """Tables of other kernels that a table may be learned with: own rows all, of the same kind and device.

    Not those of operators one by one, which are several kernels.
    """
    if METHOD not in options.candidates or not options.interpolation.able(len(table)):
        return []

    def able(one: MeasurementTable) -> bool:
        return is_own(one.sources.get("source", ())) and not is_eager(one.kind, one.backend)

    alike = [other for other in others if (other.kind, other.device.id) == (table.kind, table.device.id)]
    return [other for other in alike if other.backend != table.backend and able(other)] if able(table) else []


def _some(tables: Sequence[MeasurementTable], most: int, seed: int) -> list[MeasurementTable]:
    """Tables with ``most`` rows in all: of each as many as of any other, as far as it has them, drawn at random."""
    samples = list[MeasurementTable]()
    for place, table in enumerate(sorted(tables, key=len)):
        count = min(len(table), most // (len(tables) - place))
        rows = np.random.default_rng(seed).permutation(len(table))[:count]
        samples.append(table.take(np.sort(rows)))
        most -= count
    return samples


def _levels(inverse: np.ndarray, rows: _Rows, kernels: int) -> np.ndarray:
    """The level of every kernel by generalised least squares; one without rows has the mean of the others."""
    numbers, code = np.unique(rows.kernel, return_inverse=True)
    belongs = np.eye(len(numbers))[code]
    pull = belongs.T @ inverse
    solved = np.linalg.solve(pull @ belongs, pull @ rows.target)
    levels = np.full(kernels, solved.mean())
    levels[numbers] = solved
    return levels


def _likelihood(rows: _Rows, kernels: int, apart: float) -> float:
    """ln p(target) up to a constant, levels and amplitude at their best."""
    kernel = rows.covariance(apart) + np.diag(rows.noise)
    inverse = np.linalg.inv(kernel)
    residual = rows.target - _levels(inverse, rows, kernels)[rows.kernel]
    amplitude = max(float(residual @ inverse @ residual), 1e-300)
    return float(-0.5 * np.linalg.slogdet(kernel)[1] - 0.5 * len(residual) * np.log(amplitude))


def _fit(rows: _Rows, kernels: int, scales: Scales, apart: float) -> list[Correction]:
    """The correction of every kernel: its level, what all kernels share, and its own part."""
    kernel = rows.covariance(apart)
    inverse = np.linalg.inv(kernel + np.diag(rows.noise))
    noise = rows.noise * doubts(inverse, rows.target - _levels(inverse, rows, kernels)[rows.kernel]) ** 2
    inverse = np.linalg.inv(kernel + np.diag(noise))
    levels = _levels(inverse, rows, kernels)
    alpha = inverse @ (rows.target - levels[rows.kernel])

    def of_kernel(number: int) -> Correction:
        weight = alpha * (1.0 + apart * (rows.kernel == number))
        smooth = Kriging(scales.columns, scales.centre, scales.weight, rows.points, weight)
        return Correction(rows.features, float(levels[number]), kriging=smooth)

    return [of_kernel(number) for number in range(kernels)]
