"""Errors of predictions: absolute percentage errors, bias, ranks of layouts, and the spread of repeats."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

Item = TypeVar("Item")
OUTSIDE = 20.0  # what lies outside of a 90 % interval counts so many times: 2 over the 10 % that may
Pair = tuple[float, float]  # (predicted, measured)
Bounded = tuple[float, float, float, float]  # (low, high, predicted, measured)


def errors(pairs: Sequence[Pair]) -> dict[str, float]:
    """``n``, median, mean, 90th percentile and maximum of the APE, and the bias (mean signed error), in percent."""
    predicted, measured = np.array(pairs, dtype=float).reshape(-1, 2).T
    signed = (predicted - measured) / measured * 100.0
    ape = np.abs(signed)
    return {
        "n": len(pairs),
        "median_ape": float(np.median(ape)),
        "mean_ape": float(ape.mean()),
        "p90_ape": float(np.percentile(ape, 90)),
        "max_ape": float(ape.max()),
        "bias": float(signed.mean()),
    }


def verdicts(pairs: Sequence[Pair]) -> dict[str, float]:
    """``n`` and ``accuracy`` of yes and no answers (percent), and how many of each kind were right.

    ``accuracy_fits`` and ``accuracy_oom`` are over the runs that did and did not fit (absent where there is none).
    """
    predicted, measured = np.array(pairs, dtype=bool).reshape(-1, 2).T
    right = predicted == measured
    metrics = {"n": len(pairs), "accuracy": float(right.mean() * 100)}
    for name, chosen in (("accuracy_fits", measured), ("accuracy_oom", ~measured)):
        if chosen.any():
            metrics[name] = float(right[chosen].mean() * 100)
    return metrics


def score(
    pairs: Mapping[str, Sequence[Pair]], bounds: Mapping[str, Sequence[Bounded]] | None = None
) -> dict[str, dict[str, float]]:
    """The errors of every quantity that has any pair, and how its intervals did where it has any."""
    metrics = {name: (verdicts if name == "fits" else errors)(pairs_of) for name, pairs_of in pairs.items() if pairs_of}
    for name, pairs_of in (bounds or {}).items():
        if pairs_of:
            metrics[name] |= intervals(pairs_of)
    return metrics


def intervals(bounds: Sequence[Bounded]) -> dict[str, float]:
    """``coverage``: share of measurements inside their interval; ``interval_width``: its mean, of the prediction.

    ``interval_score``: mean width plus 20 times what measurements lie outside, of the prediction; the lower, the better
    (Gneiting and Raftery 2007, eq. 43, for 90 %).
    """
    low, high, predicted, measured = np.array(bounds, dtype=float).reshape(-1, 4).T
    outside = np.maximum(low - measured, 0.0) + np.maximum(measured - high, 0.0)
    return {
        "coverage": float(((low <= measured) & (measured <= high)).mean()),
        "interval_width": float(((high - low) / predicted).mean()),
        "interval_score": float(((high - low + OUTSIDE * outside) / predicted).mean()),
    }


def spearman(pairs: Sequence[Pair]) -> float | None:
    """Rank correlation of predicted and measured, ties at their mean rank; None below three or without any order."""
    predicted, measured = np.array(pairs, dtype=float).reshape(-1, 2).T
    if len(pairs) < 3 or not np.ptp(predicted) or not np.ptp(measured):
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(predicted, measured).statistic)


def grouped(items: Iterable[Item], key: Callable[[Item], Hashable]) -> dict[Any, list[Item]]:
    """Items by a key, groups in order of first appearance."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def spread(values: Sequence[Sequence[float]]) -> dict[str, float] | None:
    """How far repeats of one run lie apart: the APE of each against the median of the others, over groups of repeats.

    It is the least error that a predictor of configurations can reach. None where nothing repeats.
    """
    apart = [
        abs(value - other) / other * 100.0
        for group in values
        if len(group) > 1
        for index, value in enumerate(group)
        for other in [float(np.median([*group[:index], *group[index + 1 :]]))]
    ]
    if not apart:
        return None
    return {
        "n": len(apart),
        "groups": sum(len(group) > 1 for group in values),
        "median_ape": float(np.median(apart)),
        "mean_ape": float(np.mean(apart)),
        "p90_ape": float(np.percentile(apart, 90)),
    }
