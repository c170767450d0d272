"""What the allocator holds of the device for one rank: the rank's tasks replayed, tensor by tensor, over two steps.

Weights and states come first and stay. Every micro-batch has activations of its own, which its forward pass leaves to
its backward pass; the second step finds the segments that the first one left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..graph import ACTIVATION, ROLES
from .allocator import Allocator, SegmentPart
from .lifetimes import ChunkWalk

FORWARD, BACKWARD, OPTIMIZER = range(3)
Task = tuple[int, int, int]  # kind, chunk, micro-batch
Events = list[tuple[list[int], list[int]]]  # by executed node: tensors that it allocates, and frees


@dataclass
class _Script:
    """A chunk's events by kind of task, and the tensors that are there before."""

    events: tuple[Events, Events, Events]
    static: list[int]
    sizes: list[int]
    streams: dict[int, str]
    step_long: set[int] = field(default_factory=set)


def fullest_moment(in_flight: Sequence[int]) -> Iterator[Task]:
    """Tasks of a rank that runs ``in_flight`` micro-batches of each chunk ahead, and one more of each."""
    for chunk, count in enumerate(in_flight):
        yield from ((FORWARD, chunk, micro_batch) for micro_batch in range(count))
    for chunk, count in reversed(list(enumerate(in_flight))):
        yield BACKWARD, chunk, 0
        yield FORWARD, chunk, count
    for chunk, count in reversed(list(enumerate(in_flight))):
        yield from ((BACKWARD, chunk, micro_batch) for micro_batch in range(1, count + 1))


def replay(allocator: Allocator, walks: Sequence[ChunkWalk], tasks: Iterable[Task]) -> None:
    """Runs a rank's tasks twice through an allocator. Raises :class:`.allocator.OutOfMemoryError`."""
    scripts = [_script(walk) for walk in walks]
    task_list = list(tasks)
    for script in scripts:
        for tensor in script.static:
            allocator.allocate(script.sizes[tensor])
    for _ in range(2):
        allocated: dict[tuple[int, int, int], SegmentPart] = {}
        for kind, chunk, micro_batch in task_list:
            _run(allocator, scripts[chunk], kind, (chunk, micro_batch), allocated)
            if kind == BACKWARD:
                for name in [key for key in allocated if key[:2] == (chunk, micro_batch)]:
                    allocator.release(allocated.pop(name))
        for chunk, script in enumerate(scripts):
            _run(allocator, script, OPTIMIZER, (chunk, -1), allocated)
        for span in allocated.values():
            allocator.release(span)


def _run(
    allocator: Allocator,
    script: _Script,
    kind: int,
    owner: tuple[int, int],
    allocated: dict[tuple[int, int, int], SegmentPart],
) -> None:
    """The events of a task; what it does not free is kept under the name of its micro-batch, or of the step."""
    chunk, micro_batch = owner

    def name(tensor: int) -> tuple[int, int, int]:
        return chunk, -1 if tensor in script.step_long else micro_batch, tensor

    for allocated_ids, freed_ids in script.events[kind]:
        for tensor in allocated_ids:
            if name(tensor) not in allocated:
                allocated[name(tensor)] = allocator.allocate(script.sizes[tensor], script.streams.get(tensor, ""))
        for tensor in freed_ids:
            span = allocated.pop(name(tensor), None)
            if span is not None:
                allocator.release(span)


def _script(walk: ChunkWalk) -> _Script:
    lives = walk.lives
    graph, count = lives.graph, lives.count
    used = np.flatnonzero(lives.used & (graph.tensor_bytes > 0))
    allocated_at: list[list[int]] = [[] for _ in range(count)]
    freed_at: list[list[int]] = [[] for _ in range(count)]
    static: list[int] = []
    persistent = {ROLES.index(role) for role in ROLES} - {ACTIVATION}
    roles = graph.tensor_roles
    step_long: set[int] = set()
    for tensor in used.tolist():
        begin, end = int(lives.begin[tensor]), int(lives.end[tensor])
        if begin < 0:
            static.append(tensor)
            continue
        if end >= count and int(roles[tensor]) in persistent:
            step_long.add(tensor)
        allocated_at[begin].append(tensor)
        if end < count:
            freed_at[end].append(tensor)
    events: tuple[Events, Events, Events] = ([], [], [])
    time = 0
    streams: dict[int, str] = {}
    for block in graph.blocks:
        kinds = [{"forward": FORWARD, "optimizer": OPTIMIZER}.get(node.phase, BACKWARD) for node in block.nodes]
        names = ["" if node.stream == "compute" else node.stream for node in block.nodes]
        for _ in range(block.repeat):
            for kind, stream in zip(kinds, names, strict=True):
                if allocated_at[time] or freed_at[time]:
                    events[kind].append((allocated_at[time], freed_at[time]))
                    if stream:
                        streams.update(dict.fromkeys(allocated_at[time], stream))
                time += 1
    return _Script(events, static, graph.tensor_bytes.tolist(), streams, step_long)
