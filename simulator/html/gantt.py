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
from . import charts, colours, units
from .charts import figure, hover

MAX_BARS = 4000
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
    if count <= MAX_BARS:
        return {"whole": chart(list(tasks(times)), times, 0.0, times.makespan_us)}
    window = times.makespan_us * MAX_BARS / count / 2
    first = list(tasks(times, 0.0, window))
    last = list(tasks(times, times.makespan_us - window, times.makespan_us))
    return {
        "start": chart(first, times, 0.0, window),
        "whole": chart(list(merge_neighbours(times)), times, 0.0, times.makespan_us),
        "end": chart(last, times, times.makespan_us - window, times.makespan_us),
    }


def tasks(times: PipelineTimes, low_us: float = 0.0, high_us: float = np.inf) -> Iterator[Bar]:
    """One bar per task, blocking send and bubble that touches the window."""
    orders, total = times.orders, times.makespan_us
    for stage, task_rows in enumerate(orders.rows()):
        kinds, chunks, micro_batches, paired = (
            column[task_rows] for column in (orders.kind, orders.chunk, orders.micro_batch, orders.paired)
        )
        starts_us, ends_us, held_us = times.start_us[task_rows], times.end_us[task_rows], times.held_us[task_rows]
        in_window = np.flatnonzero((ends_us + held_us >= low_us) & (starts_us <= high_us))
        for index in in_window.tolist():
            kind, chunk, micro_batch = int(kinds[index]), int(chunks[index]), int(micro_batches[index])
            start_us, length_us = float(starts_us[index]), float(ends_us[index] - starts_us[index])
            beside = paired[index] or (index > 0 and paired[index - 1])
            bar_us = length_us / 2 if beside else length_us  # two at once share the bar
            if index > 0 and paired[index - 1]:
                start_us += bar_us
            hint = hover(
                f"{TASKS[kind]} of micro-batch {micro_batch}",
                f"stage {stage}" + (f", chunk {chunk}" if orders.chunks > 1 else ""),
                f"{units.duration(length_us)}, starts at {units.duration(float(starts_us[index]))}",
                "at the same time as its neighbour" if beside else "",
            )
            hue = HUE_OF_TASK[kind] + ("-strong" if chunk % 2 else "")
            yield Bar(stage, TASKS[kind], hue, start_us, bar_us, hint)
            if held_us[index] > 0:
                send_hint = hover(
                    "blocking send", f"after {TASKS[kind]} {micro_batch}", units.duration(float(held_us[index]))
                )
                yield Bar(stage, SEND, "indigo", float(ends_us[index]), float(held_us[index]), send_hint)
        yield from (
            bar for bar in bubbles(stage, starts_us, ends_us + held_us, total) if _touches(bar, low_us, high_us)
        )


def _touches(bar: Bar, low_us: float, high_us: float) -> bool:
    return bar.start_us + bar.duration_us >= low_us and bar.start_us <= high_us


def bubbles(stage: int, starts: np.ndarray, ends: np.ndarray, total_us: float) -> Iterator[Bar]:
    """The gaps of a stage, those before its first and after its last task included."""
    begins_us = np.concatenate([[0.0], np.maximum.accumulate(ends)])
    gaps_us = np.append(starts, total_us) - begins_us
    for index in np.flatnonzero(gaps_us > total_us * 1e-6).tolist():
        hint = hover("bubble", f"stage {stage}", f"idle for {units.duration(float(gaps_us[index]))}")
        yield Bar(stage, BUBBLE, "line", float(begins_us[index]), float(gaps_us[index]), hint)


def merge_neighbours(times: PipelineTimes) -> Iterator[Bar]:
    """Neighbouring tasks together, until a bar is long enough to be seen."""
    orders, total = times.orders, times.makespan_us
    shortest_us = total * orders.stages / MAX_BARS
    for stage, task_rows in enumerate(orders.rows()):
        starts, ends = times.start_us[task_rows].tolist(), (times.end_us + times.held_us)[task_rows].tolist()
        kinds = orders.kind[task_rows].tolist()
        first = 0
        for index in range(len(starts)):
            last = index + 1 == len(starts)
            is_far = not last and starts[index + 1] - ends[index] > shortest_us / 4
            if last or is_far or ends[index] - starts[first] >= shortest_us:
                yield _merged_bar(stage, kinds[first : index + 1], starts[first], ends[index])
                first = index + 1
        gaps = bubbles(stage, times.start_us[task_rows], np.array(ends), total)
        yield from (bar for bar in gaps if bar.duration_us > shortest_us / 4)


def _merged_bar(stage: int, kinds: Sequence[int], start_us: float, end_us: float) -> Bar:
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
        charts.bars(
            what,
            colours.css(colour),
            [round(bar.duration_us / divisor, 6) for bar in group],
            [names[bar.stage] for bar in group],
            [bar.hint for bar in group],
            base=[round((bar.start_us - low_us) / divisor, 6) for bar in group],
            meta={"name": what, "place": ORDER.index(what)},
        )
        for (what, colour), group in sorted(groups.items(), key=lambda item: (-ORDER.index(item[0][0]), item[0][1]))
    ]
    return figure(
        data,
        height=90 + 26 * len(names),
        barmode="overlay",
        bargap=0.12,
        xaxis=charts.titled(
            f"since {units.duration(low_us) if low_us else 'the start of the step'}, {unit}",
            range=[0, (high_us - low_us) / divisor],
        ),
        yaxis=charts.from_top(names, fixedrange=True),
        dragmode="zoom",
    )
