"""Numbers as a reader wants them: three significant digits, the unit that fits, a dash for what is unknown."""

from __future__ import annotations

import math

from ..report.view import duration_unit as duration_unit

UNIT_SPACE = "\u00a0"  # keeps a number and its unit on one line
MINUS = "\u2212"
DASH = "\u2013"
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def three_digits(value: float | None) -> str:
    """Three significant digits, fewer for a small whole number; a dash for None, NaN and infinities."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    is_whole = abs(rounded) >= 100 or value == int(value)
    text = f"{rounded:,.0f}" if is_whole else f"{rounded:#.3g}"
    return text.replace("-", MINUS) if text.startswith("-") else text


def duration(us: float | None) -> str:
    """A duration given in microseconds."""
    if us is None or not math.isfinite(us):
        return DASH
    divisor, unit = duration_unit(us)
    return three_digits(us / divisor) + UNIT_SPACE + unit


def duration_range(low_us: float, high_us: float) -> str:
    """An interval of durations given in microseconds, in one unit."""
    if not (math.isfinite(low_us) and math.isfinite(high_us)):
        return DASH
    divisor, unit = duration_unit(high_us)
    return f"{three_digits(low_us / divisor)} to {three_digits(high_us / divisor)}{UNIT_SPACE}{unit}"


def percent(value: float | None, signed: bool = False) -> str:
    """A figure already in percent: one decimal below 100."""
    if value is None or not math.isfinite(value):
        return DASH
    text = f"{abs(value):.1f}" if abs(value) < 99.95 else f"{abs(value):,.0f}"
    zero = not text.strip("0.")
    sign = "" if zero else MINUS if value < 0 else "+" if signed else ""
    return sign + text + UNIT_SPACE + "%"


def share(fraction: float | None) -> str:
    """A fraction of one, as percent."""
    return percent(None if fraction is None else fraction * 100.0)


def gib(value: float | None) -> str:
    """GiB, or MiB and KiB when that reads better."""
    if value is None or not math.isfinite(value):
        return DASH
    for limit, factor, unit in ((2**-10, 2**20, "KiB"), (1.0, 2**10, "MiB")):
        if 0 < value < limit * 0.9995:
            return three_digits(value * factor) + UNIT_SPACE + unit
    return three_digits(value) + UNIT_SPACE + "GiB"


def with_prefix(value: float | None, unit: str) -> str:
    """A rate or count with a decimal prefix: ``scaled(1.93e11, "FLOP/s")`` is 193 GFLOP/s."""
    if value is None or not math.isfinite(value):
        return DASH
    for limit, prefix in PREFIXES:
        if abs(value) >= limit * 0.9995:
            return three_digits(value / limit) + UNIT_SPACE + prefix + unit
    return three_digits(value) + UNIT_SPACE + unit


def count(value: float | None) -> str:
    """A whole number with thousands separated."""
    return DASH if value is None or not math.isfinite(value) else f"{value:,.0f}"
