"""Where a predictor has data: a distance in feature space, not a box.

An op is inside when all its codes (dtype, layout, cache, …) were seen and its sizes lie within one radius of a
landmark. Landmarks are training ops picked farthest-first, so that every training op is near one; the radius is what
separates training ops from each other. Sizes are in octaves, divided by the spread of each dimension. A quarter of an
octave beyond the range of a size an op is outside; how errors grow from there is what :mod:`.intervals` calibrates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

LANDMARKS = 192
BLOCK = 512  # rows whose distances to all landmarks are held at once, in cache
SAMPLE = 4096
CODES = ("choice_", "dtype", "out_dtype", "cache_warm")
UNSEEN_CODE = 3.0  # radii added for a code outside training
SLACK = 1.25  # times the widest gap that training rows leave between themselves
REACH = 0.25  # octaves beyond the smallest or largest size that are still inside
ARRAYS = ("sizes", "codes", "centre", "scale", "landmarks", "seen", "low", "high")


@dataclass(frozen=True, eq=False)
class Envelope:
    """``sizes`` and ``codes`` index feature columns; ``landmarks`` float32 [l, s] are scaled sizes."""

    sizes: np.ndarray
    codes: np.ndarray
    centre: np.ndarray  # float32 [s]
    scale: np.ndarray  # float32 [s]: octaves that count as one
    landmarks: np.ndarray
    seen: np.ndarray  # float32 [c, v]: values of each code in training, padded with NaN
    low: np.ndarray  # float32 [s]: the smallest size of training, in octaves
    high: np.ndarray
    radius: float

    def excess(self, matrix: np.ndarray) -> np.ndarray:
        """How far outside each row lies: float64 [n], radii from landmarks plus octaves beyond the range; 0 inside."""
        out = np.empty(len(matrix))
        for start in range(0, len(matrix), BLOCK):
            block = matrix[start : start + BLOCK]
            sizes = np.ascontiguousarray(block[:, self.sizes].T)
            beyond = np.maximum(sizes - self.high[:, None], self.low[:, None] - sizes) - np.float32(REACH)
            away = np.add.accumulate(np.maximum(beyond, 0.0), axis=0, dtype=np.float64)[-1]
            points = (sizes - self.centre[:, None]) / self.scale[:, None]
            doubtful = np.flatnonzero(~self._surely_near(points))
            if len(doubtful):
                distance = self._distance(points[:, doubtful])
                away[doubtful] += np.maximum(distance / self.radius - 1.0, 0.0)
            out[start : start + len(block)] = away
        for column, trained in zip(self.codes, self.seen, strict=True):
            values = np.ceil(matrix[:, column])
            out += UNSEEN_CODE * np.all([values != code for code in trained[~np.isnan(trained)]], axis=0)
        return out

    def _surely_near(self, points: np.ndarray) -> np.ndarray:
        """Which columns of ``points`` [s, n] lie within the radius of a landmark by more than rounding: most, quickly.

        |p - l|² as |p|² + |l|² - 2 p l is a matrix product, whose last bits depend on how many rows are asked about.
        """
        length = (points**2).sum(axis=0)
        square = (self._pull @ np.concatenate([points, np.ones((1, points.shape[1]), np.float32)])).min(axis=0) + length
        return np.asarray(square + 1e-5 * (1.0 + length) < self.radius**2)

    def _distance(self, points: np.ndarray) -> np.ndarray:
        """From each column of ``points`` [s, n] to the nearest landmark, whatever its company."""
        square = np.zeros((len(self.landmarks), points.shape[1]), np.float32)
        for landmark, values in zip(self.landmarks.T, points, strict=True):
            square += (values - landmark[:, None]) ** 2
        return np.sqrt(square.min(axis=0))

    @cached_property
    def _pull(self) -> np.ndarray:
        return np.concatenate([-2.0 * self.landmarks, (self.landmarks**2).sum(axis=1, keepdims=True)], axis=1)

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in ARRAYS} | {"radius": np.array(self.radius)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Envelope:
        return cls(**{name: arrays[name] for name in ARRAYS}, radius=float(arrays["radius"]))


def surround(matrix: np.ndarray, names: Sequence[str], seed: int = 0) -> Envelope:
    """The envelope of training features [n, f] with column ``names``. Deterministic for a seed."""
    sizes = np.array([i for i, name in enumerate(names) if name.startswith("size_")], dtype=np.int64)
    codes = np.array([i for i, name in enumerate(names) if name.startswith(CODES)], dtype=np.int64)
    unique = np.unique(matrix[:, sizes], axis=0)
    if len(unique) > SAMPLE:
        chosen = np.random.default_rng(seed).choice(len(unique), SAMPLE, replace=False)
        # corners stay in, or a sample would shrink the envelope
        unique = unique[np.union1d(chosen, np.r_[unique.argmin(0), unique.argmax(0)])]
    centre = unique.mean(axis=0)
    scale = np.maximum(unique.std(axis=0), 1.0)  # a dimension that never varied still reaches an octave
    points = ((unique - centre) / scale).astype(np.float32)
    landmarks, reach = _farthest_first(points)
    return Envelope(
        sizes,
        codes,
        centre.astype(np.float32),
        scale.astype(np.float32),
        landmarks,
        _seen(np.ceil(matrix[:, codes])),  # a warm cache is one, whatever share of the bytes it holds
        matrix[:, sizes].min(axis=0).astype(np.float32),
        matrix[:, sizes].max(axis=0).astype(np.float32),
        radius=max(SLACK * max(_spacing(points), reach), 0.25),
    )


def _seen(codes: np.ndarray) -> np.ndarray:
    values = [np.unique(codes[:, column]) for column in range(codes.shape[1])]
    out = np.full(
        (len(values), max((len(codes_of_column) for codes_of_column in values), default=0)), np.nan, dtype=np.float32
    )
    for row, codes_of_column in enumerate(values):
        out[row, : len(codes_of_column)] = codes_of_column
    return out


def _farthest_first(points: np.ndarray) -> tuple[np.ndarray, float]:
    """Landmarks, and the largest distance from any point to its nearest one (Gonzalez, 1985)."""
    chosen = [int(np.argmax((points**2).sum(axis=1)))]
    near = np.full(len(points), np.inf, dtype=np.float32)
    while len(chosen) < min(LANDMARKS, len(points)):
        near = np.minimum(near, ((points - points[chosen[-1]]) ** 2).sum(axis=1))
        chosen.append(int(np.argmax(near)))
    near = np.minimum(near, ((points - points[chosen[-1]]) ** 2).sum(axis=1))
    return points[chosen], float(np.sqrt(near.max()))


def _spacing(points: np.ndarray) -> float:
    """The distance below which nine in ten training ops have a neighbour."""
    some = points[:: max(1, len(points) // 512)]
    square = (some**2).sum(1)[:, None] + (points**2).sum(1) - 2.0 * some @ points.T
    if square.shape[1] < 2:
        return 0.0
    second = np.partition(square, 1, axis=1)[:, 1]
    return float(np.sqrt(np.quantile(np.maximum(second, 0.0), 0.9)))
