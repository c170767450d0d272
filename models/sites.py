"""Sites that measured the same ops: how far each is off, how far sites differ, and what that means for an answer.

ln(latency) of an op at a site is the op's own, plus an effect of the site, plus noise. Effects are random: a site that
few ops compare is drawn towards the mean of all (empirical Bayes; the spread between sites by the method of moments of
DerSimonian and Laird, "Meta-analysis in clinical trials", 1986). A table is learned with each site's effect taken off,
which is an answer for no site in particular; an interval must then hold for a site that nobody has seen, so that the
spread goes into it, by Student's t for as few sites as there are.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from .intervals import Intervals
from .table import MeasurementTable

FEWEST = 8  # ops that two sites must share before anything is said of them
SWEEPS = 20


@dataclass(frozen=True)
class Sites:
    """Effects by site in ln units, drawn towards 0, and the standard deviation between sites."""

    effects: dict[str, float]
    spread: float
    shared: int  # ops that were measured at more than one site


def compared(table: MeasurementTable) -> Sites | None:
    """The sites of a table; None where fewer than two share enough ops."""
    if table.site is None or len(np.unique(table.site)) < 2:
        return None
    names, site = np.unique(table.site, return_inverse=True)
    op = _ops(table)
    pairs = np.unique(np.stack([op, site]), axis=1)[0]
    common = np.isin(op, np.flatnonzero(np.bincount(pairs, minlength=op.max() + 1) > 1))
    counts = np.bincount(site[common], minlength=len(names))
    frequent = counts >= FEWEST
    if frequent.sum() < 2:
        return None
    rows = common & frequent[site]
    effects, noise = _effects(np.log(table.latency_us[rows]), op[rows], site[rows], len(names))
    error = noise**2 / np.maximum(counts, 1)
    between = max(float(np.var(effects[frequent], ddof=1)) - float(error[frequent].mean()), 0.0)
    shrunk = effects * between / np.maximum(between + error, 1e-12)
    by_site = {str(name): float(value) if ok else 0.0 for name, value, ok in zip(names, shrunk, frequent, strict=True)}
    return Sites(by_site, between**0.5, len(np.unique(op[rows])))


def without_effects(table: MeasurementTable, sites: Sites) -> MeasurementTable:
    """The table as a site in the middle would have measured it."""
    assert table.site is not None
    effect = np.array([sites.effects[str(name)] for name in table.site])
    return dataclasses.replace(table, latency_us=table.latency_us * np.exp(-effect))


def for_any_site(intervals: Intervals, sites: Sites) -> Intervals:
    """The intervals with the spread between sites in them."""
    from scipy.stats import t

    reach = float(t.ppf(0.5 + intervals.coverage / 2, max(len(sites.effects) - 1, 1)))
    added = sites.spread * reach * (1.0 + 1.0 / len(sites.effects)) ** 0.5
    return dataclasses.replace(intervals, half_width=np.hypot(intervals.half_width, added))


def _ops(table: MeasurementTable) -> np.ndarray:
    """A number for each op and cache state, int64 [n]."""
    parts = [
        *table.columns.values(),
        *(codes_of_column.astype(str) for codes_of_column in (table.dtype, table.out_dtype, table.cache)),
    ]
    codes = np.stack([np.unique(codes_of_column, return_inverse=True)[1] for codes_of_column in parts], axis=1)
    return np.unique(codes, axis=0, return_inverse=True)[1].reshape(-1)


def _effects(y: np.ndarray, op: np.ndarray, site: np.ndarray, count: int) -> tuple[np.ndarray, float]:
    """Effects [count] with mean 0 by alternating medians over ops and sites, and the noise that is left."""
    op = np.unique(op, return_inverse=True)[1]
    effects = np.zeros(count)
    for _ in range(SWEEPS):
        level = np.bincount(op, y - effects[site]) / np.bincount(op)
        residual = y - level[op]
        medians = np.array(
            [float(np.median(residual[site == number])) if (site == number).any() else 0.0 for number in range(count)]
        )
        present = np.bincount(site, minlength=count) > 0
        medians -= medians[present].mean()
        if np.abs(medians - effects).max() < 1e-9:
            break
        effects = medians
    residual = y - effects[site] - (np.bincount(op, y - effects[site]) / np.bincount(op))[op]
    degrees = max(len(y) - (op.max() + 1) - count + 1, 1)
    return effects, float(np.sqrt((residual**2).sum() / degrees))
