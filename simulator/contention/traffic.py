"""Every communication of a placed step in time: what runs when on which stage, and what is sent between them.

A stage's tasks hold the nodes of their phases from their own start on; the first forward of a chunk, which gathers
weights, ends with its task, the last backward, which reduces gradients, begins with it. Tasks that run beside another
(DualPipe), or are only a part of a backward, spread their communication over their own length. Sends leave when their
task ends; the optimizer follows the pipeline on all stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..graph import Node
from ..question.orders import BACKWARD, FORWARD, INPUT
from ..step.state import Step
from ..timing.costs import Costs
from ..timing.phases import FIRST, LAST, MIDDLE, ONLY, Variant
from ..timing.schedule.pipeline import sources
from .link_usage import Collective, Communication, Send, Slot, Spans, phase_spans


def collect_communication(step: Step) -> Communication:
    """What a step communicates and when."""
    walk = _Walk(step)
    collectives = [collective for stage in range(step.orders.stages) for collective in walk.stage(stage)]
    no_index, no_time = np.zeros(0, dtype=np.int64), np.zeros(0)
    columns = zip(*collectives, strict=True) if collectives else ((), (), (), ())
    joined = (
        np.concatenate([none, *column])
        for none, column in zip((no_index, no_index, no_time, no_time), columns, strict=True)
    )
    return Communication(list(walk.slots), [walk.node(slot) for slot in walk.slots], Collective(*joined), _sends(step))


@dataclass
class _Walk:
    """Walks the tasks of a step, and numbers slots as it meets them."""

    step: Step
    slots: dict[Slot, int] = field(default_factory=dict)
    phases_known: dict[tuple[int, str], Spans] = field(default_factory=dict)

    def stage(self, stage: int) -> Iterator[Collective]:
        """What one stage executes."""
        step = self.step
        clock = step.pipeline.makespan_us
        for position, part in enumerate(step.parts(stage)):
            times = step.times_of[part]
            for phase, variant, tasks in _variants(step, stage, position):
                node, offset, lasts = self.spans(times.costs[variant], phase)
                if len(node) and len(tasks):
                    base, scale = _lay_phase(step, tasks, variant, times.phases[variant][phase].total_us)
                    yield self.executions(stage, part, variant, node, base[:, None] + scale[:, None] * offset, lasts)
            last = ONLY if ONLY in times.costs else LAST
            node, offset, lasts = self.spans(times.costs[last], "optimizer")
            if len(node):
                yield self.executions(stage, part, last, node, clock + offset[None, :], lasts)
            clock += times.phases[last]["optimizer"].total_us

    def executions(
        self, stage: int, part: int, variant: Variant, node: np.ndarray, start: np.ndarray, lasts: np.ndarray
    ) -> Collective:
        """Executions of ``node`` [n] that start at ``start`` [tasks, n]."""
        slots = [
            self.slots.setdefault(Slot(part, variant, node_index), len(self.slots)) for node_index in node.tolist()
        ]
        tasks = len(start)
        return Collective(np.tile(slots, tasks), np.full(start.size, stage), start.ravel(), np.tile(lasts, tasks))

    def spans(self, costs: Costs, phase: str) -> Spans:
        """What of a phase communicates, from its own start."""
        key = id(costs), phase
        if key not in self.phases_known:
            self.phases_known[key] = phase_spans(costs, phase, self.step.plan, self.step.device)
        return self.phases_known[key]

    def node(self, slot: Slot) -> Node:
        """The node of a slot."""
        return self.step.times_of[slot.part].costs[slot.variant].nodes[slot.node]


def _variants(step: Step, stage: int, position: int) -> Iterator[tuple[str, Variant, np.ndarray]]:
    """The phases of a chunk on a stage, in each variant of the micro-batch, with the tasks that run them."""
    row = slice(step.orders.offsets[stage], step.orders.offsets[stage + 1])
    of_chunk, kind = step.orders.chunk[row] == position, step.orders.kind[row]
    forwards = row.start + np.flatnonzero(of_chunk & (kind == FORWARD))
    backwards = row.start + np.flatnonzero(of_chunk & ((kind == BACKWARD) | (kind == INPUT)))
    if ONLY in step.times_of[step.parts(stage)[position]].costs:
        yield "forward", ONLY, forwards
        yield "backward", ONLY, backwards
        return
    yield "forward", FIRST, forwards[:1]
    yield "forward", MIDDLE, forwards[1:]
    yield "backward", MIDDLE, backwards[:-1]
    yield "backward", LAST, backwards[-1:]


def _lay_phase(step: Step, tasks: np.ndarray, variant: Variant, total_us: float) -> tuple[np.ndarray, np.ndarray]:
    """When the phase of each task starts, and how many times longer it takes than alone [tasks].

    Of two tasks at the same time the forward's part comes first: a device does not communicate for both at once.
    """
    orders = step.orders
    start, end = step.pipeline.start_us[tasks], step.pipeline.end_us[tasks]
    ratio = (end - start) / max(total_us, 1e-12)
    spread = (orders.kind[tasks] == INPUT) | ((variant == MIDDLE) & (ratio < 1.0))
    base = np.where(spread | (variant != FIRST), start, np.maximum(end - total_us, 0.0))
    scale = np.where(spread, ratio, 1.0)
    for position in np.flatnonzero((orders.paired | np.roll(orders.paired, 1))[tasks]).tolist():
        first = tasks[position] if orders.paired[tasks[position]] else tasks[position] - 1
        lengths = [_task_us(step, first, "forward"), _task_us(step, first + 1, "backward")]
        scale[position] = (end[position] - start[position]) / max(sum(lengths), 1e-12)
        base[position] = start[position] + (0.0 if first == tasks[position] else lengths[0] * scale[position])
    return base, scale


def _task_us(step: Step, task: int, phase: str) -> float:
    """Length of a task's phase in the usual micro-batch."""
    stage = int(np.searchsorted(step.orders.offsets, task, side="right")) - 1
    phases = step.times_of[step.parts(stage)[int(step.orders.chunk[task])]].phases
    return phases[ONLY if ONLY in phases else MIDDLE][phase].total_us


def _sends(step: Step) -> Send:
    """Every transfer from a task to the one that waits for it on another stage."""
    orders, pipeline = step.orders, step.pipeline
    source, _ = sources(orders)
    taker = np.flatnonzero(source >= 0)
    task = source[taker]
    stage, chunk, micro_batch = orders.stage[task], orders.chunk[task], orders.micro_batch[task]
    back = orders.kind[task] != FORWARD
    sent_bytes = np.array(
        [[step.chunks[part].send_bytes for part in step.parts(s)] for s in range(orders.stages)], dtype=float
    )
    received_bytes = sent_bytes[orders.stage[taker], orders.chunk[taker]]  # what goes back is as large as what came
    lasts = np.where(back, _look_up(step.sends.back_us, stage, chunk, micro_batch), 0.0)
    lasts = np.where(back, lasts, _look_up(step.sends.onward_us, stage, chunk, micro_batch))
    start = np.minimum(pipeline.end_us[task], _result_ready_us(step)[task])
    return Send(
        back,
        stage,
        chunk,
        micro_batch,
        orders.stage[taker],
        np.where(back, received_bytes, sent_bytes[stage, chunk]),
        start,
        lasts,
    )


def _look_up(table: np.ndarray, stage: np.ndarray, chunk: np.ndarray, micro_batch: np.ndarray) -> np.ndarray:
    return table[stage, chunk] if table.ndim == 2 else table[stage, chunk, micro_batch]


def _result_ready_us(step: Step) -> np.ndarray:
    """When the result of every task is there: the last of a stage may end later, with its gradients reduced."""
    ready = step.pipeline.end_us.copy()
    for row in step.orders.rows():
        task = row.stop - 1
        if step.orders.kind[task] == FORWARD:
            continue
        ready[task] = min(ready[task], step.pipeline.start_us[task] + _task_us(step, task, "backward"))
    return ready
