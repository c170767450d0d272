"""What an upgrade may move as a drawing: a pair of bars for each kind of op, before and after measuring."""

from __future__ import annotations

import html
from collections.abc import Iterator

from .answer import UpgradeReport, UpgradeRow, headline

WIDTH, LEFT, RIGHT, TOP, ROW = 860, 250, 790, 62, 34
MOST_ROWS = 10
BEFORE, AFTER = "#c2252b", "#3b6ea8"


def draw_upgrade(report: UpgradeReport) -> str:
    """The rows that are touched, as SVG; those with most to move first."""
    rows = [row for row in report.rows if row.touched][:MOST_ROWS]
    most = max([row.before_percent for row in rows], default=0.0) or 1.0
    height = TOP + ROW * max(len(rows), 1) + 16
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12" fill="#6b7280">',
            f"<title>{html.escape(headline(report))}</title>",
            _text(
                12, 20, f"{report.workload} of {report.model} on {report.device}: another {', '.join(report.changes)}"
            ),
            _text(12, 42, "what it may move the step by (red), and what is left of that once it is measured (blue)"),
            *(line for number, row in enumerate(rows) for line in _bars(row, TOP + ROW * number, most)),
            "</svg>",
            "",
        ]
    )


def _bars(row: UpgradeRow, top: float, most: float) -> Iterator[str]:
    """One kind of op."""
    yield _text(12, top + 16, f"{row.kind} ({row.library}), {row.share:.0%}")
    for offset, percent, colour in ((3, row.before_percent, BEFORE), (15, row.after_percent, AFTER)):
        long = max((RIGHT - LEFT) * percent / most, 1.0)
        yield f'<rect x="{LEFT}" y="{top + offset}" width="{long:.1f}" height="10" fill="{colour}"/>'
        yield _text(LEFT + long + 6, top + offset + 9, f"{percent:.2f} %")


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{html.escape(text)}</text>'
