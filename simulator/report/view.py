"""Tables of an answer as data, for whoever draws them: a terminal, a page. Values are plain numbers and words.

``kind`` says what a column's values are, and so how they are written (:data:`WRITTEN`; ``seconds`` as each place does);
``words`` and all else are written as they are. None is an empty cell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TERMINAL, PAGE = "terminal", "page"
WRITTEN = {
    "ms": "{:,.0f} ms",
    "fine_ms": "{:,.1f} ms",
    "gib": "{:.1f}",
    "count": "{:,.0f}",
    "tenths": "{:,.1f}",
    "hundredths": "{:,.2f}",
    "digits": "{:.4g}",
    "more": "{:+,.4g}",
    "more_hundredths": "{:+.2f}",
    "share": "{:.1%}",
    "percent": "{:.0%}",
    "cost": "{:+.1%}",
}


def counted(number: float, noun: str) -> str:
    """A number of things: "1 GPU", "2,000 GPUs"."""
    return f"{number:,.0f} {noun}" if number == 1 else f"{number:,.0f} {noun}s"


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

    def on(self, place: str) -> tuple[list[ViewColumn], list[list[Any]]]:
        """The columns and rows that a place shows; none where it shows the table not at all."""
        if self.only not in ("", place):
            return [], []
        at = [i for i, column in enumerate(self.columns) if column.only in ("", place)]
        return [self.columns[i] for i in at], [[row[i] for i in at] for row in self.rows]


def written(value: Any, kind: str, own: Mapping[str, Callable[[Any], str]]) -> str:
    """A value as text, by a place's ``own`` way to write its kind or by :data:`WRITTEN`."""
    value = value.value if isinstance(value, Toned) else value
    if value is None:
        return ""
    if kind == "figure":
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return own[kind](value) if kind in own else WRITTEN.get(kind, "{}").format(value)
