"""A fleet over time as a drawing: replicas that serve and start, in steps, and the requests that come, as a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..html.svg import TICKS, axis, drawing, label

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 320, 50, 800, 56, 270
SERVE, START, COME = "#3b6ea8", "#e8b04b", "#2f8f5b"
MOST_POINTS = 400
Row = Mapping[str, float]


def draw_fleet(title: str, rows: Sequence[Row]) -> str:
    """What an autoscaler saw at its looks (``fleet_over_time``) as SVG; of many looks the means of as many as fit."""
    points = thinned(rows)
    replicas = max(point["ready"] + point["starting"] for point in points) or 1.0
    rate = max(point["requests_per_s"] for point in points) or 1.0
    hours = points[-1]["s"] / 3600 or 1.0
    elements = [
        label(12, 20, title),
        label(12, 42, "blue: replicas that serve; yellow: those that start; green line: requests a second (right)"),
        _area(points, hours, replicas, ("ready", "starting"), START),
        _area(points, hours, replicas, ("ready",), SERVE),
        _line(points, hours, rate),
        *_axes(hours, replicas, rate),
    ]
    return drawing(WIDTH, HEIGHT, title, elements)


def thinned(rows: Sequence[Row]) -> list[Row]:
    """The rows, or means of so many of them that at most :data:`MOST_POINTS` are left."""
    size = -(-len(rows) // MOST_POINTS)
    groups = (rows[first : first + size] for first in range(0, len(rows), size))
    return [{name: sum(row[name] for row in group) / len(group) for name in rows[0]} for group in groups]


def _area(points: Sequence[Row], hours: float, most: float, names: Sequence[str], colour: str) -> str:
    path, before = [f"M{_x(0.0, hours):.1f} {BOTTOM}"], 0.0
    for point in points:
        at = _x(point["s"] / 3600, hours)
        height = _y(sum(point[name] for name in names), most)
        path.append(f"L{_x(before, hours):.1f} {height:.1f}L{at:.1f} {height:.1f}")
        before = point["s"] / 3600
    return f'<path d="{"".join(path)}L{_x(before, hours):.1f} {BOTTOM}Z" fill="{colour}"/>'


def _line(points: Sequence[Row], hours: float, most: float) -> str:
    places = (f"{_x(point['s'] / 3600, hours):.1f},{_y(point['requests_per_s'], most):.1f}" for point in points)
    return f'<polyline points="{" ".join(places)}" fill="none" stroke="{COME}" stroke-width="1.5"/>'


def _axes(hours: float, replicas: float, rate: float) -> Iterator[str]:
    yield from axis(LEFT, RIGHT, BOTTOM, 0.0, hours, " h")
    for tick in range(TICKS + 1):
        share = tick / TICKS
        yield label(LEFT - 32, _y(replicas * share, replicas) + 4, f"{replicas * share:.3g}")
        yield label(RIGHT + 8, _y(rate * share, rate) + 4, f"{rate * share:.3g}")


def _x(at_h: float, hours: float) -> float:
    return LEFT + (RIGHT - LEFT) * at_h / hours


def _y(value: float, most: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * value / most
