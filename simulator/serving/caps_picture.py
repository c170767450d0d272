"""Power caps of a served model as a drawing: joules of a token over the latency of the next one, a dot for each cap."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 340, 70, 820, 56, 286
FRONT, BEATEN, GREY = "#3b6ea8", "#c9ced6", "#8a8f98"
TICKS = 4


class CapPoint(NamedTuple):
    """A cap: what it is called, milliseconds of a token (p90), joules of one, and whether no other beats it."""

    name: str
    tpot_ms: float
    joules: float
    front: bool


def draw_caps(title: str, points: Sequence[CapPoint]) -> str:
    """The caps as SVG."""
    across, up = max(point.tpot_ms for point in points) * 1.1, max(point.joules for point in points) * 1.15
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12" fill="#6b7280">',
            f"<title>{html.escape(title)}</title>",
            _text(12, 20, title),
            _text(
                12, 42, "joules of an output token over milliseconds of a token (TPOT p90); grey: another cap is better"
            ),
            *_axes(across, up),
            *(line for point in points for line in _dot(point, across, up)),
            "</svg>",
            "",
        ]
    )


def _axes(across: float, up: float) -> Iterator[str]:
    yield f'<line x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}" stroke="{GREY}"/>'
    yield f'<line x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{BOTTOM}" stroke="{GREY}"/>'
    for tick in range(TICKS + 1):
        share = tick / TICKS
        yield _text(LEFT + (RIGHT - LEFT) * share - 8, BOTTOM + 18, f"{across * share:.3g}")
        yield _text(LEFT - 44, BOTTOM - (BOTTOM - TOP) * share + 4, f"{up * share:.2g}")


def _dot(point: CapPoint, across: float, up: float) -> Iterator[str]:
    x = LEFT + (RIGHT - LEFT) * point.tpot_ms / across
    y = BOTTOM - (BOTTOM - TOP) * point.joules / up
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{FRONT if point.front else BEATEN}"/>'
    yield _text(x + 8, y - 8, point.name)


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{html.escape(text)}</text>'
