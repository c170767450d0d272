"""The tracks of a pipeline: every task of every stage, the nodes inside the first few, sends, memory over time.

A step of a large cluster has millions of nodes, too many to show them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..formats.tracks import TASK_STREAM, RankTrack, TrackFlow, TrackSpan
from ..question.orders import BACKWARD, FORWARD, TASKS, WEIGHT, Orders
from ..timing.schedule.pipeline import PipelineTimes, sources

BESIDE_SUFFIX = ", backward"
MAX_NODES = 100_000

Nodes = Callable[[int, int, int], Sequence[TrackSpan]]


def pipeline_tracks(
    times: PipelineTimes,
    nodes: Nodes | None = None,
    folded: Mapping[str, int] | None = None,
    most_nodes: int = MAX_NODES,
    ends: Nodes | None = None,
) -> tuple[list[RankTrack], list[TrackFlow]]:
    """A track for every stage of a pipeline, and its sends.

    ``nodes(stage, chunk, kind)`` are the spans of a task from its own start (kinds as in
    :mod:`..question.orders`); they are shown for the first tasks of each stage until its share of
    ``most_nodes`` is used up; ``ends`` are those of each chunk's first forward and last backward, where they are
    others, and always shown. Backwards beside forwards have streams of their own.
    """
    orders = times.orders
    together = orders.paired | np.roll(orders.paired, 1)
    edge = first_and_last(orders)
    digits = len(str(orders.stages - 1))  # viewers sort by name
    tracks = []
    for stage, row in enumerate(orders.rows()):
        nodes_left = most_nodes // orders.stages
        spans: list[TrackSpan] = []
        columns = (orders.kind, orders.chunk, orders.micro_batch, times.start_us, times.end_us, together, edge)
        for kind, chunk, micro_batch, start, end, beside, at_end in zip(
            *(column[row].tolist() for column in columns), strict=True
        ):
            args = {"micro_batch": micro_batch, "chunk": chunk, "stage": stage}
            apart = BESIDE_SUFFIX if kind != FORWARD and orders.paired.any() else ""
            name = f"{TASKS[kind]} {micro_batch}"
            spans.append(TrackSpan(name, start, end - start, TASK_STREAM + apart, TASKS[kind], args))
            source = ends if at_end and ends is not None else nodes if nodes_left > 0 else None
            inside = source(stage, chunk, kind) if source is not None else ()
            nodes_left -= len(inside)
            spans += _cut_to_task(inside, start, end, apart if beside else "")
        tracks.append(RankTrack(f"stage {stage:0{digits}}", spans, dict(folded or {})))
    return tracks, sends(times)


def first_and_last(orders: Orders) -> np.ndarray:
    """Whether each task is the first forward or the last backward of its chunk."""
    chunk_number = orders.stage * orders.chunks + orders.chunk
    forwards = np.flatnonzero(orders.kind == FORWARD)
    backwards = np.flatnonzero((orders.kind == BACKWARD) | (orders.kind == WEIGHT))[::-1]
    is_edge = np.zeros(len(orders), dtype=bool)
    for tasks in (forwards, backwards):
        is_edge[tasks[np.unique(chunk_number[tasks], return_index=True)[1]]] = True
    return is_edge


def _cut_to_task(nodes: Sequence[TrackSpan], start_us: float, end_us: float, apart: str) -> Iterator[TrackSpan]:
    """The nodes of a task where it stands, closer together when it is shorter than they are."""
    length = max((span.start_us + span.duration_us for span in nodes), default=0.0)
    scale = min(1.0, (end_us - start_us) / length) if length else 1.0
    for span in nodes:
        yield TrackSpan(
            span.name,
            start_us + span.start_us * scale,
            span.duration_us * scale,
            span.stream + apart,
            span.category,
            span.args,
        )


def sends(times: PipelineTimes) -> list[TrackFlow]:
    """An arrow from every task to the one on another stage that waits for its result."""
    orders = times.orders
    source, _ = sources(orders)
    takers = np.flatnonzero(source >= 0)
    stage, kind, middle = orders.stage, orders.kind, (times.start_us + times.end_us) / 2
    backward = TASK_STREAM + BESIDE_SUFFIX if orders.paired.any() else TASK_STREAM
    return [
        TrackFlow("activations" if forward else "gradients", s, from_us, t, to_us, TASK_STREAM if forward else backward)
        for forward, s, from_us, t, to_us in zip(
            (kind[takers] == FORWARD).tolist(),
            stage[source[takers]].tolist(),
            middle[source[takers]].tolist(),
            stage[takers].tolist(),
            middle[takers].tolist(),
            strict=True,
        )
    ]


def memory_over_time(times: PipelineTimes, static_gib: Any, chunk_gib: Any) -> list[list[tuple[float, float]]]:
    """(microsecond, GiB) of every stage: what it always holds, and what each chunk keeps from forward to backward.

    ``static_gib`` is by stage, ``chunk_gib`` per micro-batch in flight by [stage, chunk]; one number counts for all.
    """
    orders = times.orders
    base = np.broadcast_to(np.asarray(static_gib, dtype=float), (orders.stages,))
    sizes = np.broadcast_to(np.asarray(chunk_gib, dtype=float), (orders.stages, orders.chunks))
    curves = []
    for stage, row in enumerate(orders.rows()):
        kind, size = orders.kind[row], sizes[stage, orders.chunk[row]]
        begins, ends = kind == FORWARD, (kind == BACKWARD) | (kind == WEIGHT)
        when = np.concatenate([[0.0], times.start_us[row][begins], times.end_us[row][ends]])
        change = np.concatenate([[0.0], size[begins], -size[ends]])
        order = np.argsort(when, kind="stable")
        moments, last = np.unique(when[order][::-1], return_index=True)
        held = base[stage] + np.cumsum(change[order])[len(when) - 1 - last]
        curves.append(list(zip(moments.tolist(), np.maximum(held, 0.0).tolist(), strict=True)))
    return curves
