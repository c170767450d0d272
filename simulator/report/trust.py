"""How far an answer can be trusted: where its time comes from, whether it fits, and what to measure next.

Time is *measured* (this op on this device), *interpolated* (a predictor inside what it has seen), *extrapolated*
(outside of it, or from other devices'), *analytical* (physics) or *bytes* (an operator without a kind).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ...datasets.ops import Op
from ..memory.errors import error_spread, probability_within
from .step import MissingMeasurement
from .view import dims_text

SOURCES = ("measured", "interpolated", "extrapolated", "analytical", "bytes")
UNMEASURED_SOURCES = ("extrapolated", "analytical", "bytes")
STRICT_UNMEASURED_SHARE = 0.5  # of the time that may lean on what was not measured under strict=true
LIST_LIMIT = 10


class TrustError(ValueError):
    """An answer that leans on extrapolation more than its asker allows. The message says what to measure."""


def source(engine: str, inside: bool) -> str:
    """Where an engine's answer comes from."""
    if engine == "transfer":
        return "extrapolated"
    if engine == "learned":
        return "interpolated" if inside else "extrapolated"
    return engine if engine in SOURCES else "analytical"


def shares(parts: Iterable[tuple[str, bool, float]]) -> dict[str, float]:
    """Share of the time by source, from (engine, inside its envelope, microseconds)."""
    time_of_source: dict[str, float] = {}
    for engine, inside, time_us in parts:
        name = source(engine, inside)
        time_of_source[name] = time_of_source.get(name, 0.0) + time_us
    total_us = sum(time_of_source.values()) or 1.0
    return {name: time_of_source[name] / total_us for name in SOURCES if name in time_of_source}


def missing_measurements(
    parts: Iterable[tuple[Op | None, str, bool, float]],
) -> tuple[MissingMeasurement, ...]:
    """The ops that lean most of the time on what was not measured, from (op, engine, inside, microseconds)."""
    time_of_op: dict[Op, float] = {}
    total_us = 0.0
    for op, engine, inside, time_us in parts:
        total_us += time_us
        if op is not None and source(engine, inside) in UNMEASURED_SOURCES:
            time_of_op[op] = time_of_op.get(op, 0.0) + time_us
    longest = sorted(time_of_op.items(), key=lambda item: -item[1])[:LIST_LIMIT]
    return tuple(MissingMeasurement(op.to_dict(), time_us * 1e-6, time_us / total_us) for op, time_us in longest)


def check_strict(trust: Mapping[str, float], missing: Sequence[MissingMeasurement], allowed: float) -> None:
    """TrustError when more than ``allowed`` of the time leans on extrapolation or physics."""
    leaning = sum(trust.get(name, 0.0) for name in UNMEASURED_SOURCES)
    if leaning <= allowed:
        return
    shapes = "; ".join(f"{op.op['kind']} {dims_text(op.op)} ({op.share:.0%})" for op in missing[:3])
    raise TrustError(
        f"{leaning:.0%} of the time is not measured on this device and strict allows {allowed:.0%}; "
        f"measuring these would help most: {shapes}"
    )


def probability_oom(peak_gib: float, capacity_gib: float, *stacks: str) -> float:
    """P(the peak exceeds the device's memory), by what peaks under the first known of ``stacks`` were off."""
    if peak_gib <= 0.0 or capacity_gib <= 0.0:
        return float(peak_gib > capacity_gib)
    return 1.0 - probability_within(math.log(capacity_gib / peak_gib), error_spread(*stacks))
