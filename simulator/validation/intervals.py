"""Intervals of steps: how far off runs were whose source was left out, by what was not known and what they are made of.

A question of a user is of no source that is known, so nothing here rests on a run whose own source had a say in its
answer. Two things widen an interval. The **spread**: steps that wait for networks or hosts are farther off than those
of products; it is fitted as a scale of the errors (:func:`fit_spread`). The **width**: errors over spreads are within
so much, by what of framework, chip and kind of step no other source had (:func:`fit_widths`). Sources count alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..question.calibration import (
    ACROSS,
    FAMILIES,
    FIXED,
    KIND,
    SPREAD_BASE,
    UNKNOWN,
    Calibration,
    Effect,
    calibrated,
    pair_of,
    relative_spread,
    unknown_of,
)
from .metrics import grouped
from .observed import ObservedStep

NINETY = 0.9  # of the errors are within a width
# What errors of known sources are within so that those of the next one are in nine of ten cases: of 0.88, 0.90 and 0.93
# the one that holds nine of ten runs of sources left out, in the mean of the tables that are looked at (90, 92 and 92 %
# without their table, framework and chip)
OF_KNOWN_SOURCES = 0.90
LEAST_WIDTH = 0.01  # ln: no answer is surer
RUNS_OF_SOURCE = 20  # that a source counts for where spreads are fitted, at most
FREEDOM = 4.0  # degrees of freedom of the errors, as in the fit of effects
USUAL_SPREAD, LOOSE = 0.08, 1.0  # ln: where spreads are drawn to, and how far (standard deviation of their logarithm)
LEAST_SPREAD, MOST_SPREAD = 0.005, 5.0  # bounds of the search for them, which no fit comes near
DRAWN_SOURCES = 4  # a width of few sources is drawn towards the usual one as by so many more
DRAWN_RUNS = 4  # and that of a user's own runs as by so many more runs
DIGITS = 4
LEFT_OUT = ("table", "framework", "chip")  # ways of leaving sources out
PARTS = (*FAMILIES, FIXED)
NOTHING = Calibration()  # is known at the start
Errors = Mapping[str, Mapping[str, float]]


def family_shares(step: ObservedStep) -> dict[str, float]:
    """Shares of a step's time by family of ops, and what follows none."""
    shares = dict.fromkeys(PARTS, 0.0)
    for (cell, _), share in step.parts.items():
        shares[cell.partition(" ")[0]] += share
    return shares


def fit_spread(observed: Sequence[ObservedStep], errors: Mapping[str, float]) -> dict[str, float]:
    """The scales of the errors (ln, by id) by family, so that a step of usual make-up has 1 (:func:`relative_spread`).

    Errors follow Student's t around 0 whose scale is the root of the sum of squares of spreads times shares; logarithms
    of spreads are normal around that of :data:`USUAL_SPREAD`.
    """
    from scipy.optimize import minimize

    shares = np.array([list(family_shares(step).values()) for step in observed]) ** 2
    squares = np.array([errors[step.id] for step in observed]) ** 2
    weight = _weights(observed, RUNS_OF_SOURCE)
    usual = np.full(len(PARTS) + 1, np.log(USUAL_SPREAD))

    def loss(logs: np.ndarray) -> tuple[float, np.ndarray]:
        parts = np.exp(2.0 * logs)
        scale = parts[0] + shares @ parts[1:]
        ratio = squares / scale / FREEDOM
        value = weight @ (0.5 * np.log(scale) + 0.5 * (FREEDOM + 1.0) * np.log1p(ratio))
        slope = weight * (0.5 - 0.5 * (FREEDOM + 1.0) * ratio / (1.0 + ratio)) / scale
        scaled = (logs - usual) / LOOSE
        gradient = 2.0 * parts * np.concatenate([[slope.sum()], slope @ shares])
        return float(value + 0.5 * scaled @ scaled), gradient + scaled / LOOSE

    limits = [(np.log(LEAST_SPREAD), np.log(MOST_SPREAD))] * len(usual)
    spreads = np.exp(minimize(loss, usual, jac=True, method="L-BFGS-B", bounds=limits).x)
    usual_scale = _quantile(np.sqrt(spreads[0] ** 2 + shares @ spreads[1:] ** 2), _weights(observed, 1), 0.5)
    return {
        name: round(float(spread / usual_scale), DIGITS)
        for name, spread in zip((SPREAD_BASE, *PARTS), spreads, strict=True)
    }


def fit_widths(
    observed: Sequence[ObservedStep], errors: Errors, spread: Mapping[str, float], start: Calibration = NOTHING
) -> dict[str, float]:
    """What the errors over the spreads are within: by what is not known, and by framework, chip and kind of step.

    ``errors`` are by row and what was left out. A pair's width is drawn towards the usual one. Widths of the ``start``
    stay: runs that join it are of its user, whose next question is of the same source, so that the half of their groups
    that they were not fitted on says how far off they are.
    """
    way = "halves" if start.widths else "table"
    widths = dict(start.widths) or usual_widths(observed, errors, spread)
    scaled = {step.id: abs(errors[way][step.id]) / spread_of(step, spread) for step in observed}
    pairs = grouped(((name, step) for step in observed for name in pairs_of(step)), lambda pair: pair[0])
    for name, members in pairs.items():
        steps = [step for _, step in members]
        alone = max(_quantile(np.array([scaled[step.id] for step in steps]), _weights(steps, 1), NINETY), LEAST_WIDTH)
        towards = start.widths.get(name, widths.get(ACROSS, widths[""]) if steps[0].setting.across else widths[""])
        count, prior_count = (
            (len(steps), DRAWN_RUNS) if start.widths else (len(grouped(steps, source_of)), DRAWN_SOURCES)
        )
        widths[name] = float(np.exp((count * np.log(alone) + prior_count * np.log(towards)) / (count + prior_count)))
    return {name: round(width, DIGITS) for name, width in widths.items()}


def usual_widths(observed: Sequence[ObservedStep], errors: Errors, spread: Mapping[str, float]) -> dict[str, float]:
    """Widths by what of a question no known run had, the less that is known the wider."""
    inside = [step for step in observed if not step.setting.across] or list(observed)
    scaled: dict[str, list[tuple[ObservedStep, float]]] = {}
    for way in LEFT_OUT:
        for step, gap in unknown_without(inside, way):
            scaled.setdefault(gap, []).append((step, abs(errors[way][step.id]) / spread_of(step, spread)))
    usual = max(_within([pair for pairs in scaled.values() for pair in pairs]), LEAST_WIDTH)
    widths: dict[str, float] = {}
    for gap in UNKNOWN:
        pairs = scaled.get(gap, [])
        count = len(grouped([step for step, _ in pairs], source_of))
        width = max(_within(pairs), LEAST_WIDTH) if pairs else usual
        shrunk = float(np.exp((count * np.log(width) + DRAWN_SOURCES * np.log(usual)) / (count + DRAWN_SOURCES)))
        widths[gap] = max([shrunk, *(widths[less] for less in _less_unknown(gap))])
    across = [step for step in observed if step.setting.across]
    if across and len(across) < len(observed):
        ratios = [(step, abs(errors["table"][step.id]) / spread_of(step, spread)) for step in across]
        widths[ACROSS] = max(_within(ratios), widths[""])
    return widths


def unknown_without(observed: Sequence[ObservedStep], way: str) -> list[tuple[ObservedStep, str]]:
    """Each step, with what no run had of it once its table, framework or chip was left out."""
    missing = []
    for members in grouped(observed, lambda step: getattr(step, way)).values():
        ids = {step.id for step in members}
        pairs = {name: 0.0 for step in observed if step.id not in ids for name in pairs_of(step)}
        for step in members:
            gaps = (unknown_of(setting, pairs) for setting in step.settings.values())
            missing.append((step, max(gaps, key=UNKNOWN.index)))
    return missing


def without_source(
    observed: Sequence[ObservedStep], errors: Errors, start: Calibration = NOTHING
) -> dict[str, Calibration]:
    """By source: the spread and the widths that all others say; none where there is no other."""
    by_source: dict[str, Calibration] = {}
    for source in grouped(observed, source_of):
        others = [step for step in observed if source_of(step) != source]
        if start.widths:
            by_source[source] = start
        elif others:
            spread = fit_spread(others, errors["table"])
            by_source[source] = Calibration(widths=fit_widths(others, errors, spread), spread=spread)
    return by_source


def stated(observed: Sequence[ObservedStep], calibrations: Mapping[str, Calibration], how: str) -> dict[str, float]:
    """By row: the half-width (ln) that it would get with so much left out, from widths of other sources alone."""
    half_widths: dict[str, float] = {}
    for step in observed:
        if (of := calibrations.get(source_of(step))) is None:
            continue
        widths = dict(of.widths)
        if how in ("chip", "framework"):
            widths = {name: width for name, width in widths.items() if getattr(step, how) not in name.split(" ")}
        elif how == "halves":
            widths = {**dict.fromkeys(pairs_of(step), widths[""]), **widths}
        half_widths[step.id] = half_width(step, widths, of.spread)
    return half_widths


def half_width(step: ObservedStep, widths: Mapping[str, float], spread: Mapping[str, float]) -> float:
    """Of a step's interval (ln): the widths of its kinds of step by their share of its time, times its spread."""
    calibration = Calibration((Effect("gemm", "all", 0.0, 1.0, 1),), widths=widths)
    total = 0.0
    for kind, setting in step.settings.items():
        setting_with_widths = calibrated(calibration, setting)
        share = sum(share for (_, of), share in step.parts.items() if of == kind)
        total += share * ((setting_with_widths.width_experts if step.has_experts else setting_with_widths.width) or 0.0)
    return total * spread_of(step, spread)


def spread_of(step: ObservedStep, spread: Mapping[str, float]) -> float:
    """How many times as far off as usual a step is."""
    return relative_spread(spread, family_shares(step))


def pairs_of(step: ObservedStep) -> list[str]:
    """What the widths of a step's framework, chip and kinds of step are called."""
    return [pair_of(setting, step.has_experts) for setting in step.settings.values()]


def source_of(step: ObservedStep) -> str:
    """Who published a step: its table."""
    return step.table


def interval_score(errors: Iterable[float], half_widths: Iterable[float]) -> dict[str, float]:
    """Coverage and mean width (ln) of intervals, and their score: width + 20 times what lies outside.

    The interval score of Gneiting and Raftery (2007, eq. 43) for 90 %; the lower, the better.
    """
    missed, half = np.abs(np.array(list(errors))), np.array(list(half_widths))
    scores = 2.0 * half + 2.0 / (1.0 - NINETY) * np.maximum(missed - half, 0.0)
    return {
        "coverage": round(float((missed <= half).mean()), 3),
        "width": round(float(2.0 * half.mean()), 3),
        "interval_score": round(float(scores.mean()), 3),
    }


def _less_unknown(gap: str) -> tuple[str, ...]:
    """What is known of where less is known: ``chip`` and ``framework`` go beside each other."""
    order = {"": (), KIND: ("",), "pair": (KIND,), "chip": ("pair",), "framework": ("pair",)}
    return order.get(gap, ("chip", "framework"))


def _weights(observed: Sequence[ObservedStep], most: int) -> np.ndarray:
    """How much each run counts so that its source counts as ``most`` runs, at most [runs]."""
    counts = {name: len(steps) for name, steps in grouped(observed, source_of).items()}
    return np.array([min(most, counts[step.table]) / counts[step.table] for step in observed])


def _within(pairs: Sequence[tuple[ObservedStep, float]]) -> float:
    steps, values = zip(*pairs, strict=True)
    return _quantile(np.array(values), _weights(steps, 1), OF_KNOWN_SOURCES)


def _quantile(values: np.ndarray, weight: np.ndarray, share: float) -> float:
    """The least of the values that so much of the weight is at or below."""
    order = np.argsort(values)
    reached = np.cumsum(weight[order]) / weight.sum()
    return float(values[order][min(int(np.searchsorted(reached, share)), len(values) - 1)])
