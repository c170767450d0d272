"""Honest errors: whole shapes are held out, and nothing that is scored was used to choose or calibrate.

Every row is predicted once by a model that saw neither its group nor, through the choice of candidate or the
interval's width, its residual: fold i is answered by the candidate that did best on the other folds, with the
interval calibrated on the other folds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..datasets.vocabulary import KINDS
from .intervals import calibrate

MIN_GROUPS = 10  # fewer whole groups than this, and the next finer grouping is used

# What is held out together, coarsest first: the dims that make a site of a model rather than a workload.
GROUPS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gemm": (("n", "k"),),
    "grouped_gemm": (("experts", "n", "k"),),
    "attention_prefill": (("heads_q", "heads_kv", "head_dim"), ("seq_q", "seq_kv")),
    "attention_decode": (("heads_q", "heads_kv", "head_dim"), ("batch", "seq_kv")),
    "attention_backward": (("heads_q", "heads_kv", "head_dim"), ("seq_q", "seq_kv")),
    "mla_prefill": (("heads",), ("seq_q", "seq_kv")),
    "mla_decode": (("heads",), ("batch", "seq_kv")),
    "embedding": (("vocab", "hidden"),),
    "embedding_backward": (("vocab", "hidden"),),
    "cross_entropy": (("vocab",),),
    "cross_entropy_backward": (("vocab",),),
    "moe_route": (("experts", "topk"),),
    "moe_permute": (("hidden", "topk"),),
    "rope": (("heads", "head_dim"),),
}
GROUPS_BY_FAMILY: dict[str, tuple[tuple[str, ...], ...]] = {
    "norm": (("cols",),),
    "pointwise": (("cols",),),
    "collective": (("size_bytes",),),
}


@dataclass(frozen=True)
class Split:
    """``fold`` [n]: the fold each row is held out in; ``label`` says what was held out together."""

    fold: np.ndarray
    count: int
    label: str

    def held_out(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions of training and of held-out rows of one fold."""
        return np.flatnonzero(self.fold != index), np.flatnonzero(self.fold == index)


def split(kind_name: str, columns: Mapping[str, np.ndarray], folds: int, seed: int, random_rows: bool = False) -> Split:
    """Folds of whole groups: the coarsest grouping of the kind with enough groups, else whole ops (all dims)."""
    definition = KINDS[kind_name]
    choices = GROUPS.get(kind_name, GROUPS_BY_FAMILY.get(definition.family, ()))
    for names in () if random_rows else choices:
        if all(name in definition.names for name in names):
            groups = _codes(columns, names)
            if groups.max(initial=-1) + 1 >= MIN_GROUPS:
                return _fold(groups, folds, seed, f"grouped by ({', '.join(names)})")
    label = "random ops" if random_rows else "grouped by op"
    return _fold(_codes(columns, definition.names), folds, seed, label)


def _codes(columns: Mapping[str, np.ndarray], names: tuple[str, ...]) -> np.ndarray:
    table = np.stack([np.asarray(columns[name]) for name in names], axis=1)
    return np.unique(table, axis=0, return_inverse=True)[1].reshape(-1)


def _fold(groups: np.ndarray, folds: int, seed: int, label: str) -> Split:
    """Groups in random order, each to the fold with fewest rows so far."""
    sizes = np.bincount(groups)
    folds = min(folds, len(sizes))
    order = np.random.default_rng(seed).permutation(len(sizes))
    order = order[np.argsort(-sizes[order], kind="stable")]
    load, home = np.zeros(max(folds, 1)), np.zeros(len(sizes), dtype=np.int64)
    for group in order:
        home[group] = np.argmin(load)
        load[home[group]] += sizes[group]
    return Split(home[groups], folds, f"{folds}-fold, {label}")


def choose(loss: Mapping[str, np.ndarray], weights: np.ndarray, rows: np.ndarray) -> str:
    """The candidate with least weighted mean absolute log error on some rows; the simpler (first) one at a near tie.

    Errors count up to a factor of two, so that one outlier row decides nothing.
    """
    scores = {
        name: float(np.average(np.minimum(np.abs(each[rows]), np.log(2.0)), weights=weights[rows]))
        for name, each in loss.items()
    }
    least = min(scores.values())
    return next(name for name, score in scores.items() if score <= least * 1.01)


@dataclass(frozen=True)
class CrossFit:
    """Held-out answers of the whole procedure (choose, fit, calibrate) for each row."""

    residual: np.ndarray  # ln(measured / predicted)
    inside: np.ndarray  # whether the interval held
    width: np.ndarray  # ln half-width of the interval
    chosen: tuple[str, ...]  # candidate by fold


def cross_fit(
    residuals: Mapping[str, np.ndarray], analytical_us: np.ndarray, weights: np.ndarray, folds: Split, coverage: float
) -> CrossFit:
    """Score the procedure from each candidate's held-out residuals [n]."""
    count = len(analytical_us)
    residual, width, chosen = np.empty(count), np.empty(count), []
    for index in range(folds.count):
        others, own = folds.held_out(index)
        name = choose(residuals, weights, others)
        chosen.append(name)
        residual[own] = residuals[name][own]
        intervals = calibrate(residuals[name][others], analytical_us[others], coverage)
        width[own] = intervals.widths(analytical_us[own], np.zeros(len(own)))
    return CrossFit(residual, np.abs(residual) <= width, width, tuple(chosen))


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
