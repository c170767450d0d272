"""Drawings as SVG: their frame, their texts and their axes."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator

GREY = "#8a8f98"
TICKS = 4


def drawing(width: int, height: int, title: str, elements: Iterable[str]) -> str:
    """A drawing of so many pixels, with its title for who cannot see it."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
    head += 'font-family="system-ui, sans-serif" font-size="12" fill="#6b7280">'
    return "\n".join([head, f"<title>{html.escape(title)}</title>", *elements, "</svg>", ""])


def label(x: float, y: float, text: str, anchor: str = "start", weight: str = "400") -> str:
    """A text whose ``anchor`` (start, middle, end) stands at a point."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{html.escape(text)}</text>'


def axis(
    start: float, end: float, y: float, low: float, high: float, unit: str = "", ticks: int = TICKS
) -> Iterator[str]:
    """A line from ``start`` to ``end`` with figures from ``low`` to ``high`` below it."""
    yield f'<line x1="{start}" x2="{end}" y1="{y}" y2="{y}" stroke="{GREY}"/>'
    for tick in range(ticks + 1):
        share = tick / ticks
        yield label(start + (end - start) * share, y + 18, f"{low + (high - low) * share:.3g}{unit}", anchor="middle")
