"""Intervals with stated coverage: split-conformal on log residuals, per format and size band, wider outside
the envelope.

For a new op like those of calibration, the chance that its true latency lies inside is at least the stated coverage
(Vovk et al., "Algorithmic Learning in a Random World", sec. 2.2; per band: Mondrian, sec. 4.5). Residuals must come
from models that had not seen the op's group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

COVERAGE = 0.9  # what intervals promise where nothing else is asked
PERCENTILES = 0.8  # of the samples lie between the 10th and the 90th percentile
MIN_BAND = 40  # residuals a class needs for a quantile that means something
MAX_BANDS, LEAST_IN_BAND = 6, 12
ENOUGH_IN_BAND = 20  # residuals of a band for a quantile of its own; fewer only scale that of all
# What physics alone is within, each way: nine in ten rows lie within it in the median of 120 tables, each of a kind and
# backend on a device: aiconfigurator's of products, attention and experts on H100 and L40S, NeuSight's and Vidur's. Of
# 16-bit products it is 1.3 to 2.7, of attention 1.5 to 10, of experts 2.2 to 15, of norms and element-wise kernels 1.4
# to 7; tests/benchmarks/accuracy_law.py
UNCALIBRATED_FACTOR = 3.0
STEP = 0.05  # of the share left out, by which the level of grouped rows is raised


def wider(coverage: float, target: float = COVERAGE) -> float:
    """How many times wider, in ln units, an interval of a normal error is that holds ``wanted``, not ``coverage``."""
    normal = NormalDist()
    return 1.0 if coverage == target else normal.inv_cdf(0.5 + target / 2) / normal.inv_cdf(0.5 + coverage / 2)


@dataclass(frozen=True, eq=False)
class Intervals:
    """Half-widths of log latency by class of op (its dtype's code) and size band.

    Row i is class ``classes[i]``, the last row any other; its band j holds analytical times in
    [edges[i, j-1], edges[i, j]) us.
    """

    coverage: float
    classes: np.ndarray  # float64 [c], ascending
    edges: np.ndarray  # float64 [c + 1, bands - 1], ascending, padded with infinity
    half_width: np.ndarray  # float64 [c + 1, bands], in ln units
    growth: float = 1.0  # half-widths added at one unit outside the envelope; they grow as its square root

    def widths(self, analytical_us: np.ndarray, excess: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Half-width in ln units of each op; ``excess`` is how far outside the envelope it lies (0 inside).

        Far outside, an answer is physics times one factor: no more is added than physics alone is off by.
        """
        row = np.searchsorted(self.classes, classes)
        in_class = np.append(self.classes, np.nan)[row] == classes
        row = np.where(in_class, row, len(self.classes))
        band = (analytical_us[:, None] >= self.edges[row]).sum(axis=1)
        inside = self.half_width[row, band]
        return np.asarray(inside + np.minimum(inside * self.growth * np.sqrt(excess), np.log(UNCALIBRATED_FACTOR)))

    def widened(
        self, residuals: np.ndarray, analytical_us: np.ndarray, excess: np.ndarray, classes: np.ndarray
    ) -> Intervals:
        """The same, growing as fast outside the envelope as residuals of ops beyond it [n] ask for; at least as now."""
        away = excess > 0
        if away.sum() < MIN_BAND // 2:
            return self
        inside = self.widths(analytical_us[away], np.zeros(int(away.sum())), classes[away])
        need = (np.abs(residuals[away]) / inside - 1.0) / np.sqrt(excess[away])
        return dataclasses.replace(self, growth=max(self.growth, quantile(need, self.coverage)))

    def at_least(self, noise: np.ndarray, analytical_us: np.ndarray, classes: np.ndarray) -> Intervals:
        """The same, in no class and band narrower than the median ``noise`` [n] in ln units of the rows in it.

        NaN stands for a row whose noise is unknown.
        """
        half_width = self.half_width.copy()
        class_of = np.searchsorted(self.classes, classes)
        class_of = np.where(np.append(self.classes, np.nan)[class_of] == classes, class_of, len(self.classes))
        for row in range(len(half_width)):
            chosen = np.isfinite(noise) & ((class_of == row) | (row == len(self.classes)))
            band = (analytical_us[chosen, None] >= self.edges[row]).sum(axis=1)
            for band_number in np.unique(band):
                noise_of_band = noise[chosen][band == band_number]
                half_width[row, band_number] = max(half_width[row, band_number], float(np.median(noise_of_band)))
        return dataclasses.replace(self, half_width=half_width)

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            "coverage": np.array(self.coverage),
            "classes": self.classes,
            "edges": self.edges,
            "half_width": self.half_width,
            "growth": np.array(self.growth),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Intervals:
        return cls(
            float(arrays["coverage"]),
            arrays["classes"],
            arrays["edges"],
            arrays["half_width"],
            float(arrays["growth"]),
        )


def partly_physics(widths: np.ndarray, learned: np.ndarray) -> np.ndarray:
    """Half-widths in ln [n] of answers that were ``learned`` to so large a part, of which the rest is physics alone."""
    return np.asarray(np.maximum(widths, (1.0 - learned) * np.log(UNCALIBRATED_FACTOR)))


def calibrate(
    residuals: np.ndarray, analytical_us: np.ndarray, classes: np.ndarray, coverage: float = COVERAGE
) -> Intervals:
    """Intervals from held-out residuals ln(measured / predicted), analytical times in us and classes of ops, each [n].

    Bands hold equal numbers of ops; a class with too few rows for bands of its own has those of all.
    ValueError for a coverage outside (0, 1) or no residuals.
    """
    if not 0.0 < coverage < 1.0:
        raise ValueError(f"coverage={coverage} must lie between 0 and 1, for instance 0.9")
    if not len(residuals):
        raise ValueError("an interval needs at least one held-out residual")
    names, counts = np.unique(classes, return_counts=True)
    names = names[counts >= MIN_BAND].astype(np.float64)
    rows = [np.flatnonzero(classes == name) for name in names] + [np.arange(len(residuals))]
    by_class = [_bands(residuals[rows_of_class], analytical_us[rows_of_class], coverage) for rows_of_class in rows]
    bands = max(len(widths) for _, widths in by_class)
    edges = np.full((len(by_class), bands - 1), np.inf)
    half_width = np.zeros((len(by_class), bands))
    for row, (own_edges, widths) in enumerate(by_class):
        edges[row, : len(own_edges)] = own_edges
        half_width[row] = widths[-1]
        half_width[row, : len(widths)] = widths
    return Intervals(coverage, names, edges, half_width)


def calibrate_grouped(
    residuals: np.ndarray, analytical_us: np.ndarray, classes: np.ndarray, fold: np.ndarray, coverage: float = COVERAGE
) -> Intervals:
    """As :func:`calibrate`, where residuals of one group depend on each other; ``fold`` int64 [n] parts whole groups.

    A few groups tell less than their rows promise: a quantile of them covers new groups too rarely. So the quantile
    is raised, in steps, until intervals calibrated on all folds but one cover that one as stated (cross-validated
    level; the two-layer setting of Dunn, Wasserman and Ramdas, arXiv 1809.07441).
    """
    level = coverage
    parts = [(np.flatnonzero(fold != number), np.flatnonzero(fold == number)) for number in np.unique(fold)]
    while len(parts) > 1 and level < 1.0 - 0.5 * (1.0 - coverage):
        inside = 0
        for others, test_rows in parts:
            fitted = calibrate(residuals[others], analytical_us[others], classes[others], level)
            widths = fitted.widths(analytical_us[test_rows], np.zeros(len(test_rows)), classes[test_rows])
            inside += int((np.abs(residuals[test_rows]) <= widths).sum())
        if inside >= coverage * len(residuals):
            break
        level += STEP * (1.0 - coverage)
    return dataclasses.replace(calibrate(residuals, analytical_us, classes, level), coverage=coverage)


def _bands(residuals: np.ndarray, analytical_us: np.ndarray, coverage: float) -> tuple[np.ndarray, np.ndarray]:
    """Edges and half-widths of one class.

    Small bands say how much larger or smaller errors are there, drawn towards those of all by as many rows as a band
    has at the least; the quantile is that of all errors by that measure (normalised conformal prediction: Papadopoulos,
    Vovk and Gammerman, JAIR 40, 2011). So a table of few rows is not as unsure of its middle as of its ends.
    """
    bands = int(np.clip(len(residuals) // LEAST_IN_BAND, 1, MAX_BANDS))
    edges = np.unique(np.quantile(analytical_us, np.arange(1, bands) / bands))
    band = np.searchsorted(edges, analytical_us, side="right")
    errors = np.abs(residuals)
    counts, sums = (np.bincount(band, weights, len(edges) + 1) for weights in (np.ones(len(band)), errors))
    scale = np.maximum((sums + LEAST_IN_BAND * errors.mean()) / (counts + LEAST_IN_BAND), np.finfo(float).tiny)
    widths = scale * quantile(errors / scale[band], coverage)
    for index in np.flatnonzero(counts >= ENOUGH_IN_BAND):
        widths[index] = quantile(errors[band == index], coverage)
    return edges, widths


def classes_of(names: Sequence[str], matrix: np.ndarray) -> np.ndarray:
    """The class of each row of features [n, f] with columns ``names``: the code of its dtype."""
    return matrix[:, names.index("dtype")]


def quantile(scores: np.ndarray, coverage: float) -> float:
    """The ceil((n + 1) coverage)-th smallest score (finite-sample conformal quantile), at most the largest."""
    rank = int(np.ceil((len(scores) + 1) * coverage))
    return float(np.sort(scores)[min(rank, len(scores)) - 1])
