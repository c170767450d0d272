"""A job as a drawing: ten of its lives over days, marks where they are interrupted, and how long all take."""

from __future__ import annotations

import html
from collections.abc import Iterator

from .answer import PlanReport
from .failures import DAY_S

WIDTH, HEIGHT = 860, 320
TOP, BOTTOM = 56, 268
LEFTS, RIGHTS = (56, 500), (450, 836)  # of the two panels, px
TICKS = 4
LIFE, MARK, BAR, GREY = "#3b6ea8", "#c2252b", "#9db4ce", "#8a8f98"


def draw_job(report: PlanReport) -> str:
    """The lives of a job as SVG."""
    title = f"{report.model} on {report.devices:,} x {report.device}: {report.tokens:.3g} tokens"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12" fill="#6b7280">',
            f"<title>{html.escape(title)}</title>",
            _text(LEFTS[0], 20, title, weight="600"),
            *_progress(report),
            *_days(report),
            "</svg>",
            "",
        ]
    )


def _progress(report: PlanReport) -> Iterator[str]:
    """Tokens over days of a few lives."""
    longest = max(trace.moments_s[-1] for trace in report.traces) / DAY_S
    start, end = LEFTS[0], RIGHTS[0]
    yield _text(start, 42, "trillion tokens over days: ten lives, red where they are interrupted")
    yield from _axis(start, end, 0.0, longest)

    def point_at(moment_s: float, tokens: float) -> tuple[float, float]:
        return (
            start + (end - start) * moment_s / DAY_S / longest,
            BOTTOM - (BOTTOM - TOP) * tokens / report.tokens,
        )

    for trace in report.traces:
        points = [point_at(*point) for point in zip(trace.moments_s, trace.tokens, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" stroke="{LIFE}" stroke-opacity="0.5"/>'
        for at in trace.interruptions:
            yield f'<circle cx="{points[at][0]:.1f}" cy="{points[at][1]:.1f}" r="1.6" fill="{MARK}"/>'
    yield _text(start - 6, TOP + 4, f"{report.tokens / 1e12:.3g}", anchor="end")
    yield _text(start - 6, BOTTOM, "0", anchor="end")


def _days(report: PlanReport) -> Iterator[str]:
    """How many lives take how many days, with the days that one, five and nine of ten stay below."""
    start, end = LEFTS[1], RIGHTS[1]
    lefts = [days for days, _ in report.histogram]
    width = lefts[1] - lefts[0]
    low, high = lefts[0], lefts[-1] + width
    most = max(count for _, count in report.histogram)
    yield _text(start, 42, f"days of {report.lives:,} lives: P10, P50 and P90")
    yield from _axis(start, end, low, high)
    scale = (end - start) / ((high - low) or 1.0)
    for days, count in report.histogram:
        tall = (BOTTOM - TOP) * count / most
        yield (
            f'<rect x="{start + scale * (days - low):.1f}" y="{BOTTOM - tall:.1f}" '
            f'width="{max(scale * width - 1, 0.5):.1f}" height="{tall:.1f}" fill="{BAR}"/>'
        )
    for days in (report.days.p10, report.days.p50, report.days.p90):
        x = start + scale * (days - low)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}" stroke="{MARK}" stroke-dasharray="4 3"/>'


def _axis(start: int, end: int, low: float, high: float) -> Iterator[str]:
    """The axis below a panel."""
    yield f'<line x1="{start}" x2="{end}" y1="{BOTTOM}" y2="{BOTTOM}" stroke="{GREY}"/>'
    for tick in range(TICKS + 1):
        value = low + (high - low) * tick / TICKS
        yield _text(start + (end - start) * tick / TICKS, BOTTOM + 18, f"{value:.3g}", anchor="middle")


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "400") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{html.escape(text)}</text>'
