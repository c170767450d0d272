"""How answers look in a notebook: headline figures and a table with bars, as HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from .view import TERMINAL, ViewColumn, ViewTable, time_text, written

OWN = {"time_ms": lambda ms: time_text(1e3 * ms)}
BAR = "linear-gradient(90deg, rgba(56,132,255,.28) {0:.1f}%, transparent {0:.1f}%)"
CELL = "padding:.2em .8em;text-align:left"


def display_html(title: str, facts: Sequence[tuple[str, str]], table: ViewTable | None = None, note: str = "") -> str:
    """HTML of a title, figures by name side by side, a table as a terminal has it, with bars, and a line below. All
    text is escaped."""
    figures = "".join(
        f'<div style="margin-right:2em"><div style="opacity:.65;font-size:85%">{escape(name)}</div>'
        f'<div style="font-size:125%">{escape(value)}</div></div>'
        for name, value in facts
        if value
    )
    parts = [
        f'<div style="font-weight:600;margin:.3em 0">{escape(title)}</div>',
        f'<div style="display:flex;flex-wrap:wrap;margin-bottom:.5em">{figures}</div>',
        _table(table) if table is not None else "",
        f'<div style="opacity:.65;font-size:85%">{escape(note)}</div>' if note else "",
    ]
    return f'<div style="font-family:system-ui,sans-serif">{"".join(parts)}</div>'


def _table(table: ViewTable) -> str:
    columns, rows = table.on(TERMINAL)
    if not rows:
        return ""
    heads = "".join(f'<th scope="col" style="{CELL}">{escape(column.title)}</th>' for column in columns)
    most = [max(row[at] for row in rows) if column.bar else 0.0 for at, column in enumerate(columns)]
    lines = []
    for row in rows:
        cells = zip(columns, row, most, strict=True)
        lines.append(f"<tr>{''.join(_cell(column, value, largest) for column, value, largest in cells)}</tr>")
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _cell(column: ViewColumn, value: Any, most: float) -> str:
    """A cell, with a bar behind it where its column has bars: as long as its share of the largest."""
    bar = f"background:{BAR.format(100 * value / most)};" if most else ""
    return f'<td style="{bar}{CELL}">{escape(written(value, column.kind, OWN))}</td>'
