"""A job as a drawing: ten of its lives over days, marks where they are interrupted, and how long all take."""

from __future__ import annotations

from collections.abc import Iterator

from ...datasets.counts import counted
from ..html.svg import axis, drawing, label
from .answer import PlanReport
from .failures import DAY_S

WIDTH, HEIGHT = 860, 320
TOP, BOTTOM = 56, 268
LEFTS, RIGHTS = (56, 500), (450, 836)  # of the two panels, px
LIFE, MARK, BAR = "#3b6ea8", "#c2252b", "#9db4ce"


def draw_job(report: PlanReport) -> str:
    """The lives of a job as SVG."""
    title = f"{report.model} on {report.devices:,} x {report.device}: {report.tokens:.3g} tokens"
    elements = [
        label(LEFTS[0], 20, title, weight="600"),
        *_progress(report),
        *_days(report),
    ]
    return drawing(WIDTH, HEIGHT, title, elements)


def _progress(report: PlanReport) -> Iterator[str]:
    """Tokens over days of a few lives."""
    longest = max(trace.moments_s[-1] for trace in report.traces) / DAY_S
    start, end = LEFTS[0], RIGHTS[0]
    yield label(start, 42, "trillion tokens over days: ten lives, red where they are interrupted")
    yield from axis(start, end, BOTTOM, 0.0, longest)

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
    yield label(start - 6, TOP + 4, f"{report.tokens / 1e12:.3g}", anchor="end")
    yield label(start - 6, BOTTOM, "0", anchor="end")


def _days(report: PlanReport) -> Iterator[str]:
    """How many lives take how many days, with the days that one, five and nine of ten stay below."""
    start, end = LEFTS[1], RIGHTS[1]
    lefts = [days for days, _ in report.histogram]
    width = lefts[1] - lefts[0]
    low, high = lefts[0], lefts[-1] + width
    most = max(count for _, count in report.histogram)
    yield label(start, 42, f"days of {counted(report.lives, 'life', 'lives')}: P10, P50 and P90")
    yield from axis(start, end, BOTTOM, low, high)
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
