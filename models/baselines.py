"""What one could answer without learning: the figures every predictor stands beside.

Each takes a table of known rows and one of asked ops, both with their frames, and returns latencies in us [n].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..datasets.vocabulary import KINDS
from .features import Frame
from .table import MeasurementTable

SAMPLE = 4000  # ops asked of a fold: enough for a median, and interpolation is slow
APART = 1e3  # octaves between ops that differ in a code (dtype, layout, …): never neighbours while there is another
RIDGE = 1e-2  # pulls slopes of the local fit towards the roofline's


def roofline(train: MeasurementTable, known_ops: Frame, test: MeasurementTable, ops: Frame) -> np.ndarray:
    """The lower bound itself: FLOPs over peak, bytes over bandwidth."""
    return np.maximum(ops.roofline_us, 1e-3)


def calibrated_roofline(train: MeasurementTable, known_ops: Frame, test: MeasurementTable, ops: Frame) -> np.ndarray:
    """a · roofline + b, by dtype: efficiency and launch cost that fit the known rows best (median log error)."""
    out = np.empty(len(test))
    for dtype in np.unique(test.dtype):
        rows, same_dtype = test.dtype == dtype, train.dtype == dtype
        same_dtype = same_dtype if same_dtype.any() else np.ones(len(train), dtype=bool)
        slope, floor = _line(known_ops.roofline_us[same_dtype], train.latency_us[same_dtype])
        out[rows] = slope * ops.roofline_us[rows] + floor
    return np.maximum(out, 1e-3)


def _line(roofline_us: np.ndarray, latency_us: np.ndarray) -> tuple[float, float]:
    """Slope and floor: the floor from some quantiles of latency, the slope as the median of what remains."""
    best = (np.inf, 1.0, 0.0)
    bound = np.maximum(roofline_us, 1e-6)
    for floor in (0.0, *np.quantile(latency_us, [0.0, 0.005, 0.02, 0.05, 0.1, 0.2]) * 0.95):
        above = latency_us > 2.0 * floor
        if not above.any():
            continue
        slope = float(np.median((latency_us[above] - floor) / bound[above]))
        error = float(np.mean(np.abs(np.log(latency_us / (slope * bound + floor)))))
        best = min(best, (error, slope, float(floor)))
    return best[1], best[2]


def log_log(train: MeasurementTable, known_ops: Frame, test: MeasurementTable, ops: Frame) -> np.ndarray:
    """Log-log interpolation: a plane through the nearest known ops of the same codes, in logs of sizes and time."""
    here, there = _coordinates(train), _coordinates(test)
    sizes = _sizes(train)
    count = min(2 * (sizes + 1), len(train))
    near = _nearest(here, there, count)
    level = np.log(train.latency_us)
    away = here[near][:, :, :sizes] - there[:, None, :sizes]
    alike = (np.abs(here[near][:, :, sizes:] - there[:, None, sizes:]) < 1.0).all(axis=2)
    alike |= ~alike.any(axis=1)[:, None]
    weight = alike / (0.1 + (away**2).sum(axis=2))
    design = np.concatenate([np.ones_like(away[:, :, :1]), away], axis=2)
    left = np.einsum("nkp,nk,nkq->npq", design, weight, design)
    left += RIDGE * np.diag([0.0] + [1.0] * sizes) * weight.sum(axis=1)[:, None, None] + 1e-9 * np.eye(sizes + 1)
    right = np.einsum("nkp,nk,nk->np", design, weight, level[near])
    value = np.linalg.solve(left, right[:, :, None])[:, 0, 0]
    return np.exp(np.clip(value, level.min() - 3.0, level.max() + 3.0))


def nearest(train: MeasurementTable, known_ops: Frame, test: MeasurementTable, ops: Frame) -> np.ndarray:
    """The latency of the known op whose log sizes are nearest, of the same codes where there is one."""
    return train.latency_us[_nearest(_coordinates(train), _coordinates(test), 1)[:, 0]]


BASELINES: dict[str, Callable[[MeasurementTable, Frame, MeasurementTable, Frame], np.ndarray]] = {
    "roofline": roofline,
    "calibrated_roofline": calibrated_roofline,
    "log_log": log_log,
    "nearest": nearest,
}


def _sizes(table: MeasurementTable) -> int:
    return sum(not dim.choices for dim in KINDS[table.kind].dims)


def _coordinates(table: MeasurementTable) -> np.ndarray:
    """log2 of sizes, then codes far apart: float64 [n, d]. Texts are coded by content, whatever rows are there."""
    dims = KINDS[table.kind].dims
    sizes = [np.log2(np.maximum(table.columns[dim.name], 0.5)) for dim in dims if not dim.choices]
    codes = [APART * table.columns[dim.name] for dim in dims if dim.choices]
    for texts in (table.dtype, table.out_dtype, table.cache):
        values, code = np.unique(texts.astype(str), return_inverse=True)
        marks = np.array([int.from_bytes(value.encode(), "big") % 9973 for value in values], dtype=np.float64)
        codes.append(APART * marks[code.reshape(-1)])
    return np.stack([*sizes, *codes], axis=1).astype(np.float64)


def _nearest(here: np.ndarray, there: np.ndarray, count: int) -> np.ndarray:
    """Positions of the nearest ``count`` points of [n, d] for each of [m, d]: int64 [m, count]."""
    from scipy.spatial import cKDTree

    near = cKDTree(here).query(there, k=[*range(1, count + 1)])[1]
    return np.asarray(near, dtype=np.int64)
