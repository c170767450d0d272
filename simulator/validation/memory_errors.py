"""Errors of predicted peaks by framework, and how well they tell what fits: the content of ``conf/memory_errors.yaml``.

A framework's spread is drawn towards the pooled one as if ``PRIOR`` more rows had that; the pooled one is the root of
the frameworks' mean square error, each framework counting alike. Scores are of rows that nothing was taken from: each
table in turn is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...datasets.devices import load_device
from ...datasets.truth import InferenceRow, Row, TrainingRow
from ..memory.errors import NINETY, UNIT, within
from .metrics import grouped

PRIOR = 4
PLACES = 3
BEFORE = 0.02  # what every framework was given before errors were measured
LEAST = 1e-6  # a probability no smaller than this is scored


@dataclass(frozen=True)
class ObservedPeak:
    """One run: the log error of its peak, and whether it fitted (None: not published).

    ``room`` is the logarithm of the device's memory over the predicted peak.
    """

    table: str
    stack: str
    error: float | None
    fitted: bool | None
    room: float


def observe(table: str, rows: Sequence[Row], predicted: Mapping[str, Mapping[str, float]]) -> list[ObservedPeak]:
    """The runs of a table that publish a peak or whether they fitted."""
    made = []
    for row in rows:
        found = predicted.get(row.id, {})
        if not isinstance(row, (TrainingRow, InferenceRow)) or not found.get("peak_memory"):
            continue
        measured, fits = row.measured.get("peak_memory"), row.measured.get("fits")
        error = math.log(measured / found["peak_memory"]) if measured and fits != 0.0 else None
        room = math.log(load_device(row.hardware.device).memory_gib / found["device_memory"])
        made.append(ObservedPeak(table, row.framework, error, None if fits is None else bool(fits), room))
    return made


def spreads(observed: Sequence[ObservedPeak]) -> dict[str, dict[str, float]]:
    """By framework, and ``""`` for all: ``bias`` and ``spread`` of log errors and ``rows`` that they rest on."""
    known = [each for each in observed if each.error is not None]
    by_stack = {
        name: np.array([each.error for each in members])
        for name, members in grouped(known, lambda each: each.stack).items()
    }
    pooled = float(np.mean([np.mean(errors**2) for errors in by_stack.values()]))
    biases = [float(errors.mean()) for errors in by_stack.values()]
    made = {"": {"bias": float(np.mean(biases)), "spread": math.sqrt(pooled), "rows": len(known)}}
    for name, errors in by_stack.items():
        drawn = (PRIOR * pooled + float((errors**2).sum())) / (PRIOR + len(errors))
        made[name] = {"bias": float(errors.mean()), "spread": math.sqrt(drawn), "rows": len(errors)}
    return {name: {key: round(value, PLACES) for key, value in of.items()} for name, of in made.items()}


def scored(observed: Sequence[ObservedPeak]) -> dict[str, dict[str, float]]:
    """By table, spreads taken from the others: ``density`` (mean log density of errors), ``coverage`` of 90 % intervals
    and ``fits`` (mean log-likelihood of what fitted); ``_before``: under a fixed spread and a normal distribution.
    """
    made: dict[str, dict[str, float]] = {}
    for table, members in grouped(observed, lambda each: each.table).items():
        others = [each for each in observed if each.table != table and each.error is not None]
        if not others:
            continue
        known = spreads(others)
        errors = [
            (each.error, known.get(each.stack, known[""])["spread"]) for each in members if each.error is not None
        ]
        fits = [(each.fitted, each.room, known.get(each.stack, known[""])["spread"]) for each in members]
        made[table] = {"rows": len(errors)}
        if errors:
            made[table] |= {
                "density": float(np.mean([density(error, spread) for error, spread in errors])),
                "density_before": float(np.mean([normal(error, BEFORE) for error, _ in errors])),
                "coverage": float(np.mean([abs(error) <= NINETY * spread / UNIT for error, spread in errors])),
            }
        told = [(fitted, room, spread) for fitted, room, spread in fits if fitted is not None]
        if told:
            made[table] |= {
                "verdicts": len(told),
                "fits": _likelihood([(fitted, within(room, spread)) for fitted, room, spread in told]),
                "fits_before": _likelihood([(fitted, _normal_within(room)) for fitted, room, _ in told]),
            }
    return made


def density(error: float, spread: float) -> float:
    """Log density of an error under Student's t with four degrees of freedom and a standard deviation."""
    scale = spread / UNIT
    return math.log(0.375 / scale) - 2.5 * math.log1p((error / scale) ** 2 / 4.0)


def normal(error: float, spread: float) -> float:
    """Log density of an error under a normal distribution."""
    return -0.5 * (error / spread) ** 2 - math.log(spread * math.sqrt(2.0 * math.pi))


def _normal_within(room: float) -> float:
    return 0.5 * (1.0 + math.erf(room / BEFORE / UNIT))


def _likelihood(told: Sequence[tuple[bool, float]]) -> float:
    return float(np.mean([math.log(max(chance if fitted else 1.0 - chance, LEAST)) for fitted, chance in told]))
