"""A pipeline in time: stages on y, tasks as bars, and the bubbles between them.

A page stays quick with some thousands of bars: of a long pipeline the beginning and the end are drawn task by task,
and the whole with runs of tasks as one bar each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..question.orders import BACKWARD, FORWARD, INPUT, TASKS, WEIGHT
from ..timing.schedule.pipeline import PipelineTimes
from . import colours, units
from .charts import figure, hover, label

MOST_BARS = 4000
BUBBLE, SEND, MIXED = "bubble", "blocking send", "forwards and backwards"
HUE_OF_TASK = {FORWARD: "blue", BACKWARD: "orange", INPUT: "orange", WEIGHT: "green"}
ORDER = (TASKS[FORWARD], TASKS[BACKWARD], TASKS[INPUT], TASKS[WEIGHT], MIXED, SEND, BUBBLE)


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of one stage: what it is, its colour, and what hovering says."""

    stage: int
    what: str
    colour: str
    start_us: float
    duration_us: float
    hint: str


def pipeline_charts(times: PipelineTimes) -> dict[str, dict[str, Any]]:
    """The figure by variant: ``whole``, and for long pipelines ``start`` and ``end`` before it, task by task."""
    count = len(times.orders)
    if count <= MOST_BARS:
        return {"whole": chart(list(tasks(times)), times, 0.0, times.makespan_us)}
    window = times.makespan_us * MOST_BARS / count / 2
    first = list(tasks(times, 0.0, window))
    last = list(tasks(times, times.makespan_us - window, times.makespan_us))
    return {
        "start": chart(first, times, 0.0, window),
        "whole": chart(list(merged(times)), times, 0.0, times.makespan_us),
        "end": chart(last, times, times.makespan_us - window, times.makespan_us),
    }


def tasks(times: PipelineTimes, low_us: float = 0.0, high_us: float = np.inf) -> Iterator[Bar]:
    """One bar per task, blocking send and bubble that touches the window."""
    orders, total = times.orders, times.makespan_us
    for stage, row in enumerate(orders.rows()):
        kinds, chunks, numbers, paired = (
            a[row] for a in (orders.kind, orders.chunk, orders.micro_batch, orders.paired)
        )
        starts, ends, held = times.start_us[row], times.end_us[row], times.held_us[row]
        inside = np.flatnonzero((ends + held >= low_us) & (starts <= high_us))
        for at in inside.tolist():
            kind, chunk, number = int(kinds[at]), int(chunks[at]), int(numbers[at])
            start, length = float(starts[at]), float(ends[at] - starts[at])
            beside = paired[at] or (at > 0 and paired[at - 1])
            half = length / 2 if beside else length  # two at once share the bar
            if at > 0 and paired[at - 1]:
                start += half
            hint = hover(
                f"{TASKS[kind]} of micro-batch {number}",
                f"stage {stage}" + (f", chunk {chunk}" if orders.chunks > 1 else ""),
                f"{units.duration(length)}, starts at {units.duration(float(starts[at]))}",
                "at the same time as its neighbour" if beside else "",
            )
            hue = HUE_OF_TASK[kind] + ("-strong" if chunk % 2 else "")
            yield Bar(stage, TASKS[kind], hue, start, half, hint)
            if held[at] > 0:
                sent = hover("blocking send", f"after {TASKS[kind]} {number}", units.duration(float(held[at])))
                yield Bar(stage, SEND, "indigo", float(ends[at]), float(held[at]), sent)
        yield from (bar for bar in bubbles(stage, starts, ends + held, total) if _touches(bar, low_us, high_us))


def _touches(bar: Bar, low_us: float, high_us: float) -> bool:
    return bar.start_us + bar.duration_us >= low_us and bar.start_us <= high_us


def bubbles(stage: int, starts: np.ndarray, ends: np.ndarray, total_us: float) -> Iterator[Bar]:
    """The gaps of a stage, those before its first and after its last task included."""
    begins = np.concatenate([[0.0], np.maximum.accumulate(ends)])
    gaps = np.append(starts, total_us) - begins
    for at in np.flatnonzero(gaps > total_us * 1e-6).tolist():
        hint = hover("bubble", f"stage {stage}", f"idle for {units.duration(float(gaps[at]))}")
        yield Bar(stage, BUBBLE, "line", float(begins[at]), float(gaps[at]), hint)


def merged(times: PipelineTimes) -> Iterator[Bar]:
    """Neighbouring tasks together, until a bar is long enough to be seen."""
    orders, total = times.orders, times.makespan_us
    shortest = total * orders.stages / MOST_BARS
    for stage, row in enumerate(orders.rows()):
        starts, ends = times.start_us[row].tolist(), (times.end_us + times.held_us)[row].tolist()
        kinds = orders.kind[row].tolist()
        first = 0
        for at in range(len(starts)):
            last = at + 1 == len(starts)
            apart = not last and starts[at + 1] - ends[at] > shortest / 4
            if last or apart or ends[at] - starts[first] >= shortest:
                yield _together(stage, kinds[first : at + 1], starts[first], ends[at])
                first = at + 1
        gaps = bubbles(stage, times.start_us[row], np.array(ends), total)
        yield from (bar for bar in gaps if bar.duration_us > shortest / 4)


def _together(stage: int, kinds: Sequence[int], start_us: float, end_us: float) -> Bar:
    counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    backward = set(counts) - {FORWARD}
    mixed = FORWARD in counts and bool(backward)
    what = MIXED if mixed else TASKS[max(counts, key=lambda kind: counts[kind])]
    colour = "purple" if mixed else HUE_OF_TASK[max(counts, key=lambda kind: counts[kind])]
    parts = ", ".join(f"{TASKS[kind]} x{count}" for kind, count in counts.items())
    hint = hover(parts, f"stage {stage}", f"{units.duration(end_us - start_us)} from {units.duration(start_us)}")
    return Bar(stage, what, colour, start_us, end_us - start_us, hint)


def chart(bars: Sequence[Bar], times: PipelineTimes, low_us: float, high_us: float) -> dict[str, Any]:
    """The figure of some bars, seen from ``low_us`` to ``high_us``."""
    divisor, unit = units.duration_unit(times.makespan_us)
    names = [f"stage {stage}" for stage in range(times.orders.stages)]
    groups: dict[tuple[str, str], list[Bar]] = {}
    for bar in bars:
        groups.setdefault((bar.what, bar.colour), []).append(bar)
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": label(what),
            "legendgroup": what,
            "meta": {"name": what, "place": ORDER.index(what)},
            "y": [names[bar.stage] for bar in group],
            "base": [round((bar.start_us - low_us) / divisor, 6) for bar in group],
            "x": [round(bar.duration_us / divisor, 6) for bar in group],
            "hovertext": [bar.hint for bar in group],
            "hoverinfo": "text",
            "textposition": "none",
            "marker": {"color": colours.css(colour), "line": {"width": 0}},
        }
        for (what, colour), group in sorted(groups.items(), key=lambda item: (-ORDER.index(item[0][0]), item[0][1]))
    ]
    return figure(
        data,
        height=90 + 26 * len(names),
        barmode="overlay",
        bargap=0.12,
        xaxis={
            "title": {"text": f"since {units.duration(low_us) if low_us else 'the start of the step'}, {unit}"},
            "range": [0, (high_us - low_us) / divisor],
        },
        yaxis={"categoryarray": names[::-1], "categoryorder": "array", "showgrid": False, "fixedrange": True},
        dragmode="zoom",
    )
