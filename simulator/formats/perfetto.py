"""Timelines as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per rank, one thread per stream, arrows for sends, a counter for memory. Times are microseconds, written in
whole nanoseconds so that what does not overlap stays so. Perfetto takes a thread's number for one of the whole machine,
0 for idle and one equal to its process's for the main thread, so that all numbers differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from ...datasets.files import write_packed
from ...datasets.loading import whole
from .tracks import RankTrack, TrackFlow

EVENTS_PER_WRITE = 4096
PROCESS_NUMBER_STEP = 1000  # between the numbers of processes; those of threads lie in between
Event = dict[str, Any]


class TimelineError(ValueError):
    """A timeline that cannot be written. The message says where and why."""


def write_trace(path: Path, tracks: Sequence[RankTrack], flows: Iterable[TrackFlow] = (), expand: int = 1) -> Path:
    """Write a timeline to ``path`` (``.json`` or ``.json.gz``) and return it; TimelineError when that cannot be done.

    ``expand`` ranks are shown of each track at the most. Sends are drawn between the first of them.
    """
    path = Path(path)
    if not path.name.endswith((".json", ".json.gz")):
        raise TimelineError(f"{path} is no name for a timeline: it must end in .json.gz or .json")
    whole(TimelineError, "expand", expand, 1)
    events = trace_events(tracks, flows, expand)
    return write_packed(path, lambda file: _write(file, events), TimelineError, "the timeline ")


def _write(file: IO[bytes], events: Iterator[Event]) -> None:
    encode = json.JSONEncoder(separators=(",", ":"), default=_plain).encode
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    lines: list[str] = []
    for number, event in enumerate(events):
        lines.append((",\n" if number else "") + encode(event))
        if len(lines) == EVENTS_PER_WRITE:
            file.write("".join(lines).encode())
            lines.clear()
    file.write("".join(lines).encode() + b"\n]}\n")


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def trace_events(tracks: Sequence[RankTrack], flows: Iterable[TrackFlow] = (), expand: int = 1) -> Iterator[Event]:
    """The events of a timeline: names of ranks and streams first, then spans, memory and sends."""
    threads: list[tuple[int, dict[str, int]]] = []
    process = 0
    for track in tracks:
        names = list(dict.fromkeys(span.stream for span in track.spans))
        for member_index, member in enumerate(track.members(expand)):
            process += PROCESS_NUMBER_STEP
            streams = {name: process + number for number, name in enumerate(names, 1)}
            if not member_index:
                threads.append((process, streams))
            yield from _names(process, member, streams)
            yield from _spans(process, track, streams)
    for number, flow in enumerate(flows):
        common = {"cat": "send", "name": flow.name, "id": number}
        for phase, track_at, time_us in (("s", flow.source, flow.source_us), ("f", flow.target, flow.target_us)):
            first, streams = threads[track_at]
            position = {"pid": first, "tid": streams.get(flow.stream, first + 1), "ts": _round_to_ns(time_us)}
            yield common | {"ph": phase} | position | ({"bp": "e"} if phase == "f" else {})


def _names(process: int, name: str, streams: dict[str, int]) -> Iterator[Event]:
    rank = {"ph": "M", "pid": process}
    yield rank | {"name": "process_name", "args": {"name": name}}
    yield rank | {"name": "process_sort_index", "args": {"sort_index": process}}
    for stream, number in streams.items():
        yield rank | {"name": "thread_name", "tid": number, "args": {"name": stream}}
        yield rank | {"name": "thread_sort_index", "tid": number, "args": {"sort_index": number}}


def _spans(process: int, track: RankTrack, streams: dict[str, int]) -> Iterator[Event]:
    for span in track.spans:
        start, end = _round_to_ns(span.start_us), _round_to_ns(span.start_us + span.duration_us)
        yield {
            "ph": "X",
            "pid": process,
            "tid": streams[span.stream],
            "ts": start,
            "dur": round(end - start, 3),
            "name": span.name,
            "cat": span.category or span.stream,
            "args": dict(span.args),
        }
    for us, gib in track.memory:
        yield {"ph": "C", "pid": process, "ts": _round_to_ns(us), "name": "memory", "args": {"GiB": round(gib, 4)}}
    for name, values in track.counters.items():
        for us, value in values:
            yield {"ph": "C", "pid": process, "ts": _round_to_ns(us), "name": name, "args": {"value": round(value, 6)}}


def _round_to_ns(us: float) -> float:
    return round(us, 3)
