"""A simulated step as Chakra execution traces, one for each device of the cluster.

Each pipeline stage is laid out once; its devices differ in the names of their groups and in who they send to. What a
stage waits for is a message of another stage, or time of its own host; the traces' own times are those of the
simulation, so that they take as long again when they are simulated as recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...datasets.traces import protobuf
from ...datasets.traces.builder import TraceBuilder
from ...datasets.traces.classes import GAP, OP
from ...datasets.traces.gaps import ROUNDED_US, filled
from ...datasets.traces.gathering import taken, with_numbers, with_values, with_words
from ...datasets.traces.groups import GROUPS_FILE
from ...datasets.traces.schema import EXACT_DURATION, EXACT_START, VERSION, CollectiveKind, NodeKind
from ...datasets.traces.table import ExecutionTrace, SparseRows
from ...datasets.version import __version__
from ..question.calibration import chip_of
from ..question.orders import FORWARD, WEIGHT
from ..step.state import State, Step
from ..timing.phases import FIRST, LAST, MIDDLE, ONLY
from ..timing.schedule.pipeline import sources
from .programs import Sort, TaskProgram, group_key, key_parts, program, streams_of

WHOLE = "all"
MESSAGES = 1 << 10  # streams of messages are numbered from here on
BESIDE = 1 << 8  # added to the streams of a backward beside a forward


@dataclass(frozen=True, eq=False)
class _Lines:
    """The nodes of a stage as they are collected: sorts by number, absolute times, what each waits for."""

    sorts: list[Sort]
    sort: list[np.ndarray]
    stream: list[np.ndarray]
    start: list[np.ndarray]
    end: list[np.ndarray]
    parents: list[np.ndarray]

    @property
    def count(self) -> int:
        return sum(map(len, self.sort))

    def add(
        self, numbers: np.ndarray, stream: np.ndarray, start: np.ndarray, end: np.ndarray, parents: np.ndarray
    ) -> int:
        """Nodes with parents among themselves; the place of the first."""
        first = self.count
        self.sort.append(numbers)
        self.stream.append(stream)
        self.start.append(start)
        self.end.append(end)
        self.parents.append(parents + first)
        return first

    def one(self, sort: Sort, stream: int, start: float, end: float) -> int:
        """A node of its own."""
        self.sorts.append(sort)
        return self.add(np.array([len(self.sorts) - 1]), np.array([stream]), np.array([start]), np.array([end]),
                        np.zeros((2, 0), np.int64))  # fmt: skip

    def since(self, column: str, first: int) -> np.ndarray:
        """Starts or ends of the nodes from one on."""
        above, found = self.count, []
        for each in reversed(getattr(self, column)):
            above -= len(each)
            found.append(each)
            if above <= first:
                break
        made: np.ndarray = np.concatenate(found[::-1])[first - above :]
        return made

    def wait(self, nodes: np.ndarray, on: int) -> None:
        """Let nodes wait for another."""
        self.parents.append(np.stack([nodes, np.full(len(nodes), on)]))


def emit(state: State, folder: Path) -> list[Path]:
    """Write the traces of a simulation to a folder; of several kinds of step each to a folder below it.

    The traces are ``opcast.DEVICE.et``, as ASTRA-sim names them, beside ``comm_group.json``. TraceFileError where
    nothing can be written.
    """
    written: list[Path] = []
    kinds = [f"{step.kind}_{place}" for place, step in enumerate(state.steps)]
    for step, kind in zip(state.steps, kinds, strict=True):
        written += emit_step(step, folder if len(state.steps) == 1 else folder / kind)
    return written


def emit_step(step: Step, folder: Path) -> list[Path]:
    """Write the traces of one kind of step."""
    groups: dict[str, tuple[int, ...]] = {}
    written = []
    for device, trace in traces(step, groups):
        written.append(protobuf.write(folder / f"opcast.{device}.et", trace))
    (folder / GROUPS_FILE).write_text(json.dumps({name: list(ranks) for name, ranks in sorted(groups.items())}) + "\n")
    return sorted(written)


def traces(step: Step, groups: dict[str, tuple[int, ...]]) -> Iterator[tuple[int, ExecutionTrace]]:
    """The trace of each device; ``groups`` is filled with the ranks of each process group."""
    plan = step.plan
    for stage in range(step.orders.stages):
        laid = _stage(step, stage)
        keys = [word for word in laid.words if word.startswith("@")]
        for place, device in enumerate(plan.stage_devices(stage).tolist()):
            names = {}
            for key in keys:
                name, ranks = _group(step, key, device)
                names[key] = name
                groups[name] = ranks
            own = with_words(laid, names)
            others = np.array([plan.stage_devices(each)[place] for each in range(step.orders.stages)])
            for end in ("comm_src", "comm_dst"):
                own = with_values(own, end, others)
            yield device, own


def _group(step: Step, key: str, device: int) -> tuple[str, tuple[int, ...]]:
    """The name and the devices of a group that a device is in."""
    name, ranks = key_parts(key)
    plan = step.plan
    if name == WHOLE:
        return WHOLE, tuple(range(plan.cluster.devices))
    table = plan.members(name)  # what joins stages too, a norm of all gradients, is one of each stage here
    if ranks < table.shape[1] and table.shape[1] % ranks == 0:
        table = plan.members(name, ranks)
    row = int(np.argmax((table == device).any(axis=1)))
    return f"{name}{table.shape[1]}_{row}", tuple(table[row].tolist())


# --- one stage -----------------------------------------------------------------------------------------


def _stage(step: Step, stage: int) -> ExecutionTrace:
    """The trace of a stage, groups by key and messages by stage."""
    lines = _Lines([], [], [], [], [], [])
    exits = _tasks(step, stage, lines)
    if step.trains:
        _optimizer(step, stage, lines, exits)
    end = max(float(each.max(initial=0.0)) for each in lines.end)
    if step.total_us - end > ROUNDED_US:
        _after(lines, lines.one(_gap("step overhead"), 0, end, step.total_us), exits)
    return _traced(step, stage, lines)


def _tasks(step: Step, stage: int, lines: _Lines) -> dict[int, int]:
    """The tasks of a stage in their order. Returns the last node of each stream."""
    orders, pipeline = step.orders, step.pipeline
    source, _ = sources(orders)
    takers = {int(source[task]): task for task in np.flatnonzero(source >= 0).tolist()}
    streams = streams_of(costs for times in step.times_of for costs in times.costs.values())
    known: dict[tuple[int, str, tuple[bool, bool]], tuple[TaskProgram, int]] = {}
    row = range(orders.offsets[stage], orders.offsets[stage + 1])
    seen: dict[tuple[int, bool], int] = {}
    last: dict[int, int] = {}
    for task in row:
        kind, chunk = int(orders.kind[task]), int(orders.chunk[task])
        forward = kind == FORWARD
        number = seen[chunk, forward] = seen.get((chunk, forward), 0) + 1
        times = step.times_of[step.parts(stage)[chunk]]
        variant = (
            FIRST if forward and number == 1 else LAST if not forward and number == orders.micro_batches else MIDDLE
        )
        key = (chunk, "forward" if forward else "backward", ONLY if ONLY in times.costs else variant)
        if kind == WEIGHT:
            key = (chunk, "", ONLY)
        elif key not in known:
            found = program(step, times.costs[key[2]], key[1], streams)
            known[key] = found, len(lines.sorts)
            lines.sorts.extend(found.sorts)
        begin, end = float(pipeline.start_us[task]), float(pipeline.end_us[task])
        beside = not forward and task > row.start and bool(orders.paired[task - 1])
        first = lines.count
        _task(lines, known.get(key), begin, end, BESIDE if beside else 0, last, _gap(f"task {task - row.start}"))
        if source[task] >= 0:
            _receive(step, task, int(source[task]), lines, first)
        if task in takers:
            _send(step, task, takers[task], lines, first)
    return last


def _task(
    lines: _Lines,
    known: tuple[TaskProgram, int] | None,
    begin: float,
    end: float,
    beside: int,
    last: dict[int, int],
    rest: Sort,
) -> None:
    """One task: its nodes closer together where it is shorter than they are, and what is left of its time as a gap."""
    made, sorts = known if known is not None else (None, 0)
    ends = begin
    if made is not None and len(made.sorts):
        scale = min(1.0, (end - begin) / made.total_us) if made.total_us else 1.0
        first = lines.add(sorts + np.arange(len(made.sorts)), made.stream + beside, begin + made.start * scale,
                          begin + made.end * scale, made.parents)  # fmt: skip
        before = np.array(sorted(set(last.values())), np.int64)
        firsts = [first + int(np.argmax(made.stream == each)) for each in np.unique(made.stream)]
        done = {each: float(lines.since("end", each)[0]) for each in before.tolist()}
        for node in firsts:
            for each in before.tolist():
                if done[each] <= float(lines.since("start", node)[0]) + ROUNDED_US:
                    lines.wait(np.array([node]), each)
        for each in np.unique(made.stream).tolist():
            last[each + beside] = first + int(len(made.stream) - 1 - np.argmax(made.stream[::-1] == each))
        ends = begin + made.total_us * scale
    if end - ends > ROUNDED_US or made is None:
        node = lines.one(rest, beside, ends, end)
        _after(lines, node, last)
        last[beside] = node


def _after(lines: _Lines, node: int, last: Mapping[int, int]) -> None:
    """Let a node wait for the last of each stream that has ended by then."""
    begin = float(lines.since("start", node)[0])
    for each in sorted(set(last.values())):
        if float(lines.since("end", each)[0]) <= begin + ROUNDED_US:
            lines.wait(np.array([node]), each)


def _gap(name: str) -> Sort:
    """Time in which no kernel of a stream runs: the host's, or a framework's between kernels."""
    return Sort(
        f"{GAP} {name}", NodeKind.COMP, (("is_cpu_op", "bool", False), ("num_ops", "int64", 0), (OP, "string", GAP))
    )


# --- messages ------------------------------------------------------------------------------------------


def _leaves(step: Step, task: int, taker: int) -> tuple[float, float]:
    """When the result of a task leaves for another stage, and how long it is under way.

    Gradients that are reduced after the last backward hold up its own stage only, so that the result may leave before
    the task ends; a taker that begins before it can be there gathers weights first.
    """
    orders, times = step.orders, step.pipeline
    stage, chunk, micro = (int(each[task]) for each in (orders.stage, orders.chunk, orders.micro_batch))
    table = step.sends.onward_us if int(orders.kind[task]) == FORWARD else step.sends.back_us
    us = float(table[(stage, chunk, micro) if table.ndim == 3 else (stage, chunk)])
    by = min(float(times.end_us[task]), float(times.start_us[taker]) - us)
    return (by if by >= float(times.start_us[task]) else float(times.end_us[task])), us


def _message(step: Step, task: int, taker: int, sends: bool) -> Sort:
    orders = step.orders
    stage, other = int(orders.stage[task]), int(orders.stage[taker])
    forward = int(orders.kind[task]) == FORWARD
    chunk = step.parts(stage)[int(orders.chunk[task])] if forward else step.parts(other)[int(orders.chunk[taker])]
    size = round(step.chunks[chunk].send_bytes)
    tag = task % (1 << 30)
    what = "activations" if forward else "gradients"
    return Sort(
        f"{'send' if sends else 'recv'} {what} {int(orders.micro_batch[task])}",
        NodeKind.COMM_SEND if sends else NodeKind.COMM_RECV,
        (("is_cpu_op", "bool", False), ("comm_size", "int64", size), ("comm_src", "int32", stage),
         ("comm_dst", "int32", other), ("comm_tag", "int32", tag)),
    )  # fmt: skip


def _send(step: Step, task: int, taker: int, lines: _Lines, first: int) -> None:
    """The message of a task whose nodes begin at ``first``: after the last of them to end before the result leaves."""
    leaves, us = _leaves(step, task, taker)
    ends = lines.since("end", first)
    node = lines.one(_message(step, task, taker, True), MESSAGES, leaves, leaves + us)
    ended = np.flatnonzero(ends <= leaves + ROUNDED_US)
    if len(ended):
        lines.wait(np.array([node]), first + int(ended[np.argmax(ends[ended])]))


def _receive(step: Step, task: int, source: int, lines: _Lines, first: int) -> None:
    """The message that a task waits for: on each stream the first node that begins when it is there waits for it."""
    leaves, us = _leaves(step, source, task)
    streams, starts = lines.since("stream", first), lines.since("start", first)
    node = lines.one(_message(step, source, task, False), MESSAGES, leaves, leaves + us)
    late = np.flatnonzero(starts >= leaves + us - ROUNDED_US)
    for each in np.unique(streams[late]):
        lines.wait(np.array([first + late[np.argmax(streams[late] == each)]]), node)


# --- the end of a step ---------------------------------------------------------------------------------


def _optimizer(step: Step, stage: int, lines: _Lines, last: dict[int, int]) -> None:
    """The optimizer of a stage, when all stages have done their tasks."""
    streams = streams_of(costs for times in step.times_of for costs in times.costs.values())
    now = step.pipeline.makespan_us
    if step.orders.stages > 1:
        meet = Sort("all_reduce gradient norm", NodeKind.COMM_COLL, (
            ("is_cpu_op", "bool", False), ("comm_type", "int64", CollectiveKind.ALL_REDUCE), ("comm_size", "int64", 4),
            ("pg_name", "string", group_key(WHOLE, step.plan.cluster.devices)),
        ))  # fmt: skip
        node = lines.one(meet, 0, now, now)
        _after(lines, node, last)
        last.clear()
        last[0] = node
    for part in step.parts(stage):
        times = step.times_of[part]
        variant = ONLY if ONLY in times.costs else LAST
        found = program(step, times.costs[variant], "optimizer", streams)
        length = times.phases[variant]["optimizer"].total_us
        if not length:
            continue
        known = found, len(lines.sorts)
        lines.sorts.extend(found.sorts)
        _task(lines, known, now, now + length, 0, last, _gap("optimizer"))
        now += length


# --- columns -------------------------------------------------------------------------------------------


def _traced(step: Step, stage: int, lines: _Lines) -> ExecutionTrace:
    """The lines of a stage as a trace: gaps filled in, ids from 1 in the order of starts."""
    sort, stream, start, end = (np.concatenate(each) for each in (lines.sort, lines.stream, lines.start, lines.end))
    child, parent = np.concatenate(lines.parents, axis=1)
    gap = len(lines.sorts)
    lines.sorts.append(_gap("between kernels"))
    sends = np.array([each.kind == NodeKind.COMM_SEND for each in lines.sorts])[sort]
    timed = filled(start, end, child, parent, (stream < MESSAGES) | sends, np.arange(len(start)))
    return _columns(step, stage, lines.sorts, np.where(timed.gap, gap, sort[timed.row]), stream[timed.row], timed.start,
                    timed.end, timed.parents)  # fmt: skip


def _columns(
    step: Step, stage: int, sorts: list[Sort], sort: np.ndarray, stream: np.ndarray, start: np.ndarray, end: np.ndarray,
    parents: np.ndarray,
) -> ExecutionTrace:  # fmt: skip
    about = [("schema", "string", f"opcast-{__version__}"), ("step", "string", step.kind), ("stage", "int32", stage),
             ("step_time_us", "double", step.total_us), ("stack", "string", step.plan.stack.id),
             ("chip", "string", chip_of(step.device)),
             ("calibration", "string", step.plan.calibration)]  # fmt: skip
    builder = TraceBuilder(about, VERSION)
    for each in sorts:
        builder.add(0, each.name, each.kind, inputs=each.inputs, outputs=each.outputs, attributes=each.attributes)
    found = taken(builder.trace(), sort)
    offsets = np.zeros(len(sort) + 1, np.int64)
    np.cumsum(np.bincount(parents[0], minlength=len(sort)), out=offsets[1:])
    found = replace(
        found,
        ids=np.arange(1, len(sort) + 1).astype(np.uint64),
        data=SparseRows(offsets, (parents[1] + 1).astype(np.uint64)),
        start_us=start.astype(np.uint64),
        duration_us=(end - start).astype(np.uint64),
    )
    found = with_numbers(found, "stream", "int64", stream)
    found = with_numbers(found, EXACT_START, "double", start)
    return with_numbers(found, EXACT_DURATION, "double", end - start)
