"""How answers look in a notebook: headline figures and a table with bars, as HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .view import TERMINAL, ViewTable, time_text, written

OWN = {"time_ms": lambda ms: time_text(1e3 * ms)}
BAR = "linear-gradient(90deg, rgba(56,132,255,.28) {0:.1f}%, transparent {0:.1f}%)"
CELL = "padding:.2em .8em;text-align:{}"


@dataclass(frozen=True)
class NotebookTable:
    """Rows of text under ``heads``; ``shares`` (0 to 1, one a row) are drawn as bars behind the first column."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    shares: Sequence[float] = ()


def notebook_table(view: ViewTable) -> NotebookTable:
    """A table of an answer as a notebook has it: what a terminal shows."""
    columns, rows = view.on(TERMINAL)
    texts = [[written(value, column.kind, OWN) for value, column in zip(row, columns, strict=True)] for row in rows]
    return NotebookTable([column.title for column in columns], texts)


def display_html(
    title: str, facts: Sequence[tuple[str, str]], table: NotebookTable | None = None, note: str = ""
) -> str:
    """HTML of a title, figures by name side by side, a table and a line below. All text is escaped."""
    figures = "".join(
        f'<div style="margin-right:2em"><div style="opacity:.65;font-size:85%">{escape(name)}</div>'
        f'<div style="font-size:125%">{escape(value)}</div></div>'
        for name, value in facts
        if value
    )
    parts = [
        f'<div style="font-weight:600;margin:.3em 0">{escape(title)}</div>',
        f'<div style="display:flex;flex-wrap:wrap;margin-bottom:.5em">{figures}</div>',
        _table(table) if table is not None and table.rows else "",
        f'<div style="opacity:.65;font-size:85%">{escape(note)}</div>' if note else "",
    ]
    return f'<div style="font-family:system-ui,sans-serif">{"".join(parts)}</div>'


def _table(table: NotebookTable) -> str:
    heads = "".join(f'<th scope="col" style="{CELL.format("left")}">{escape(head)}</th>' for head in table.heads)
    rows = []
    for at, row in enumerate(table.rows):
        bar = f"background:{BAR.format(100 * table.shares[at])};" if at < len(table.shares) else ""
        first = f'<td style="{bar}{CELL.format("left")}">{escape(row[0])}</td>'
        rest = "".join(f'<td style="{CELL.format("left")}">{escape(cell)}</td>' for cell in row[1:])
        rows.append(f"<tr>{first}{rest}</tr>")
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
