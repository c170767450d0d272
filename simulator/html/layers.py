"""A pipeline in three dimensions, which a reader turns: stages in depth, time along, a layer for each kind of work.

A bar is as high as its kind's share of the task's time, so that work which runs side by side is seen at once. A page
turns some thousands of bars without a wait, so a long pipeline is drawn by stretches of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ...datasets.counts import counted
from ...datasets.ops import KINDS
from ..question.orders import FORWARD, INPUT, TASKS, WEIGHT
from ..report.tracks import first_and_last
from ..step.state import Step
from ..timing.costs import Costs
from ..timing.phases import FIRST, LAST, MIDDLE, ONLY, select_nodes
from ..timing.schedule.pipeline import PipelineTimes
from . import units
from .page import LayeredTimeline

MAX_BARS = 3000
LEAST_SHARE = 2e-3  # of a task: less than that is not seen
PRODUCTS, ATTENTION, OTHER, OPTIMIZER, SEND = "products", "attention", "other ops", "optimizer", "sends that block"
PARALLEL = {
    "tp": ("tensor parallel", "indigo"),
    "cp": ("context parallel", "cyan"),
    "ep": ("expert parallel", "pink"),
    "etp": ("expert tensor parallel", "purple"),
    "dp": ("data parallel", "teal"),
    "dp_cp": ("data parallel", "teal"),
    "edp": ("data parallel", "teal"),
    "pp": ("pipeline", "brown"),
}
HUES = {  # the layers from the lowest up
    PRODUCTS: "blue",
    ATTENTION: "orange",
    OTHER: "green",
    OPTIMIZER: "red",
    **dict(PARALLEL.values()),
    SEND: "grey",
}
LAYERS = tuple(HUES)
LAYER_OF_PURPOSE = {
    "product": PRODUCTS,
    "experts": PRODUCTS,
    "attention": ATTENTION,
    "decode": ATTENTION,
    "scan": ATTENTION,
    "optimizer": OPTIMIZER,
}

Kinds = Callable[[int, int, int, bool], Mapping[str, float]]  # stage, chunk, kind of task, first or last: us by layer


def layered_timeline(step: Step) -> LayeredTimeline:
    """The pipeline of a training step with its optimizer."""

    def kinds(stage: int, chunk: int, kind: int, at_end: bool) -> Mapping[str, float]:
        times = step.times_of[step.parts(stage)[chunk]]
        variant = ONLY if ONLY in times.costs else MIDDLE if not at_end else FIRST if kind == FORWARD else LAST
        return task_kinds(times.costs[variant], kind, times.phases[variant]["weight"].total_us)

    ends = []
    for stage in range(step.orders.stages):
        total: dict[str, float] = {}
        for part in step.parts(stage):
            costs = step.times_of[part].costs
            for layer, us in phase_kinds(costs[ONLY if ONLY in costs else LAST], "optimizer").items():
                total[layer] = total.get(layer, 0.0) + us
        ends.append((step.optimizer_us(stage), total))
    return drawn_layers(step.pipeline, kinds, ends)


def task_kinds(costs: Costs, kind: int, weight_us: float) -> dict[str, float]:
    """Microseconds of a task by layer; a backward that is split leaves the products of weight gradients for later."""
    if kind == WEIGHT:
        return {PRODUCTS: weight_us}
    times_us = phase_kinds(costs, "forward" if kind == FORWARD else "backward")
    if kind == INPUT:
        times_us[PRODUCTS] = max(times_us.get(PRODUCTS, 0.0) - weight_us, 0.0)
    return times_us


def phase_kinds(costs: Costs, phase: str) -> dict[str, float]:
    """Microseconds of a phase's kernels by layer, each kernel in full."""
    times_us: dict[str, float] = {}
    for at in select_nodes(costs, phase).tolist():
        node = costs.nodes[at]
        kind = KINDS.get(node.op.kind) if node.op is not None else None
        purpose = kind.purpose if kind is not None else ""
        layer = PARALLEL[node.group][0] if node.group in PARALLEL else LAYER_OF_PURPOSE.get(purpose, OTHER)
        times_us[layer] = times_us.get(layer, 0.0) + float(costs.kernel_us[at] * costs.repeats[at])
    return times_us


def drawn_layers(
    times: PipelineTimes, kinds: Kinds, optimizers: Sequence[tuple[float, Mapping[str, float]]] = ()
) -> LayeredTimeline:
    """What the page draws. ``optimizers`` are, by stage, microseconds after the pipeline and those by layer."""
    tasks = list(stage_tasks(times, kinds, optimizers))
    end_us = max((row[2] for row in tasks), default=0.0)
    layers = [layer for layer in LAYERS if any(layer in row[4] for row in tasks)]
    count = sum(len(row[4]) for row in tasks)
    if count > MAX_BARS:
        tasks = list(stretches(tasks, layers, end_us, max(MAX_BARS // (len(layers) * times.orders.stages), 8)))
    divisor, unit = units.duration_unit(end_us)
    bars = [
        [at, stage, layers.index(layer), round(start / divisor, 4), round(end / divisor, 4), round(share, 4)]
        for at, (stage, start, end, _, shares) in enumerate(tasks)
        for layer, share in sorted(shares.items(), key=lambda item: layers.index(item[0]))
    ]
    return LayeredTimeline(
        f"{times.orders.stages} stages, {units.duration(end_us)}, {counted(len(layers), 'kind')} of work",
        {
            "stages": times.orders.stages,
            "end": end_us / divisor,
            "unit": unit,
            "unit_us": divisor,
            "layers": [[layer, HUES[layer]] for layer in layers],
            "tasks": [row[3] for row in tasks],
            "bars": bars,
        },
    )


Row = tuple[int, float, float, str, dict[str, float]]  # stage, start and end in us, what it is, shares by layer


def stage_tasks(
    times: PipelineTimes, kinds: Kinds, optimizers: Sequence[tuple[float, Mapping[str, float]]]
) -> Iterator[Row]:
    """Every task of every stage with its shares; a forward beside a backward has half of their time each."""
    orders, edge = times.orders, first_and_last(times.orders)
    for stage, place in enumerate(orders.rows()):
        columns = (orders.kind, orders.chunk, orders.micro_batch, orders.paired, times.start_us, times.end_us)
        before = False
        for kind, chunk, micro_batch, paired, start, end, held, at_end in zip(
            *(column[place].tolist() for column in (*columns, times.held_us, edge)), strict=True
        ):
            middle = (start + end) / 2
            begin, close = (start, middle) if paired else (middle, end) if before else (start, end)
            where = f", chunk {chunk}" if orders.chunks > 1 else ""
            what = f"{TASKS[kind]} of micro-batch {micro_batch}{where}"
            yield stage, begin, close, what, _shares(kinds(stage, chunk, kind, at_end), end - start)
            if held > 0:
                yield stage, end, end + held, what, {SEND: 1.0}
            before = paired
        if stage < len(optimizers):
            length, by_layer = optimizers[stage]
            yield stage, times.makespan_us, times.makespan_us + length, OPTIMIZER, _shares(by_layer, length)


def _shares(us: Mapping[str, float], length_us: float) -> dict[str, float]:
    if length_us <= 0:
        return {}
    return {layer: min(value / length_us, 1.0) for layer, value in us.items() if value / length_us >= LEAST_SHARE}


def stretches(tasks: Sequence[Row], layers: Sequence[str], end_us: float, count: int) -> Iterator[Row]:
    """The same by ``count`` stretches of time of each stage: how much of each goes to a layer."""
    edges = np.linspace(0.0, end_us, count + 1)
    for stage in sorted({row[0] for row in tasks}):
        mine = [row for row in tasks if row[0] == stage]
        moments = np.array([moment for row in mine for moment in row[1:3]])
        spent = []
        for layer in layers:
            busy_us = [(row[2] - row[1]) * row[4].get(layer, 0.0) for row in mine]
            total = np.repeat(np.concatenate([[0.0], np.cumsum(busy_us)]), 2)[1:-1]
            spent.append(np.diff(np.interp(edges, moments, total)) / (edges[1] - edges[0]))
        for at in range(count):
            shares = {layer: float(by[at]) for layer, by in zip(layers, spent, strict=True) if by[at] >= LEAST_SHARE}
            yield stage, float(edges[at]), float(edges[at + 1]), "all tasks of this stretch", shares
