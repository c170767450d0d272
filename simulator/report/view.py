"""Tables of an answer as data, for whoever draws them: a terminal, a page. Values are plain numbers and words.

``kind`` says what a column's values are, and so how they are written (:data:`WRITTEN`, or as each place does: times
``time_ms`` and ``ms_range``, ``bytes`` of memory, a ``size`` of data). Text of any kind and values
of no kind are written as they are. None is an empty cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")
TERMINAL, PAGE = "terminal", "page"
DURATIONS = (  # a duration below so many microseconds is said in a unit of so many
    *((1e3, 1.0, "µs"), (1e6, 1e3, "ms"), (120e6, 1e6, "s"), (7200e6, 60e6, "min"), (172_800e6, 3600e6, "h")),
    (math.inf, 86_400e6, "days"),
)
ROUNDING_US = 1e-6
CURRENCY = "in the currency of the price"


def number_text(value: float) -> str:
    """A number with three digits, without an exponent where there are more."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def duration_unit(us: float) -> tuple[float, str]:
    """(microseconds per unit, unit) in which a duration reads best."""
    return next((divisor, unit) for limit, divisor, unit in DURATIONS if abs(us) < limit * 0.9995 or limit == math.inf)


def time_text(us: float | None) -> str:
    """A duration given in microseconds, with three digits; empty for None and NaN. What only rounding leaves is 0."""
    if us is None or math.isnan(us):
        return ""
    divisor, unit = duration_unit(us)
    return f"{number_text(0.0 if abs(us) < ROUNDING_US else us / divisor)} {unit}"


WRITTEN: Mapping[str, Callable[[Any], str]] = {
    "seconds": lambda seconds: time_text(1e6 * seconds),
    "us": time_text,
    "ms": "{:,.0f} ms".format,
    "fine_ms": "{:,.1f} ms".format,
    "gib": "{:.1f}".format,
    "count": "{:,.0f}".format,
    "tenths": "{:,.1f}".format,
    "hundredths": "{:,.2f}".format,
    "digits": "{:.4g}".format,
    "amount": number_text,
    "figure": lambda value: f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}",
    "more": "{:+,.4g}".format,
    "more_hundredths": "{:+.2f}".format,
    "share": "{:.1%}".format,
    "percent": "{:.0%}".format,
    "cost": "{:+.1%}".format,
}


def shares_text(shares: Mapping[str, float]) -> str:
    """Shares that matter, in percent."""
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)


def dims_text(op: Mapping[str, Any], *without: str) -> str:
    """An op's dims in short, those that say something; some may be left out."""
    return " ".join(f"{k}={v}" for k, v in op.items() if k not in ("kind", *without) and v not in ("same", "", 0))


def finite(value: Any) -> Any:
    """The value as JSON can say it, all the way down: NaN and infinities are None."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class ViewColumn:
    """A heading, what its values are, what it means, whether a page has bars behind them; ``only`` on a page, say."""

    title: str
    kind: str = ""
    hint: str = ""
    bar: bool = False
    only: str = ""


@dataclass(frozen=True)
class Toned:
    """A value with a tone (good, fair, poor) and more about it, which a page shows."""

    value: Any
    tone: str = ""
    hint: str = ""


@dataclass(frozen=True)
class ViewTable:
    """Rows of values under columns, below a caption; ``only`` as in :class:`ViewColumn`."""

    caption: str
    columns: Sequence[ViewColumn]
    rows: Sequence[Sequence[Any]]
    only: str = ""

    @classmethod
    def of(
        cls, caption: str, items: Sequence[T], columns: Sequence[tuple[ViewColumn, Callable[[T], Any]]], only: str = ""
    ) -> ViewTable:
        """A row for each item: columns, each with what it says of one."""
        rows = [[value(item) for _, value in columns] for item in items]
        return cls(caption, [column for column, _ in columns], rows, only)

    def on(self, place: str) -> tuple[list[ViewColumn], list[list[Any]]]:
        """The columns and rows that a place shows; none where it shows the table not at all."""
        if self.only not in ("", place):
            return [], []
        at = [i for i, column in enumerate(self.columns) if column.only in ("", place)]
        return [self.columns[i] for i in at], [[row[i] for i in at] for row in self.rows]


def written(value: Any, kind: str, own: Mapping[str, Callable[[Any], str]] = MappingProxyType({})) -> str:
    """A value as text, by a place's ``own`` way to write its kind or by :data:`WRITTEN`."""
    value = value.value if isinstance(value, Toned) else value
    if value is None or isinstance(value, str):
        return value or ""
    return (own.get(kind) or WRITTEN.get(kind, str))(value)
