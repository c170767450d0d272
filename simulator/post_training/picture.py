"""Post-training as a drawing: which group of GPUs does what when, and how many responses still run."""

from __future__ import annotations

import html
from collections.abc import Iterator

from ...datasets.counts import counted
from ..html.svg import GREY, axis, drawing, label
from .answer import PostTrainReport
from .groups import ALL, ROLLOUT, TRAINING
from .phases import COPIES, CRITIC, OLD, REFERENCE, REWARD_MODEL, REWARD_RULES, ROLL, SYNC, TRAIN, VALUES
from .shown import headline

WIDTH = 860
LEFT, RIGHT = 92, 836  # of the panels, px
TOP, LANE, GAP = 56, 34, 8
CURVE = 96  # px of the curve below
TICKS = 5
BLUE = "#3b6ea8"
COLOURS = {
    ROLL: BLUE,
    TRAIN: "#d1782f",
    CRITIC: "#b9975b",
    OLD: "#5b9e6f",
    REFERENCE: "#7fb78f",
    VALUES: "#a7cfb2",
    REWARD_MODEL: "#8d6bb0",
    REWARD_RULES: "#b49ccc",
    SYNC: "#c2252b",
    COPIES[0]: GREY,
    COPIES[1]: "#b5b9c0",
}


def draw_phases(report: PostTrainReport) -> str:
    """Phases in time as SVG."""
    lanes = [ALL] if report.placement == "colocated" else [ROLLOUT, TRAINING]
    end_s = max((span.end_s for span in report.timeline), default=1.0) or 1.0
    bottom = TOP + len(lanes) * (LANE + GAP)
    names = [name for name in COLOURS if any(span.name == name for span in report.timeline)]
    legend_rows = -(-len(names) // 5)
    curve_top = bottom + 44 + 20 * legend_rows
    height = curve_top + (CURVE + 44 if report.running else 0)
    title = headline(report)
    elements = [
        label(12, 20, title, weight="600"),
        label(12, 40, f"seconds of {counted(1 + max((s.batch for s in report.timeline), default=0), 'iteration')}"),
        *_lanes(report, lanes, end_s),
        *axis(LEFT, RIGHT, bottom, 0.0, end_s, ticks=TICKS),
        *_legend(names, bottom + 40),
        *(_running(report, curve_top) if report.running else ()),
    ]
    return drawing(WIDTH, height, title, elements)


def _lanes(report: PostTrainReport, lanes: list[str], end_s: float) -> Iterator[str]:
    """A lane for each group of GPUs with a bar for each phase."""
    scale = (RIGHT - LEFT) / end_s
    for index, lane in enumerate(lanes):
        top = TOP + index * (LANE + GAP)
        yield label(LEFT - 8, top + LANE / 2 + 4, lane, anchor="end")
        yield f'<rect x="{LEFT}" y="{top}" width="{RIGHT - LEFT}" height="{LANE}" fill="{GREY}" fill-opacity="0.1"/>'
        for span in report.timeline:
            if span.group not in (lane, ALL):
                continue
            wide = max(scale * (span.end_s - span.start_s), 0.5)
            hint = f"{span.name} of batch {span.batch + 1}: {span.end_s - span.start_s:.3g} s"
            yield (
                f'<rect x="{LEFT + scale * span.start_s:.1f}" y="{top}" width="{wide:.1f}" height="{LANE}" '
                f'fill="{COLOURS[span.name]}" fill-opacity="{1.0 if span.batch % 2 == 0 else 0.7}">'
                f"<title>{html.escape(hint)}</title></rect>"
            )


def _legend(names: list[str], y: float) -> Iterator[str]:
    for index, name in enumerate(names):
        x, row = LEFT + 150 * (index % 5), y + 20 * (index // 5)
        yield f'<rect x="{x}" y="{row - 10}" width="12" height="12" fill="{COLOURS[name]}"/>'
        yield label(x + 18, row, name)


def _running(report: PostTrainReport, top: float) -> Iterator[str]:
    """Responses of a batch that still run: the long tail."""
    end_s, bottom = report.running[-1][0], top + 16 + CURVE
    yield label(12, top, "responses of a batch that still run, over seconds of its rollout")
    points = " ".join(
        f"{LEFT + (RIGHT - LEFT) * at_s / end_s:.1f},{bottom - CURVE * share:.1f}" for at_s, share in report.running
    )
    area = f"{LEFT},{bottom} {points} {RIGHT},{bottom}"
    yield f'<polyline points="{area}" fill="{BLUE}" fill-opacity="0.25" stroke="{BLUE}"/>'
    yield label(LEFT - 8, bottom - CURVE + 10, "100%", anchor="end")
    yield from axis(LEFT, RIGHT, bottom, 0.0, end_s, ticks=TICKS)
