"""Interpolation along one size: a curve of ln(measured / analytical) a series, alpha-beta beyond its end.

Ops that differ in nothing but their size make a series: one collective on so many ranks in one format. Inside its
range the ratio is interpolated over log size by cubics that never overshoot (Fritsch and Carlson, SIAM J. Numer. Anal.
17, 1980), times far above those of larger sizes left out. Beyond its ends the ratio goes on as it does, in the mean,
along the nearest series that were measured there: a link fills alike on eight ranks and on sixteen. Beyond the largest
size of all, time goes on as an alpha-beta model does (Hockney, Parallel Computing 20, 1994): by the last measured time
a byte, which still falls a little, never faster than the analytical law's, or than what was measured where that is
faster all along. A series that was never measured is the mean of the others by inverse square distance
(Shepard, ACM National Conference 1968), so that three rank counts between two are their mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

AXES = ("size_size_bytes", "size_tokens", "size_numel", "size_rows", "size_m", "size_seq_kv")
SPIKE = 1.25  # times the least of all larger sizes: no transfer takes that much longer for being smaller
TAIL = 2.0  # log2 of sizes over which the last time a byte is taken
STILL_FALLING = 0.95  # of the last measured time a byte: larger transfers fill a link better
OTHER_CODE = 3.0  # distance between two choices or formats, in units of log2
LEADERS = 4  # series, the nearest that reach further, whose mean says how one goes on beyond its end
FURTHER = 1.0  # log2 of sizes by which they do


@dataclass(frozen=True, eq=False)
class Interpolant:
    """Curves through p points in all over s series, laid end to end; ``start`` [s + 1] says where each begins."""

    axis: int  # feature column of the log2 size
    time: int  # feature column of the log2 analytical time
    keys: np.ndarray  # int64 [k]: feature columns that name a series
    scales: np.ndarray  # float64 [k]: what one unit of each counts in the distance between series
    series: np.ndarray  # float64 [s, k]
    start: np.ndarray  # int64 [s + 1]
    size: np.ndarray  # float64 [p]: log2
    ratio: np.ndarray  # float64 [p]: ln(measured / analytical)
    rise: np.ndarray  # float64 [p]: its derivative by log2 size
    last_us: np.ndarray  # float64 [s]: analytical time at the largest size
    slope: np.ndarray  # float64 [s]: measured over analytical time a byte at the end

    def predict(self, matrix: np.ndarray) -> np.ndarray:
        """ln(measured / analytical) of each row: float64 [n] for float32 [n, features]."""
        size, time_us = matrix[:, self.axis].astype(np.float64), np.exp2(matrix[:, self.time].astype(np.float64))
        points, row = np.unique(matrix[:, self.keys].astype(np.float64), axis=0, return_inverse=True)
        row = row.reshape(-1)
        out = np.zeros(len(matrix))
        for index, key in enumerate(points):
            rows = np.flatnonzero(row == index)
            for one, weight in enumerate(self._weights(key)):
                if weight > 0:
                    out[rows] += weight * self._line(one, size[rows], time_us[rows])
        return out

    def _weights(self, key: np.ndarray) -> np.ndarray:
        """Share of each series [s] in the answer for one."""
        square = (((self.series - key) * self.scales) ** 2).sum(1)
        if square.min() < 1e-9:
            near = (square < 1e-9).astype(np.float64)
        else:
            near = 1.0 / square**2
        return np.asarray(near / near.sum())

    def _line(self, one: int, size: np.ndarray, time_us: np.ndarray) -> np.ndarray:
        """ln ratio of a series at log2 sizes [n] of known analytical time."""
        out = self._alone(one, size, time_us)
        first, last = self._ends[one]
        for beyond in np.unique(size[(size < first) | (size > last)]):
            rows = np.flatnonzero(size == beyond)
            out[rows] = self._led(one, float(beyond), time_us[rows], out[rows])
        return out

    def _led(self, one: int, size: float, time_us: np.ndarray, alone: np.ndarray) -> np.ndarray:
        """The same of one size beyond the end of a series, as those go on that were measured there."""
        up = bool(size > self._ends[one, 1])
        end, furthest = (float(bound) for bound in (self._ends[one, int(up)], self._furthest[int(up)]))
        reach = min(size, furthest) if up else max(size, furthest)
        leaders, weights = self._leaders(one, reach, up)
        if not len(leaders) or abs(furthest - end) < FURTHER:
            return alone
        of_line, *others = (self._inside(bound, np.array([end, reach])) for bound in (one, *leaders.tolist()))
        ratio = of_line[0] + float(weights @ np.array([bound[1] - bound[0] for bound in others]))
        if not up:
            return np.full(len(time_us), ratio)
        law_us = time_us * 2.0 ** (reach - size)  # at the reach: as the bytes, which are many
        told_us = np.exp(ratio) * law_us + float(weights @ self.slope[leaders]) * (time_us - law_us)
        end_us = np.exp(of_line[0]) * self.last_us[one]
        return np.asarray(np.log(np.maximum(told_us, end_us) / time_us))

    def _alone(self, one: int, size: np.ndarray, time_us: np.ndarray) -> np.ndarray:
        """The same by the points of the series alone: constant below, alpha-beta above."""
        inside = self._inside(one, size)
        last = self.start[one + 1] - 1
        beyond = np.maximum(time_us - self.last_us[one], 0.0)
        reached = np.exp(self.ratio[last]) * self.last_us[one] + self.slope[one] * beyond
        return np.where(size > self.size[last], np.log(reached / (self.last_us[one] + beyond)), inside)

    def _inside(self, one: int, size: np.ndarray) -> np.ndarray:
        """Along the points of a series, constant outside of them."""
        section = slice(self.start[one], self.start[one + 1])
        return _hermite(size, self.size[section], self.ratio[section], self.rise[section])

    @cached_property
    def _ends(self) -> np.ndarray:
        """The smallest and largest log2 size of each series [s, 2]."""
        return np.stack([self.size[self.start[:-1]], self.size[self.start[1:] - 1]], axis=1)

    @cached_property
    def _furthest(self) -> tuple[float, float]:
        """The smallest and the largest log2 size of all series."""
        return float(self._ends[:, 0].min()), float(self._ends[:, 1].max())

    def _leaders(self, one: int, reach: float, up: bool) -> tuple[np.ndarray, np.ndarray]:
        """The nearest series that were measured at a log2 size beyond the end of one, and their shares.

        Sizes between the two that neither was measured at count as distance.
        """
        first, last = self._ends.T
        end = self._ends[one, int(up)]
        able, gap = (last >= reach, first - end) if up else (first <= reach, end - last)
        able[one] = False
        able_lines = np.flatnonzero(able)
        square = (((self.series[able_lines] - self.series[one]) * self.scales) ** 2).sum(1)
        square += np.maximum(gap[able_lines], 0.0) ** 2
        near = np.argsort(square, kind="stable")[:LEADERS]
        weights = 1.0 / np.maximum(square[near], 1e-9) ** 2
        return able_lines[near], weights / max(weights.sum(), 1e-300)

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Interpolant:
        other_arrays = {name: arrays[name] for name in cls.__dataclass_fields__ if name not in ("axis", "time")}
        return cls(int(arrays["axis"]), int(arrays["time"]), **other_arrays)


def axis_of(names: Sequence[str]) -> int | None:
    """The feature that is the size of a series, None where a kind has none."""
    return next((list(names).index(name) for name in AXES if name in names), None)


def fit(matrix: np.ndarray, names: Sequence[str], target: np.ndarray, weights: np.ndarray) -> Interpolant:
    """Lines through ``target`` [n] = ln(measured / analytical) over features [n, f]; repeats are averaged.

    ValueError for features without a size of :data:`AXES`.
    """
    axis = axis_of(names)
    if axis is None:
        raise ValueError(f"no size to interpolate over among {', '.join(names)}; one of {', '.join(AXES)} is needed")
    time = list(names).index("analytical")
    keys = np.array([i for i, name in enumerate(names) if i != axis and _names_a_series(name)])
    scales = np.array([1.0 if names[i].startswith("size_") else OTHER_CODE for i in keys])
    series, row = np.unique(matrix[:, keys].astype(np.float64), axis=0, return_inverse=True)
    row = row.reshape(-1)
    time_us = np.exp2(matrix[:, time].astype(np.float64))
    lines = [
        _series(matrix[rows, axis].astype(np.float64), target[rows], time_us[rows], weights[rows])
        for rows in (np.flatnonzero(row == index) for index in range(len(series)))
    ]
    start = np.cumsum([0, *(len(line[0]) for line in lines)])
    joined = [np.concatenate([line[i] for line in lines]) for i in range(3)]
    ends = [np.array([line[i] for line in lines]) for i in (3, 4)]
    return Interpolant(axis, time, keys, scales, series, start, *joined, *ends)


def _names_a_series(name: str) -> bool:
    return name.startswith(("size_", "choice_")) or name in ("dtype", "out_dtype", "cache_warm")


def _series(
    size: np.ndarray, target: np.ndarray, time_us: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float, float]:
    """Sizes, ratios and their derivatives; at the end analytical time, and measured time a byte over it."""
    points, group = np.unique(size, return_inverse=True)
    group = group.reshape(-1)
    total = np.bincount(group, weights)
    ratio = np.bincount(group, weights * target) / total
    law_us = np.bincount(group, weights * time_us) / total
    measured = _without_spikes(np.exp(ratio) * law_us)
    ratio = np.log(measured / law_us)
    tail = np.flatnonzero(points >= points[-1] - TAIL)[0] if len(points) > 1 else 0
    tail = min(tail, max(len(points) - 2, 0))
    grown, law_grown = measured[-1] - measured[tail], law_us[-1] - law_us[tail]
    slope = STILL_FALLING * grown / law_grown if law_grown > 1e-3 * law_us[-1] else np.exp(ratio[-1])
    least = min(
        1.0, STILL_FALLING * float(np.exp(ratio[-1]))
    )  # the law's, or less where all that is measured is faster
    return points, ratio, _rises(points, ratio), float(law_us[-1]), float(max(slope, least))


def _rises(points: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Derivatives at the points that keep a cubic between them monotone: zero at a turn, else a harmonic mean."""
    if len(points) < 2:
        return np.zeros(len(points))
    width, secant = np.diff(points), np.diff(values) / np.diff(points)
    left, right = 2.0 * width[1:] + width[:-1], width[1:] + 2.0 * width[:-1]
    same = secant[:-1] * secant[1:] > 0
    safe = np.where(same, secant[:-1], 1.0), np.where(same, secant[1:], 1.0)
    inner = np.where(same, (left + right) / (left / safe[0] + right / safe[1]), 0.0)
    return np.concatenate([secant[:1], inner, secant[-1:]])


def _hermite(at_size: np.ndarray, points: np.ndarray, values: np.ndarray, rises: np.ndarray) -> np.ndarray:
    """Cubic Hermite interpolation, constant outside the points."""
    if len(points) < 2:
        return np.full(len(at_size), values[0])
    segment = np.clip(np.searchsorted(points, at_size, side="right") - 1, 0, len(points) - 2)
    width = points[segment + 1] - points[segment]
    t = np.clip((at_size - points[segment]) / width, 0.0, 1.0)
    steps = values[segment + 1] - values[segment]
    bend = rises[segment] * width * (1.0 - t) - rises[segment + 1] * width * t
    return np.asarray(values[segment] + steps * t * t * (3.0 - 2.0 * t) + bend * t * (1.0 - t))


def _without_spikes(measured: np.ndarray) -> np.ndarray:
    """Times by size; one far above that of a larger size was disturbed, and becomes that one."""
    least = np.minimum.accumulate(measured[::-1])[::-1]
    return np.where(measured > SPIKE * least, least, measured)
