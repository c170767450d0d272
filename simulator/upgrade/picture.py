"""What an upgrade may move as a drawing: a pair of bars for each kind of op, before and after measuring."""

from __future__ import annotations

from collections.abc import Iterator

from ..html.svg import drawing, label
from .answer import UpgradeReport, UpgradeRow, headline

WIDTH, LEFT, RIGHT, TOP, ROW = 860, 250, 790, 62, 34
MOST_ROWS = 10
BEFORE, AFTER = "#c2252b", "#3b6ea8"


def draw_upgrade(report: UpgradeReport) -> str:
    """The rows that are touched, as SVG; those with most to move first."""
    rows = [row for row in report.rows if row.touched][:MOST_ROWS]
    most = max([row.before_percent for row in rows], default=0.0) or 1.0
    height = TOP + ROW * max(len(rows), 1) + 16
    elements = [
        label(12, 20, f"{report.workload} of {report.model} on {report.device}: another {', '.join(report.changes)}"),
        label(12, 42, "what it may move the step by (red), and what is left of that once it is measured (blue)"),
        *(line for number, row in enumerate(rows) for line in _bars(row, TOP + ROW * number, most)),
    ]
    return drawing(WIDTH, height, headline(report), elements)


def _bars(row: UpgradeRow, top: float, most: float) -> Iterator[str]:
    """One kind of op."""
    yield label(12, top + 16, f"{row.kind} ({row.library}), {row.share:.0%}")
    for offset, percent, colour in ((3, row.before_percent, BEFORE), (15, row.after_percent, AFTER)):
        long = max((RIGHT - LEFT) * percent / most, 1.0)
        yield f'<rect x="{LEFT}" y="{top + offset}" width="{long:.1f}" height="10" fill="{colour}"/>'
        yield label(LEFT + long + 6, top + offset + 9, f"{percent:.2f} %")
