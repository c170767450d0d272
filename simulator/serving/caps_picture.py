"""Power caps of a served model as a drawing: joules of a token over the latency of the next one, a dot for each cap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..html.svg import GREY, TICKS, axis, drawing, label

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 340, 70, 820, 56, 286
FRONT, BEATEN = "#3b6ea8", "#c9ced6"


class CapPoint(NamedTuple):
    """A cap: what it is called, milliseconds of a token (p90), joules of one, and whether no other beats it."""

    name: str
    tpot_ms: float
    joules: float
    front: bool


def draw_caps(title: str, points: Sequence[CapPoint]) -> str:
    """The caps as SVG."""
    across, up = max(point.tpot_ms for point in points) * 1.1, max(point.joules for point in points) * 1.15
    elements = [
        label(12, 20, title),
        label(12, 42, "joules of an output token over milliseconds of a token (TPOT p90); grey: another cap is better"),
        *_axes(across, up),
        *(line for point in points for line in _dot(point, across, up)),
    ]
    return drawing(WIDTH, HEIGHT, title, elements)


def _axes(across: float, up: float) -> Iterator[str]:
    yield from axis(LEFT, RIGHT, BOTTOM, 0.0, across)
    yield f'<line x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{BOTTOM}" stroke="{GREY}"/>'
    for tick in range(TICKS + 1):
        share = tick / TICKS
        yield label(LEFT - 44, BOTTOM - (BOTTOM - TOP) * share + 4, f"{up * share:.2g}")


def _dot(point: CapPoint, across: float, up: float) -> Iterator[str]:
    x = LEFT + (RIGHT - LEFT) * point.tpot_ms / across
    y = BOTTOM - (BOTTOM - TOP) * point.joules / up
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{FRONT if point.front else BEATEN}"/>'
    yield label(x + 8, y - 8, point.name)
