"""The timeline of a step as bars in four lanes: phase, layer, module, operator.

A page stays quick with some thousands of bars, so operators that are short beside the step are drawn together where
there are more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..report.step import Span
from . import colours, units
from .charts import bars, figure, from_top, hover, inside, label, titled

MERGED_RUNS_PER_STEP = 1500  # a run of short operators is at least 1/1500 of the step
MAX_BARS = 3 * MERGED_RUNS_PER_STEP
MODULE_TINTS = ("phase", "phase-strong")

_LAYER = re.compile(r"^((?:[^.]+\.)*?\d+)(?:\.(.*))?$")


@dataclass(frozen=True)
class LaneBar:
    """A stretch of one lane, in microseconds: ``kind`` gives an operator's colour, ``hint`` what hovering says."""

    name: str
    kind: str
    start_us: float
    duration_us: float
    hint: str


def layer_and_module(path: str) -> tuple[str, str]:
    """``model.layers.3.mlp.up_proj`` is in layer ``layers.3``, module ``mlp``; outside layers a path is its own."""
    inside = path.removeprefix("model.")
    match = _LAYER.match(inside)
    if match is None:
        return inside or "model", ""
    return match[1], (match[2] or "").partition(".")[0]


def _last_number(match: re.Match[str]) -> str:
    return match[1].rpartition(".")[2]


def operators(spans: Sequence[Span], total_us: float) -> list[LaneBar]:
    """One bar per operator, or per run of short ones within a phase where there are too many."""
    if len(spans) <= MAX_BARS:
        return [_operator(span, total_us) for span in spans]
    shortest = total_us / MERGED_RUNS_PER_STEP
    bars: list[LaneBar] = []
    run: list[Span] = []
    for span in spans:
        if run and (run[-1].phase != span.phase or span.duration_us >= shortest or _length(run) >= shortest):
            bars.append(_merge_run(run, total_us))
            run = []
        if span.duration_us >= shortest:
            bars.append(_operator(span, total_us))
        else:
            run.append(span)
    return [*bars, *([_merge_run(run, total_us)] if run else [])]


def _length(run: Sequence[Span]) -> float:
    return run[-1].start_us + run[-1].duration_us - run[0].start_us


def _operator(span: Span, total_us: float) -> LaneBar:
    hint = hover(
        span.kind,
        span.name if span.name != span.kind else "",
        span.path,
        f"{span.phase}, {units.duration(span.duration_us)} ({units.share(span.duration_us / total_us)} of the step)",
        f"starts at {units.duration(span.start_us)}, answered by {span.engine}",
    )
    return LaneBar(span.kind, span.kind, span.start_us, span.duration_us, hint)


def _merge_run(run: Sequence[Span], total_us: float) -> LaneBar:
    """Short operators as one bar, in the colour of the kind with the most time."""
    if len(run) == 1:
        return _operator(run[0], total_us)
    by_kind: dict[str, float] = {}
    for span in run:
        by_kind[span.kind] = by_kind.get(span.kind, 0.0) + span.duration_us
    longest = sorted(by_kind, key=lambda kind: -by_kind[kind])
    length = _length(run)
    hint = hover(
        f"{len(run)} short operators",
        ", ".join(f"{kind} {units.duration(by_kind[kind])}" for kind in longest[:4]),
        f"{run[0].path} to {run[-1].path}",
        f"{run[0].phase}, {units.duration(length)} ({units.share(length / total_us)} of the step)",
    )
    return LaneBar(longest[0], longest[0], run[0].start_us, length, hint)


def stretches(spans: Sequence[Span], name_of: Callable[[Span], tuple[str, ...]], total_us: float) -> Iterator[LaneBar]:
    """Consecutive spans with the same name as one bar each; what has no name is left out."""
    for names, group in groupby(spans, key=name_of):
        run = list(group)
        if names[-1]:
            length = _length(run)
            what = f"{units.duration(length)} ({units.share(length / total_us)} of the step)"
            hint = hover(" ".join(names), what, f"{units.count(len(run))} operators from {run[0].path or 'the model'}")
            yield LaneBar(_LAYER.sub(_last_number, names[-1]), "", run[0].start_us, length, hint)


def lanes(spans: Sequence[Span], total_us: float) -> dict[str, list[LaneBar]]:
    """The bars of the three upper lanes. A lane with more than the page can take is left out."""
    bars_of_lane = {
        "phase": list(stretches(spans, lambda s: (s.phase,), total_us)),
        "layer": list(stretches(spans, lambda s: (s.phase, layer_and_module(s.path)[0]), total_us)),
        "module": list(stretches(spans, lambda s: (s.phase, *layer_and_module(s.path)), total_us)),
    }
    return {lane: bars for lane, bars in bars_of_lane.items() if bars and len(bars) <= MAX_BARS}


def timeline(spans: Sequence[Span]) -> dict[str, Any]:
    """The figure: time on x, lanes on y, one trace per kind of op. The first operator need not start at 0."""
    spans = sorted(spans, key=lambda span: span.start_us)
    end_us = max(span.start_us + span.duration_us for span in spans)
    divisor, unit = units.duration_unit(end_us)
    upper = lanes(spans, end_us)
    lane_names = [*upper, "operator"]
    data = [
        _trace(tinted, lane, divisor, colours.css(MODULE_TINTS[parity]), "var(--text)")
        for lane, lane_bars in upper.items()
        for parity in (0, 1)
        if (tinted := lane_bars[parity::2])
    ]
    by_kind: dict[str, list[LaneBar]] = {}
    for bar in operators(spans, end_us):
        by_kind.setdefault(bar.kind, []).append(bar)
    longest_last = sorted(by_kind, key=lambda kind: sum(bar.duration_us for bar in by_kind[kind]))
    for rank, kind in enumerate(longest_last):
        # Plotly draws nothing narrower than a pixel: what takes most time lies on top, so that many short operators
        # do not look like more than they are.
        meta = {"name": kind, "place": -rank}
        about = (by_kind[kind], "operator", divisor, colours.of_kind(kind), "var(--on-fill)", kind)
        data.append(_trace(*about, meta=meta))
    return figure(
        data,
        height=96 + 46 * len(lane_names),
        barmode="overlay",
        bargap=0.12,
        uniformtext={"minsize": 11, "mode": "hide"},
        xaxis=titled(f"since the start of the step, {unit}", range=[0, end_us / divisor]),
        yaxis=from_top(lane_names, fixedrange=True),
        dragmode="zoom",
    )


def _trace(
    lane_bars: Sequence[LaneBar], lane: str, divisor: float, fill: str, ink: str, kind: str = "", **more: Any
) -> dict[str, Any]:
    lengths = [round(bar.duration_us / divisor, 6) for bar in lane_bars]
    starts = [round(bar.start_us / divisor, 6) for bar in lane_bars]
    texts, hints = [label(bar.name) for bar in lane_bars], [bar.hint for bar in lane_bars]
    more = {"base": starts, "text": texts, **inside(ink), **more}
    return bars(kind, fill, lengths, [lane] * len(lane_bars), hints, **more)
