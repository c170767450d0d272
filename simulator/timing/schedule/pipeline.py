"""When each task of a pipeline runs: its stages' fixed orders, each other's results and the sends between them.

A stage runs its tasks one after the other. A forward waits for the forward of the part before it, a backward for that
of the part after it, each a transfer later when the two lie on different stages. Starts are therefore longest paths,
found in one walk over the tasks: linear in their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...question.orders import BACKWARD, FORWARD, INPUT, WEIGHT, Orders
from ...question.plan import PlanError

Times = Any  # one number, or an array of [stage, chunk] or [stage, chunk, micro-batch]


@dataclass(frozen=True)
class PipelineTimes:
    """A pipeline that has run. Arrays have one entry per task of ``orders``, microseconds from the start.

    ``held_us`` is how long a task's stage is held up after it by the transfer of its result.
    """

    orders: Orders
    start_us: np.ndarray
    end_us: np.ndarray
    held_us: np.ndarray

    @cached_property
    def makespan_us(self) -> float:
        """From the first start to the last end, on whatever stage."""
        return float(self.end_us.max()) if len(self.end_us) else 0.0

    @cached_property
    def busy_us(self) -> np.ndarray:
        """Time in tasks, by stage; a pair that runs at the same time counts once."""
        length = self.end_us - self.start_us
        length[np.flatnonzero(self.orders.paired)] = 0.0
        return np.bincount(self.orders.stage, length, self.orders.stages)

    @cached_property
    def sending_us(self) -> np.ndarray:
        """Time in transfers that block it, by stage."""
        return np.bincount(self.orders.stage, self.held_us, self.orders.stages)

    @property
    def bubble_us(self) -> np.ndarray:
        """Time with neither task nor blocking transfer, by stage."""
        return np.maximum(self.makespan_us - self.busy_us - self.sending_us, 0.0)

    @property
    def bubble_share(self) -> np.ndarray:
        """Part of the makespan that each stage is idle."""
        return self.bubble_us / self.makespan_us if self.makespan_us else self.busy_us


def run_pipeline(
    orders: Orders,
    forward_us: Times,
    backward_us: Times,
    weight_us: Times = 0.0,
    *,
    send_us: Times = 0.0,
    return_us: Times | None = None,
    paired_us: Times | None = None,
    first_forward_us: Times | None = None,
    last_backward_us: Times | None = None,
    blocking: bool = False,
    behind: bool = True,
) -> PipelineTimes:
    """Start and end of every task. All times are microseconds, by [stage, chunk] (and micro-batch) or one for all.

    ``backward_us`` is the whole backward, ``weight_us`` the part of it that schedules which split it may put off.
    ``send_us`` is the transfer of what a chunk makes to the stage of the next part, ``return_us`` (default: the same)
    of what its backward makes to the part before. With ``blocking`` the sender waits for the transfer, else it only
    delays the receiver. ``paired_us`` is a forward and a backward at the same time, by the chunk of the forward
    (default: their sum). ``first_forward_us`` and ``last_backward_us`` replace the time of a chunk's first forward and
    last backward. What the first takes longer (weights are gathered) needs no input yet, what the last takes longer
    (gradients are reduced) holds up its own stage only: its result has gone before. Of several chunks on a stage the
    later are gathered, the earlier reduced while others are computed; without ``behind`` all that is done before the
    stage's first task and after its last.

    Raises PlanError when the orders wait for each other in a circle.
    """
    stage = orders.stage
    duration = _durations(orders, stage, forward_us, backward_us, weight_us)
    head = _longer(orders, stage, forward_us, first_forward_us, FORWARD)
    tail = _longer(orders, stage, backward_us, last_backward_us, BACKWARD, WEIGHT)
    before, late = _gather_times(orders, head, behind)
    duration += before
    together = np.flatnonzero(orders.paired)
    if len(together):
        sums = duration[together] + duration[together + 1]
        duration[together] = sums if paired_us is None else _pick(orders, stage, paired_us)[together]
    source, taker = sources(orders)
    sends = np.where(orders.kind == FORWARD, _pick(orders, stage, send_us), 0.0)
    backs = _pick(orders, stage, send_us if return_us is None else return_us)
    sends = np.where((orders.kind == BACKWARD) | (orders.kind == INPUT), backs, sends)
    sends = np.where(taker, sends, 0.0)
    lag = np.where(source >= 0, sends[source] - np.maximum(before, 0.0), 0.0)
    blocked = sends.copy() if blocking else np.zeros(len(orders))
    blocked[together + 1] += blocked[together]
    blocked[together] = 0.0
    start, end = _walk(orders, duration, source, lag, blocked, late)
    end[orders.offsets[1:] - 1] = _reduce_times(orders, end, tail, behind)
    return PipelineTimes(orders, start, end, blocked)


def in_flight(orders: Orders, size: Any = 1.0) -> np.ndarray:
    """Micro-batches by [stage, chunk] that are between forward and the end of backward, at each stage's fullest moment.

    The fullest moment is that with the greatest sum over chunks of ``size`` (bytes by [stage, chunk], or one for all).
    """
    sizes = np.broadcast_to(np.asarray(size, dtype=float), (orders.stages, orders.chunks))
    counts = np.zeros((orders.stages, orders.chunks), dtype=np.int64)
    change = (orders.kind == FORWARD).astype(np.int64)
    change -= (orders.kind == BACKWARD) | (orders.kind == WEIGHT)
    for stage, row in enumerate(orders.rows()):
        chunk, delta = orders.chunk[row], change[row]
        moment = int(np.argmax(np.cumsum(delta * sizes[stage, chunk]))) + 1
        counts[stage] = np.bincount(chunk[:moment], delta[:moment], orders.chunks)
    return counts


def _pick(orders: Orders, stage: np.ndarray, times: Times) -> np.ndarray:
    """The entry of ``times`` that belongs to each task."""
    table = np.asarray(times, dtype=float)
    if table.ndim == 0:
        return np.full(len(orders), float(table))
    shape = (orders.stages, orders.chunks, orders.micro_batches)
    if table.shape not in (shape, shape[:2]):
        raise PlanError(f"times by [stage, chunk] must have shape {shape[:2]}, not {table.shape}")
    return table[stage, orders.chunk] if table.ndim == 2 else table[stage, orders.chunk, orders.micro_batch]


def _durations(orders: Orders, stage: np.ndarray, forward: Times, backward: Times, weight: Times) -> np.ndarray:
    both, later = _pick(orders, stage, backward), _pick(orders, stage, weight)
    duration = np.choose(orders.kind, [_pick(orders, stage, forward), both, both - later, later])
    if len(duration) and duration.min() < 0:
        raise PlanError("a task of the pipeline takes less than no time; weight_us must not exceed backward_us")
    return duration


def _longer(orders: Orders, stage: np.ndarray, usual: Times, once: Times | None, *kinds: int) -> np.ndarray:
    """What the first forward or the last backward of every chunk takes longer than usual; zero for other tasks."""
    extra = np.zeros(len(orders))
    if once is not None:
        positions = np.flatnonzero(np.isin(orders.kind, kinds))
        positions = positions if FORWARD in kinds else positions[::-1]
        chosen = positions[np.unique((stage * orders.chunks + orders.chunk)[positions], return_index=True)[1]]
        extra[chosen] = (_pick(orders, stage, once) - _pick(orders, stage, usual))[chosen]
    return extra


def _gather_times(orders: Orders, head: np.ndarray, behind: bool) -> tuple[np.ndarray, dict[int, float]]:
    """How much longer each stage's first task takes, and from when on the first forwards of its other chunks may run.

    A stage gathers one chunk after the other from the start of the step.
    """
    before = np.zeros(len(orders))
    late: dict[int, float] = {}
    for row in orders.rows():
        before[row.start] = head[row.start] if behind else head[row].sum()
        if behind:
            firsts = row.start + np.flatnonzero(head[row])
            late.update(zip(firsts.tolist(), np.cumsum(head[firsts]).tolist(), strict=True))
            late.pop(row.start, None)
    return before, late


def _reduce_times(orders: Orders, end: np.ndarray, tail: np.ndarray, behind: bool) -> list[float]:
    """When each stage has run its last task and reduced its gradients, one chunk after the other."""
    reductions = []
    for row in orders.rows():
        clock = over = float(end[row][-1])
        if behind:
            clock = 0.0
        for task in (row.start + np.flatnonzero(tail[row])).tolist():
            clock = max(clock, float(end[task])) + float(tail[task])
        reductions.append(max(over, clock) if tail[row].min() >= 0 else over + float(tail[row].sum()))
    return reductions


def sources(orders: Orders) -> tuple[np.ndarray, np.ndarray]:
    """The task of another stage that each task waits for (-1: none), and whether another stage waits for it."""
    stage = orders.stage
    parts = orders.routes.shape[1]
    part_of = np.zeros((orders.stages, orders.chunks), dtype=np.int64)
    for route in orders.routes:
        part_of[route[:, 0], route[:, 1]] = np.arange(parts)
    chunk = part_of[stage, orders.chunk]
    begins, ends = orders.kind == FORWARD, (orders.kind == BACKWARD) | (orders.kind == INPUT)
    index = np.full((2, parts + 2, orders.micro_batches), -1, dtype=np.int64)
    numbers = np.arange(len(orders))
    for way, which in enumerate((begins, ends)):
        index[way, chunk[which] + 1, orders.micro_batch[which]] = numbers[which]
    source = np.full(len(orders), -1, dtype=np.int64)
    source[begins] = index[0, chunk[begins], orders.micro_batch[begins]]
    source[ends] = index[1, chunk[ends] + 2, orders.micro_batch[ends]]
    source[(source >= 0) & (stage[source] == stage)] = -1
    matched = np.zeros(len(orders), dtype=bool)
    matched[source[source >= 0]] = True
    return source, matched


def _walk(
    orders: Orders,
    duration: np.ndarray,
    source: np.ndarray,
    lag: np.ndarray,
    blocked: np.ndarray,
    late: Mapping[int, float],
) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends: each stage runs on until it must wait, and is taken up again by the task it waits for.

    ``late`` says when a task may start at the earliest, for those that wait for more than other tasks.
    """
    durations, sources, lags, holds = duration.tolist(), source.tolist(), lag.tolist(), blocked.tolist()
    pairs = orders.paired.tolist()
    offsets = orders.offsets.tolist()
    cursor, clock = offsets[:-1], [0.0] * orders.stages
    count = len(durations)
    start, end, waiting = [0.0] * count, [-1.0] * count, [-1] * count
    runnable = list(range(orders.stages))
    while runnable:
        stage = runnable.pop()
        task, now, after = cursor[stage], clock[stage], offsets[stage + 1]
        while task < after:
            needed = sources[task]
            if needed >= 0:
                arrival = end[needed]
                if arrival < 0.0:
                    waiting[needed] = stage
                    break
                arrival += lags[task]
                if task in late:
                    arrival = max(arrival, late[task])
                if arrival > now:
                    now = arrival
            if pairs[task]:
                partner = task + 1
                needed = sources[partner]
                if needed >= 0:
                    if end[needed] < 0.0:
                        waiting[needed] = stage
                        break
                    now = max(now, end[needed] + lags[partner])
                start[partner] = now
                end[partner] = now + durations[task]
            start[task] = now
            now += durations[task]
            end[task] = now
            if waiting[task] >= 0:
                runnable.append(waiting[task])
            if pairs[task]:
                task += 1
                if waiting[task] >= 0:
                    runnable.append(waiting[task])
            now += holds[task]
            task += 1
        cursor[stage], clock[stage] = task, now
    if cursor != offsets[1:]:
        raise PlanError(f"the orders of {orders.schedule} wait for each other in a circle")
    return np.array(start), np.array(end)
