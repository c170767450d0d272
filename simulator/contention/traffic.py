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
from .use import Collective, Communication, Send, Slot, Spans, phase_spans


def communication(step: Step) -> Communication:
    """What a step communicates and when."""
    walk = _Walk(step)
    parts = [each for stage in range(step.orders.stages) for each in walk.stage(stage)]
    whole, real = np.zeros(0, dtype=np.int64), np.zeros(0)
    columns = zip(*parts, strict=True) if parts else ((), (), (), ())
    joined = (np.concatenate([none, *column]) for none, column in zip((whole, whole, real, real), columns, strict=True))
    return Communication(list(walk.slots), [walk.node(slot) for slot in walk.slots], Collective(*joined), _sends(step))


@dataclass
class _Walk:
    """Walks the tasks of a step, and numbers slots as it meets them."""

    step: Step
    slots: dict[Slot, int] = field(default_factory=dict)
    known: dict[tuple[int, str], Spans] = field(default_factory=dict)

    def stage(self, stage: int) -> Iterator[Collective]:
        """What one stage executes."""
        step = self.step
        clock = step.pipeline.makespan_us
        for at, part in enumerate(step.parts(stage)):
            times = step.times_of[part]
            for phase, variant, tasks in _variants(step, stage, at):
                node, offset, lasts = self.spans(times.costs[variant], phase)
                if len(node) and len(tasks):
                    base, scale = _laid(step, tasks, variant, times.phases[variant][phase].total_us)
                    yield self.made(stage, part, variant, node, base[:, None] + scale[:, None] * offset, lasts)
            last = ONLY if ONLY in times.costs else LAST
            node, offset, lasts = self.spans(times.costs[last], "optimizer")
            if len(node):
                yield self.made(stage, part, last, node, clock + offset[None, :], lasts)
            clock += times.phases[last]["optimizer"].total_us

    def made(
        self, stage: int, part: int, variant: Variant, node: np.ndarray, start: np.ndarray, lasts: np.ndarray
    ) -> Collective:
        """Executions of ``node`` [n] that start at ``start`` [tasks, n]."""
        slots = [self.slots.setdefault(Slot(part, variant, each), len(self.slots)) for each in node.tolist()]
        tasks = len(start)
        return Collective(np.tile(slots, tasks), np.full(start.size, stage), start.ravel(), np.tile(lasts, tasks))

    def spans(self, costs: Costs, phase: str) -> Spans:
        """What of a phase communicates, from its own start."""
        key = id(costs), phase
        if key not in self.known:
            self.known[key] = phase_spans(costs, phase, self.step.plan, self.step.device)
        return self.known[key]

    def node(self, slot: Slot) -> Node:
        """The node of a slot."""
        return self.step.times_of[slot.part].costs[slot.variant].nodes[slot.node]


def _variants(step: Step, stage: int, position: int) -> Iterator[tuple[str, Variant, np.ndarray]]:
    """The phases of a chunk on a stage, in each variant of the micro-batch, with the tasks that run them."""
    row = slice(step.orders.offsets[stage], step.orders.offsets[stage + 1])
    here, kind = step.orders.chunk[row] == position, step.orders.kind[row]
    forwards = row.start + np.flatnonzero(here & (kind == FORWARD))
    backwards = row.start + np.flatnonzero(here & ((kind == BACKWARD) | (kind == INPUT)))
    if ONLY in step.times_of[step.parts(stage)[position]].costs:
        yield "forward", ONLY, forwards
        yield "backward", ONLY, backwards
        return
    yield "forward", FIRST, forwards[:1]
    yield "forward", MIDDLE, forwards[1:]
    yield "backward", MIDDLE, backwards[:-1]
    yield "backward", LAST, backwards[-1:]


def _laid(step: Step, tasks: np.ndarray, variant: Variant, total_us: float) -> tuple[np.ndarray, np.ndarray]:
    """When the phase of each task starts, and how many times longer it takes than alone [tasks].

    Of two tasks at the same time the forward's part comes first: a device does not communicate for both at once.
    """
    orders = step.orders
    start, end = step.pipeline.start_us[tasks], step.pipeline.end_us[tasks]
    ratio = (end - start) / max(total_us, 1e-12)
    spread = (orders.kind[tasks] == INPUT) | ((variant == MIDDLE) & (ratio < 1.0))
    base = np.where(spread | (variant != FIRST), start, np.maximum(end - total_us, 0.0))
    scale = np.where(spread, ratio, 1.0)
    for at in np.flatnonzero((orders.paired | np.roll(orders.paired, 1))[tasks]).tolist():
        first = tasks[at] if orders.paired[tasks[at]] else tasks[at] - 1
        lengths = [_usual_us(step, first, "forward"), _usual_us(step, first + 1, "backward")]
        scale[at] = (end[at] - start[at]) / max(sum(lengths), 1e-12)
        base[at] = start[at] + (0.0 if first == tasks[at] else lengths[0] * scale[at])
    return base, scale


def _usual_us(step: Step, task: int, phase: str) -> float:
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
    made = np.array(
        [[step.chunks[part].send_bytes for part in step.parts(s)] for s in range(orders.stages)], dtype=float
    )
    taken = made[orders.stage[taker], orders.chunk[taker]]  # what goes back is as large as what came
    lasts = np.where(back, _at(step.sends.back_us, stage, chunk, micro_batch), 0.0)
    lasts = np.where(back, lasts, _at(step.sends.onward_us, stage, chunk, micro_batch))
    start = np.minimum(pipeline.end_us[task], _without_tail(step)[task])
    return Send(
        back, stage, chunk, micro_batch, orders.stage[taker], np.where(back, taken, made[stage, chunk]), start, lasts
    )


def _at(table: np.ndarray, stage: np.ndarray, chunk: np.ndarray, micro_batch: np.ndarray) -> np.ndarray:
    found: np.ndarray = table[stage, chunk] if table.ndim == 2 else table[stage, chunk, micro_batch]
    return found


def _without_tail(step: Step) -> np.ndarray:
    """When the result of every task is there: the last of a stage may end later, with its gradients reduced."""
    ready = step.pipeline.end_us.copy()
    for row in step.orders.rows():
        task = row.stop - 1
        if step.orders.kind[task] == FORWARD:
            continue
        ready[task] = min(ready[task], step.pipeline.start_us[task] + _usual_us(step, task, "backward"))
    return ready
