"""A simulated step as Chakra execution traces, one for each device of the cluster.

Each pipeline stage is laid out once; its devices differ in the names of their groups and in who they send to. What a
stage waits for is a message of another stage, or time of its own host; the traces' own times are those of the
simulation, so that they take as long again when they are simulated as recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...datasets.traces import protobuf
from ...datasets.traces.builder import TraceBuilder
from ...datasets.traces.classes import GAP, OP
from ...datasets.traces.gaps import FLOAT_ROUNDING_US, fill_gaps
from ...datasets.traces.gathering import take_rows, with_numbers, with_values, with_words
from ...datasets.traces.groups import GROUP_LABEL, GroupNumbers, write_groups
from ...datasets.traces.schema import EXACT_DURATION, EXACT_START, VERSION, CollectiveKind, NodeKind
from ...datasets.traces.table import ExecutionTrace, SparseRows
from ...datasets.version import __version__
from ..question.calibration import chip_of
from ..question.orders import FORWARD, WEIGHT
from ..step.state import State, Step
from ..timing.phases import FIRST, LAST, MIDDLE, ONLY
from ..timing.schedule.pipeline import sources
from .programs import NodeTemplate, TaskProgram, group_key, key_parts, label_key, streams_of, task_program

ALL_DEVICES = "all"
FIRST_MESSAGE_STREAM = 1 << 10  # streams of messages are numbered from here on
BESIDE_STREAM_OFFSET = 1 << 8  # added to the streams of a backward beside a forward


@dataclass(frozen=True, eq=False)
class _StageNodes:
    """The nodes of a stage as they are collected: sorts by number, absolute times, what each waits for."""

    templates: list[NodeTemplate]
    template: list[np.ndarray]
    stream: list[np.ndarray]
    start: list[np.ndarray]
    end: list[np.ndarray]
    parents: list[np.ndarray]

    @property
    def count(self) -> int:
        return sum(map(len, self.template))

    def add(
        self, numbers: np.ndarray, stream: np.ndarray, start: np.ndarray, end: np.ndarray, parents: np.ndarray
    ) -> int:
        """Nodes with parents among themselves; the place of the first."""
        first = self.count
        self.template.append(numbers)
        self.stream.append(stream)
        self.start.append(start)
        self.end.append(end)
        self.parents.append(parents + first)
        return first

    def add_one(self, sort: NodeTemplate, stream: int, start: float, end: float) -> int:
        """A node of its own."""
        self.templates.append(sort)
        return self.add(np.array([len(self.templates) - 1]), np.array([stream]), np.array([start]), np.array([end]),
                        np.zeros((2, 0), np.int64))  # fmt: skip

    def since(self, column: str, first: int) -> np.ndarray:
        """Starts or ends of the nodes from one on."""
        above, pieces = self.count, []
        for piece in reversed(getattr(self, column)):
            above -= len(piece)
            pieces.append(piece)
            if above <= first:
                break
        return np.concatenate(pieces[::-1])[first - above :]

    def wait(self, nodes: np.ndarray, on: int) -> None:
        """Let nodes wait for another."""
        self.parents.append(np.stack([nodes, np.full(len(nodes), on)]))


def emit(state: State, folder: Path) -> list[Path]:
    """Write the traces of a simulation to a folder; of several kinds of step each to a folder below it.

    The traces are ``opcast.DEVICE.et``, as ASTRA-sim names them, beside ``comm_group.json``. TraceFileError where
    nothing can be written.
    """
    written: list[Path] = []
    kinds = [f"{step.kind}_{index}" for index, step in enumerate(state.steps)]
    for step, kind in zip(state.steps, kinds, strict=True):
        written += emit_step(step, folder if len(state.steps) == 1 else folder / kind)
    return written


def emit_step(step: Step, folder: Path) -> list[Path]:
    """Write the traces of one kind of step."""
    groups = GroupNumbers()
    written = []
    for device, trace in traces(step, groups):
        written.append(protobuf.write(folder / f"opcast.{device}.et", trace))
    write_groups(folder, groups.written())
    return sorted(written)


def traces(step: Step, groups: GroupNumbers) -> Iterator[tuple[int, ExecutionTrace]]:
    """The trace of each device; ``groups`` is filled with the process groups. A group's name is its number; what it is
    called is the attribute ``group_name``."""
    plan = step.plan
    for stage in range(step.orders.stages):
        stage_trace = _stage_trace(step, stage)
        keys = [word for word in stage_trace.words if word.startswith("@")]
        for index, device in enumerate(plan.stage_devices(stage).tolist()):
            names = {}
            for key in keys:
                name, ranks = _group(step, key, device)
                names[key], names[label_key(key)] = groups.number(name, ranks), f"group {name}"
            device_trace = with_words(stage_trace, names)
            peers = np.array([plan.stage_devices(other_stage)[index] for other_stage in range(step.orders.stages)])
            for end in ("comm_src", "comm_dst"):
                device_trace = with_values(device_trace, end, peers)
            yield device, device_trace


def _group(step: Step, key: str, device: int) -> tuple[str, tuple[int, ...]]:
    """The name and the devices of a group that a device is in."""
    name, ranks = key_parts(key)
    plan = step.plan
    if name == ALL_DEVICES:
        return ALL_DEVICES, tuple(range(plan.cluster.devices))
    table = plan.members(name)  # what joins stages too, a norm of all gradients, is one of each stage here
    if ranks < table.shape[1] and table.shape[1] % ranks == 0:
        table = plan.members(name, ranks)
    row = int(np.argmax((table == device).any(axis=1)))
    return f"{name}{table.shape[1]}_{row}", tuple(table[row].tolist())


# --- one stage -----------------------------------------------------------------------------------------


def _stage_trace(step: Step, stage: int) -> ExecutionTrace:
    """The trace of a stage, groups by key and messages by stage."""
    nodes = _StageNodes([], [], [], [], [], [])
    exits = _add_tasks(step, stage, nodes)
    if step.trains:
        _add_optimizer(step, stage, nodes, exits)
    end = max(float(ends.max(initial=0.0)) for ends in nodes.end)
    if step.total_us - end > FLOAT_ROUNDING_US:
        _wait_for_streams(nodes, nodes.add_one(_gap_template("step overhead"), 0, end, step.total_us), exits)
    return _build_trace(step, stage, nodes)


def _add_tasks(step: Step, stage: int, nodes: _StageNodes) -> dict[int, int]:
    """The tasks of a stage in their order. Returns the last node of each stream."""
    orders, pipeline = step.orders, step.pipeline
    source, _ = sources(orders)
    takers = {int(source[task]): task for task in np.flatnonzero(source >= 0).tolist()}
    streams = streams_of(costs for times in step.times_of for costs in times.costs.values())
    programs: dict[tuple[int, str, tuple[bool, bool]], tuple[TaskProgram, int]] = {}
    row = range(orders.offsets[stage], orders.offsets[stage + 1])
    passes: dict[tuple[int, bool], int] = {}
    last: dict[int, int] = {}
    for task in row:
        kind, chunk = int(orders.kind[task]), int(orders.chunk[task])
        forward = kind == FORWARD
        number = passes[chunk, forward] = passes.get((chunk, forward), 0) + 1
        times = step.times_of[step.parts(stage)[chunk]]
        variant = (
            FIRST if forward and number == 1 else LAST if not forward and number == orders.micro_batches else MIDDLE
        )
        key = (chunk, "forward" if forward else "backward", ONLY if ONLY in times.costs else variant)
        if kind == WEIGHT:
            key = (chunk, "", ONLY)
        elif key not in programs:
            task_nodes = task_program(step, times.costs[key[2]], key[1], streams)
            programs[key] = task_nodes, len(nodes.templates)
            nodes.templates.extend(task_nodes.templates)
        begin, end = float(pipeline.start_us[task]), float(pipeline.end_us[task])
        beside = not forward and task > row.start and bool(orders.paired[task - 1])
        first = nodes.count
        offset, gap = BESIDE_STREAM_OFFSET if beside else 0, _gap_template(f"task {task - row.start}")
        _add_task(nodes, programs.get(key), begin, end, offset, last, gap)
        if source[task] >= 0:
            _add_receive(step, task, int(source[task]), nodes, first)
        if task in takers:
            _add_send(step, task, takers[task], nodes, first)
    return last


def _add_task(
    nodes: _StageNodes,
    program_at: tuple[TaskProgram, int] | None,
    begin: float,
    end: float,
    beside: int,
    last: dict[int, int],
    gap_template: NodeTemplate,
) -> None:
    """One task: its nodes closer together where it is shorter than they are, and what is left of its time as a gap."""
    task_nodes, first_template = program_at if program_at is not None else (None, 0)
    end_us = begin
    if task_nodes is not None and len(task_nodes.templates):
        scale = min(1.0, (end - begin) / task_nodes.total_us) if task_nodes.total_us else 1.0
        numbers = first_template + np.arange(len(task_nodes.templates))
        first = nodes.add(numbers, task_nodes.stream + beside, begin + task_nodes.start * scale,
                          begin + task_nodes.end * scale, task_nodes.parents)  # fmt: skip
        before = np.array(sorted(set(last.values())), np.int64)
        firsts = [first + int(np.argmax(task_nodes.stream == stream)) for stream in np.unique(task_nodes.stream)]
        done = {node: float(nodes.since("end", node)[0]) for node in before.tolist()}
        for node in firsts:
            for previous in before.tolist():
                if done[previous] <= float(nodes.since("start", node)[0]) + FLOAT_ROUNDING_US:
                    nodes.wait(np.array([node]), previous)
        for stream in np.unique(task_nodes.stream).tolist():
            last[stream + beside] = first + int(
                len(task_nodes.stream) - 1 - np.argmax(task_nodes.stream[::-1] == stream)
            )
        end_us = begin + task_nodes.total_us * scale
    if end - end_us > FLOAT_ROUNDING_US or task_nodes is None:
        node = nodes.add_one(gap_template, beside, end_us, end)
        _wait_for_streams(nodes, node, last)
        last[beside] = node


def _wait_for_streams(nodes: _StageNodes, node: int, last: Mapping[int, int]) -> None:
    """Let a node wait for the last of each stream that has ended by then."""
    begin = float(nodes.since("start", node)[0])
    for previous in sorted(set(last.values())):
        if float(nodes.since("end", previous)[0]) <= begin + FLOAT_ROUNDING_US:
            nodes.wait(np.array([node]), previous)


def _gap_template(name: str) -> NodeTemplate:
    """Time in which no kernel of a stream runs: the host's, or a framework's between kernels."""
    return NodeTemplate(
        f"{GAP} {name}", NodeKind.COMP, (("is_cpu_op", "bool", False), ("num_ops", "int64", 0), (OP, "string", GAP))
    )


# --- messages ------------------------------------------------------------------------------------------


def _departure(step: Step, task: int, taker: int) -> tuple[float, float]:
    """When the result of a task leaves for another stage, and how long it is under way.

    Gradients that are reduced after the last backward hold up its own stage only, so that the result may leave before
    the task ends; a taker that begins before it can be there gathers weights first.
    """
    orders, times = step.orders, step.pipeline
    stage, chunk, micro = (int(column[task]) for column in (orders.stage, orders.chunk, orders.micro_batch))
    table = step.sends.onward_us if int(orders.kind[task]) == FORWARD else step.sends.back_us
    duration_us = float(table[(stage, chunk, micro) if table.ndim == 3 else (stage, chunk)])
    latest_us = min(float(times.end_us[task]), float(times.start_us[taker]) - duration_us)
    return (latest_us if latest_us >= float(times.start_us[task]) else float(times.end_us[task])), duration_us


def _message_template(step: Step, task: int, taker: int, sends: bool) -> NodeTemplate:
    orders = step.orders
    source_stage, target_stage = int(orders.stage[task]), int(orders.stage[taker])
    forward = int(orders.kind[task]) == FORWARD
    chunk = (
        step.parts(source_stage)[int(orders.chunk[task])]
        if forward
        else step.parts(target_stage)[int(orders.chunk[taker])]
    )
    size = round(step.chunks[chunk].send_bytes)
    tag = task % (1 << 30)
    payload = "activations" if forward else "gradients"
    return NodeTemplate(
        f"{'send' if sends else 'recv'} {payload} {int(orders.micro_batch[task])}",
        NodeKind.COMM_SEND if sends else NodeKind.COMM_RECV,
        (("is_cpu_op", "bool", False), ("comm_size", "int64", size), ("comm_src", "int32", source_stage),
         ("comm_dst", "int32", target_stage), ("comm_tag", "int32", tag)),
    )  # fmt: skip


def _add_send(step: Step, task: int, taker: int, nodes: _StageNodes, first: int) -> None:
    """The message of a task whose nodes begin at ``first``: after the last of them to end before the result leaves."""
    leaves_us, duration_us = _departure(step, task, taker)
    ends = nodes.since("end", first)
    node = nodes.add_one(
        _message_template(step, task, taker, True), FIRST_MESSAGE_STREAM, leaves_us, leaves_us + duration_us
    )
    is_ended = np.flatnonzero(ends <= leaves_us + FLOAT_ROUNDING_US)
    if len(is_ended):
        nodes.wait(np.array([node]), first + int(is_ended[np.argmax(ends[is_ended])]))


def _add_receive(step: Step, task: int, source: int, nodes: _StageNodes, first: int) -> None:
    """The message that a task waits for: on each stream the first node that begins when it is there waits for it."""
    leaves_us, duration_us = _departure(step, source, task)
    streams, starts = nodes.since("stream", first), nodes.since("start", first)
    node = nodes.add_one(
        _message_template(step, source, task, False), FIRST_MESSAGE_STREAM, leaves_us, leaves_us + duration_us
    )
    late = np.flatnonzero(starts >= leaves_us + duration_us - FLOAT_ROUNDING_US)
    for late_stream in np.unique(streams[late]):
        nodes.wait(np.array([first + late[np.argmax(streams[late] == late_stream)]]), node)


# --- the end of a step ---------------------------------------------------------------------------------


def _add_optimizer(step: Step, stage: int, nodes: _StageNodes, last: dict[int, int]) -> None:
    """The optimizer of a stage, when all stages have done their tasks."""
    streams = streams_of(costs for times in step.times_of for costs in times.costs.values())
    now_us = step.pipeline.makespan_us
    if step.orders.stages > 1:
        everybody = group_key(ALL_DEVICES, step.plan.cluster.devices)
        norm_exchange = NodeTemplate("all_reduce gradient norm", NodeKind.COMM_COLL, (
            ("is_cpu_op", "bool", False), ("comm_type", "int64", CollectiveKind.ALL_REDUCE), ("comm_size", "int64", 4),
            ("pg_name", "string", everybody), (GROUP_LABEL, "string", label_key(everybody)),
        ))  # fmt: skip
        node = nodes.add_one(norm_exchange, 0, now_us, now_us)
        _wait_for_streams(nodes, node, last)
        last.clear()
        last[0] = node
    for chunk in step.parts(stage):
        times = step.times_of[chunk]
        variant = ONLY if ONLY in times.costs else LAST
        task_nodes = task_program(step, times.costs[variant], "optimizer", streams)
        length = times.phases[variant]["optimizer"].total_us
        if not length:
            continue
        program_at = task_nodes, len(nodes.templates)
        nodes.templates.extend(task_nodes.templates)
        _add_task(nodes, program_at, now_us, now_us + length, 0, last, _gap_template("optimizer"))
        now_us += length


# --- columns -------------------------------------------------------------------------------------------


def _build_trace(step: Step, stage: int, nodes: _StageNodes) -> ExecutionTrace:
    """The lines of a stage as a trace: gaps filled in, ids from 1 in the order of starts."""
    template_number, stream, start, end = (
        np.concatenate(pieces) for pieces in (nodes.template, nodes.stream, nodes.start, nodes.end)
    )
    child, parent = np.concatenate(nodes.parents, axis=1)
    gap = len(nodes.templates)
    nodes.templates.append(_gap_template("between kernels"))
    sends = np.array([template.kind == NodeKind.COMM_SEND for template in nodes.templates])[template_number]
    timed = fill_gaps(start, end, child, parent, (stream < FIRST_MESSAGE_STREAM) | sends, np.arange(len(start)))
    numbers = np.where(timed.gap, gap, template_number[timed.row])
    return _columns(step, stage, nodes.templates, numbers, stream[timed.row], timed.start, timed.end, timed.parents)


def _columns(
    step: Step, stage: int, templates: list[NodeTemplate], sort: np.ndarray, stream: np.ndarray, start: np.ndarray,
    end: np.ndarray, parents: np.ndarray,
) -> ExecutionTrace:  # fmt: skip
    about = [("schema", "string", f"opcast-{__version__}"), ("step", "string", step.kind), ("stage", "int32", stage),
             ("step_time_us", "double", step.total_us), ("stack", "string", step.plan.stack.id),
             ("chip", "string", chip_of(step.device)),
             ("calibration", "string", step.plan.calibration)]  # fmt: skip
    builder = TraceBuilder(about, VERSION)
    for template in templates:
        builder.add(0, **vars(template))
    trace = take_rows(builder.trace(), sort)
    offsets = np.zeros(len(sort) + 1, np.int64)
    np.cumsum(np.bincount(parents[0], minlength=len(sort)), out=offsets[1:])
    trace = replace(
        trace,
        ids=np.arange(1, len(sort) + 1).astype(np.uint64),
        data=SparseRows(offsets, (parents[1] + 1).astype(np.uint64)),
        start_us=start.astype(np.uint64),
        duration_us=(end - start).astype(np.uint64),
    )
    trace = with_numbers(trace, "stream", "int64", stream)
    trace = with_numbers(trace, EXACT_START, "double", start)
    return with_numbers(trace, EXACT_DURATION, "double", end - start)
