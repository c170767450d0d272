"""Timelines: files that a viewer opens, in which nothing overlaps that did not, with every rank, send and byte."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.simulator.formats.perfetto import TimelineError, trace_events, write_trace
from opcast.simulator.formats.tracks import RankTrack, TrackFlow, TrackSpan
from opcast.simulator.question.orders import FORWARD, make_orders
from opcast.simulator.report.tracks import memory_over_time, pipeline_tracks
from opcast.simulator.timing.schedule.pipeline import PipelineTimes, in_flight, run_pipeline


def pipeline(schedule: str = "1f1b", stages: int = 4, micro_batches: int = 8, virtual: int = 1) -> PipelineTimes:
    made = make_orders(schedule, stages, micro_batches, virtual)
    forward = np.random.default_rng(0).uniform(50, 80, (stages, made.chunks))
    return run_pipeline(made, forward, 2 * forward, forward, send_us=3.3)


def task_nodes(stage: int, chunk: int, kind: int) -> list[TrackSpan]:
    return [
        TrackSpan("aten.mm", 0.0, 10.0, "compute", "gemm", {"m": 4096, "engine": "learned", "layer": np.int64(stage)}),
        TrackSpan("nccl.all_reduce", 5.0, 300.0, "comm:dp", "all_reduce", {"size_bytes": 4096}),
    ]


def written(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def check(found: list[dict[str, Any]]) -> None:
    """Every thread is named, its spans nest, flows begin and end inside a span, counters go forward in time."""
    named = {(e["pid"], e["tid"]) for e in found if e["name"] == "thread_name"}
    numbers = [number for _, number in named] + [e["pid"] for e in found if e["name"] == "process_name"]
    assert 0 not in numbers
    assert len(set(numbers)) == len(numbers), "Perfetto takes numbers of threads for the whole machine's"
    spans: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= 0
            spans[event["pid"], event["tid"]].append((event["ts"], round(event["ts"] + event["dur"], 3)))
    assert set(spans) <= named
    for each in spans.values():
        open_until: list[float] = []
        for start, end in sorted(each, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "spans of one thread overlap without nesting"
            open_until.append(end)
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in found:
        if event["ph"] in "sf":
            flows[event["id"]].append(event)
            inside = spans[event["pid"], event["tid"]]
            assert any(start <= event["ts"] <= end for start, end in inside)
    for pair in flows.values():
        assert [e["ph"] for e in pair] == ["s", "f"]
        assert pair[0]["ts"] <= pair[1]["ts"]
        assert pair[0]["pid"] != pair[1]["pid"]
    counters: dict[int, list[float]] = defaultdict(list)
    for event in found:
        if event["ph"] == "C":
            counters[event["pid"]].append(event["ts"])
    assert all(times == sorted(set(times)) for times in counters.values())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe"])
def test_a_pipeline_is_written_with_its_sends_nodes_and_memory(schedule: str, tmp_path: Path) -> None:
    times = pipeline(schedule, virtual=2 if schedule == "interleaved" else 1)
    tracks, flows = pipeline_tracks(times, task_nodes, {"data": 16, "tensor": 8})
    memory = memory_over_time(times, 20.0, 1.5)
    tracks = [RankTrack(t.name, t.spans, t.folded, m) for t, m in zip(tracks, memory, strict=True)]
    found = written(write_trace(tmp_path / "step.json.gz", tracks, flows))
    check(found)
    spans = [e for e in found if e["ph"] == "X"]
    assert len(spans) == 3 * len(times.orders)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(times.makespan_us, abs=1e-3)
    names = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    assert names == [f"stage {s}, data 0, tensor 0 (and 127 alike)" for s in range(4)]
    ways = times.orders.chunks * 4 if schedule != "dualpipe" else 4
    assert sum(e["ph"] == "s" for e in found) == 2 * (ways - 1) * times.orders.micro_batches
    kernel = next(e for e in spans if e["cat"] == "gemm")
    assert kernel["args"] == {"m": 4096, "engine": "learned", "layer": 0}


def test_folded_ranks_are_written_out_up_to_a_limit(tmp_path: Path) -> None:
    tracks, flows = pipeline_tracks(pipeline(stages=2), None, {"data": 2, "tensor": 2})
    found = written(write_trace(tmp_path / "few.json.gz", tracks, flows, expand=3))
    check(found)
    names = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    assert names[:3] == [
        "stage 0, data 0, tensor 0",
        "stage 0, data 0, tensor 1",
        "stage 0, data 1, tensor 0 (and 1 alike)",
    ]
    assert {e["pid"] for e in found if e["ph"] in "sf"} == {1000, 4000}
    whole = written(write_trace(tmp_path / "all.json.gz", tracks, flows, expand=99))
    assert sum(e["name"] == "process_name" for e in whole) == 8
    assert not any("alike" in e["args"].get("name", "") for e in whole if e["ph"] == "M")


def test_nodes_are_shown_for_the_first_tasks_only_where_there_are_too_many() -> None:
    times = pipeline()
    tracks, _ = pipeline_tracks(times, task_nodes, most_nodes=40)
    for track in tracks:
        nodes = [span for span in track.spans if span.category == "gemm"]
        assert len(nodes) == 5
        assert len(track.spans) == 16 + 10


def test_first_and_last_tasks_of_a_chunk_may_have_nodes_of_their_own() -> None:
    times = pipeline("interleaved", 12, 12, 2)

    def ends(stage: int, chunk: int, kind: int) -> list[TrackSpan]:
        return [TrackSpan("gather" if kind == FORWARD else "reduce", 0.0, 1.0, "comm:dp", str(chunk))]

    tracks, _ = pipeline_tracks(times, task_nodes, most_nodes=120, ends=ends)
    assert [track.name for track in tracks][-3:] == ["stage 09", "stage 10", "stage 11"]
    for track in tracks:
        found = [(span.name, span.category) for span in track.spans if span.name in ("gather", "reduce")]
        assert sorted(found) == [("gather", "0"), ("gather", "1"), ("reduce", "0"), ("reduce", "1")]


@settings(deadline=None)
@given(st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.integers(1, 4), st.integers(1, 9))
def test_the_memory_counter_peaks_with_the_micro_batches_in_flight(schedule: str, stages: int, count: int) -> None:
    times = pipeline(schedule, stages, count)
    found = memory_over_time(times, 10.0, 2.0)
    peaks = 10.0 + 2.0 * in_flight(times.orders).sum(axis=1)
    assert [max(gib for _, gib in stage) for stage in found] == pytest.approx(peaks.tolist())
    assert all(stage[0][0] == 0.0 and stage[-1][1] == pytest.approx(10.0) for stage in found)


@settings(deadline=None)
@given(st.lists(st.floats(1e-4, 50), min_size=1, max_size=40))
def test_spans_that_touch_do_not_overlap_once_written(lengths: list[float]) -> None:
    starts = np.cumsum([0.0, *lengths])[:-1].tolist()
    track = RankTrack("rank", [TrackSpan("op", s, d) for s, d in zip(starts, lengths, strict=True)])
    check(list(trace_events([track])))


def test_the_same_timeline_gives_the_same_bytes(tmp_path: Path) -> None:
    tracks, flows = pipeline_tracks(pipeline(), task_nodes)
    one, other = (write_trace(tmp_path / f"{name}.json.gz", tracks, flows).read_bytes() for name in "ab")
    assert one == other
    assert gzip.decompress(one) == write_trace(tmp_path / "plain.json", tracks, flows).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json.gz", "b.json.gz", "plain.json"]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    tracks = [RankTrack("rank", [TrackSpan("op", 0.0, 1.0)])]
    with pytest.raises(TimelineError, match=r"must end in .json.gz or .json"):
        write_trace(tmp_path / "trace.txt", tracks)
    with pytest.raises(TimelineError, match="expand=0 must be"):
        write_trace(tmp_path / "trace.json", tracks, expand=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(TimelineError, match="cannot write the timeline") as caught:
        write_trace(tmp_path / "file" / "trace.json", tracks)
    assert "\n" not in str(caught.value)


def test_a_flow_without_spans_on_its_stream_still_lands_on_the_rank() -> None:
    tracks = [RankTrack(name, [TrackSpan("op", 0.0, 2.0)]) for name in ("a", "b")]
    found = list(trace_events(tracks, [TrackFlow("send", 0, 1.0, 1, 1.5)]))
    check(found)
