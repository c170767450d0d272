"""Interpolation between few measurements: a Gaussian process on log features, with its posterior mean as arrays.

A table of some hundred rows is too small for trees, whose answer is a staircase. This interpolates measured over
analytical time smoothly along sizes and returns to the mean ratio away from data: physics, calibrated.
Rasmussen and Williams, "Gaussian Processes for Machine Learning", alg. 2.1; one length scale a group of features,
found by maximum posterior likelihood (sec. 5.4), outliers down-weighted once by their leave-one-out residual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .features import smooth

RESOLUTION = 6  # decimals: last bits of matrix products depend on how many rows are asked about
SQRT5 = 5.0**0.5  # of Matérn's kernel of degree 5/2
PREDICT_BLOCK = 2_000_000  # pairs of rows and points computed at a time
START_WEIGHT, START_NOISE = 0.3, 0.05  # of a group of features, and of the noise: where the search begins
LEAST_AMPLITUDE = 1e-12  # of logarithms, squared: targets that are all alike have none
PRIOR_SPREAD = 1.5  # of log weights, and of log noise over amplitude: keeps small tables from over-fitting
OUTLIER = 2.5  # robust standard deviations from which a row counts less


@dataclass(frozen=True, eq=False)
class Kriging:
    """Posterior mean over ``points``: ``kernel(z, points) @ alpha`` with z the scaled features."""

    columns: np.ndarray  # int64 [c]: feature columns in use
    centre: np.ndarray  # float32 [c]
    weight: np.ndarray  # float32 [c]: scale of each column in the kernel's distance
    points: np.ndarray  # float32 [n, c]
    alpha: np.ndarray  # float64 [n]

    def predict(self, matrix: np.ndarray) -> np.ndarray:
        """float64 [n] for float32 [n, features]."""
        out = np.empty(len(matrix))
        rows = max(1, PREDICT_BLOCK // max(len(self.points), 1))
        for start in range(0, len(matrix), rows):
            scaled = (matrix[start : start + rows, self.columns] - self.centre) * self.weight
            out[start : start + rows] = _matern(_square_distances(scaled, self.points)) @ self.alpha
        return np.round(out, RESOLUTION)

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in ("columns", "centre", "weight", "points", "alpha")}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Kriging:
        return cls(*(arrays[name] for name in ("columns", "centre", "weight", "points", "alpha")))


@dataclass(frozen=True, eq=False)
class Scales:
    """Hyper-parameters of one table: column weights, and noise variance in units of the signal's."""

    columns: np.ndarray
    centre: np.ndarray
    weight: np.ndarray
    noise: float

    def scaled(self, matrix: np.ndarray) -> np.ndarray:
        """Points of the kernel's space [n, c] for features [n, f]."""
        return (matrix[:, self.columns] - self.centre) * self.weight


def default_scales(matrix: np.ndarray, names: Sequence[str]) -> Scales:
    """What :func:`search` starts from: where nothing was measured, every group of features counts alike."""
    spread = matrix.std(axis=0)
    columns = np.flatnonzero(spread > 1e-6)
    weight = np.zeros(len(columns))
    for group in _groups([names[int(column)] for column in columns]):
        weight[group] = np.sqrt(START_WEIGHT / len(group))
    centre = matrix[:, columns].mean(axis=0).astype(np.float32)
    return Scales(columns, centre, (weight / spread[columns]).astype(np.float32), START_NOISE)


def covariance(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Prior covariance [n, m] of scaled points, in units of the signal's variance."""
    return _matern(_square_distances(left, right))


def search(matrix: np.ndarray, names: Sequence[str], target: np.ndarray, rows: int, seed: int) -> Scales:
    """Weights by maximum posterior on at most ``rows`` rows of ``target`` (zero mean) over features [n, f]."""
    from scipy.optimize import minimize

    if len(matrix) > rows:
        chosen = np.random.default_rng(seed).choice(len(matrix), rows, replace=False)
        matrix, target = matrix[chosen], target[chosen]
    spread = matrix.std(axis=0)
    columns = np.flatnonzero(spread > 1e-6)
    if not len(columns):
        return Scales(columns, np.zeros(0, np.float32), np.zeros(0, np.float32), 1.0)
    scaled = (matrix[:, columns] - matrix[:, columns].mean(axis=0)) / spread[columns]
    groups = _groups([names[int(column)] for column in columns])
    squares = np.stack(
        [_square_distances(coordinates, coordinates).ravel() for coordinates in (scaled[:, group] for group in groups)]
    )
    start = np.concatenate([np.log([START_WEIGHT / len(group) for group in groups]), [np.log(START_NOISE)]])
    unit = target / max(float(np.std(target)), 1e-9)
    optimum = minimize(
        _negative_posterior, start, (squares, unit, start), "L-BFGS-B", jac=True, options={"maxiter": 30}
    )
    weight = np.zeros(len(columns))
    for group, value in zip(groups, optimum.x[:-1], strict=True):
        weight[group] = np.exp(0.5 * value)
    centre = matrix[:, columns].mean(axis=0).astype(np.float32)
    return Scales(columns, centre, (weight / spread[columns]).astype(np.float32), float(np.exp(optimum.x[-1])))


def fit(matrix: np.ndarray, target: np.ndarray, weights: np.ndarray, scales: Scales) -> Kriging:
    """The posterior mean of ``target`` [n] (zero mean) under given scales; ``weights`` [n] divide the noise."""
    points = ((matrix[:, scales.columns] - scales.centre) * scales.weight).astype(np.float32)
    kernel = _matern(_square_distances(points, points))
    noise = scales.noise / np.maximum(weights, 1e-3)
    inverse = np.linalg.inv(kernel + np.diag(noise))
    alpha = np.linalg.solve(kernel + np.diag(noise * doubts(inverse, target) ** 2), target)
    return Kriging(scales.columns, scales.centre, scales.weight, points, alpha)


def doubts(inverse: np.ndarray, target: np.ndarray) -> np.ndarray:
    """How many times farther than most each row [n] is off what the others say of it, at least 1; ``inverse`` [n, n] of
    the covariance of the targets."""
    left_out = (inverse @ target) / np.diag(inverse)
    robust = 1.4826 * max(float(np.median(np.abs(left_out))), 1e-6)
    return np.asarray(np.maximum(np.abs(left_out) / (OUTLIER * robust), 1.0))


def _groups(names: list[str]) -> list[np.ndarray]:
    """Columns that share a weight: each size its own, smooth figures together, details together, codes each."""
    alone_columns = [
        [i] for i, name in enumerate(names) if name.startswith(("size_", "choice_", "dtype", "cache_warm"))
    ]
    alone = {column[0] for column in alone_columns}
    other_columns = [i for i in range(len(names)) if i not in alone]
    together = [[i for i in other_columns if smooth(names[i])], [i for i in other_columns if not smooth(names[i])]]
    return [np.array(column) for column in alone_columns + together if column]


def _negative_posterior(
    logs: np.ndarray, squares: np.ndarray, target: np.ndarray, start: np.ndarray
) -> tuple[float, np.ndarray]:
    """-log p(target, logs) and its gradient: GPML eq. 5.9, amplitude integrated out by its best value."""
    size = len(target)
    weights, noise = np.exp(np.clip(logs[:-1], -12, 6)), np.exp(np.clip(logs[-1], -9, 4))
    square = weights @ squares
    distance = np.sqrt(square)
    decay = np.exp(-SQRT5 * distance)
    kernel = ((1.0 + SQRT5 * distance + 5.0 / 3.0 * square) * decay).reshape(size, size)
    kernel[np.diag_indices(size)] += noise
    lower = np.linalg.cholesky(kernel)
    inverse = np.linalg.inv(kernel)
    alpha = inverse @ target
    amplitude = max(float(target @ alpha) / size, LEAST_AMPLITUDE)
    value = 0.5 * size * np.log(amplitude) + np.log(np.diag(lower)).sum()
    pull = np.outer(alpha, alpha) / amplitude - inverse
    slope = (pull.ravel() * (-5.0 / 6.0) * (1.0 + SQRT5 * distance) * decay) @ squares.T
    gradient = np.concatenate([-0.5 * slope * weights, [-0.5 * np.trace(pull) * noise]])
    away = (logs - start) / PRIOR_SPREAD
    return value + 0.5 * float(away @ away), gradient + away / PRIOR_SPREAD


def _matern(square: np.ndarray) -> np.ndarray:
    """Matérn kernel of smoothness 5/2 by squared distance (GPML eq. 4.17)."""
    distance = np.sqrt(square)
    return (1.0 + SQRT5 * distance + 5.0 / 3.0 * square) * np.exp(-SQRT5 * distance)


def _square_distances(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    left, right = left.astype(np.float64), right.astype(np.float64)
    square = (left**2).sum(1)[:, None] + (right**2).sum(1) - 2.0 * left @ right.T
    return np.maximum(square, 0.0)
