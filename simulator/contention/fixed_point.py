"""Steps whose collectives and sends share the fabric's links for real: all of a step's timeline at once.

Placing a step says when each communication starts; flows on the links say how long it then takes beside all others that
run on any stage; that moves what comes after it, so the step is placed again, until starts and lengths agree. Where
nothing contends the first placing stands. A node that many micro-batches run takes the mean of what they found; sends
are kept apart for every micro-batch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..engines.flow import FlowEngine
from ..network.together import Shared, run_together
from ..step.state import State, Step
from ..timing.costs import longer
from ..timing.phases import ChunkTimes, Variant
from ..timing.placement import Sends, by_micro_batch, place_tasks, retime, timed_chunk
from .traffic import communication
from .use import Communication, Send, pace_of, traffic_of, uses_of

ROUNDS = 12  # of placing and sharing
FREELY = 2  # rounds that take what was found; later ones go half the way, so that nothing swings to and fro
AGREED = 5e-4  # relative change of the step below which starts and lengths agree


def share_links(state: State, flows: FlowEngine) -> State:
    """The workload with communication as long as it takes beside all other of the same step."""
    return replace(state, steps=tuple(share_step(step, flows) for step in state.steps))


def share_step(step: Step, flows: FlowEngine) -> Step:
    """The step with its communication as long as it takes beside all other; ``shared`` is what the links saw of it."""
    usual = step = _on_links(step)
    said = communication(step)
    if not len(said.collectives.slot) and not len(said.sends.stage):
        return step
    uses = uses_of(said, step.plan, flows)
    pace, sends = np.ones(len(said.slots)), by_micro_batch(step.sends, step.orders.micro_batches)

    def placed(took_us: np.ndarray, part: float) -> Step:
        nonlocal pace, sends
        pace = pace + part * (pace_of(said, pace, took_us) - pace)
        sends = _moved(sends, said.sends, took_us[len(said.collectives.slot) :], part)
        return _slowed(usual, said, pace, sends)

    traffic = traffic_of(said, uses, pace, usual.sends.of(*said.sends[:3]))
    start, end = traffic.start_us, traffic.start_us + traffic.alone_us
    if (uses.part < 1.0).any():
        step = placed(traffic.alone_us, 1.0)
    apart_us = before = step.total_us
    rounds, residual = 0, 1.0
    while residual > AGREED and rounds < ROUNDS:
        said = communication(step)
        traffic = traffic_of(said, uses, pace, usual.sends.of(*said.sends[:3]))
        start, end = run_together(uses.patterns, traffic)
        step = placed(end - start, 1.0 if rounds < FREELY else 0.5)
        now = step.total_us
        rounds, residual, before = rounds + 1, abs(now - before) / now, now
    shared = Shared(uses.patterns, traffic, uses.size_bytes, start, end, before, apart_us, rounds, residual)
    return replace(step, shared=shared)


def _on_links(step: Step) -> Step:
    """The step where only real links make communications wait."""
    plan = replace(step.plan, explicit_links=True)
    known = {id(each): timed_chunk(each.costs, plan, step.device) for each in step.times_of}
    times = tuple(known[id(each)] for each in step.times_of)
    return replace(step, plan=plan, times_of=times, pipeline=place_tasks(step.orders, times, plan, step.sends))


def _moved(sends: Sends, sent: Send, took_us: np.ndarray, part: float) -> Sends:
    """Sends by [stage, chunk, micro-batch], nearer by a ``part`` to what each of them took."""
    tables = sends.onward_us.copy(), sends.back_us.copy()
    for table, way in zip(tables, (~sent.back, sent.back), strict=True):
        at = sent.stage[way], sent.chunk[way], sent.micro_batch[way]
        table[at] += part * (took_us[way] - table[at])
    return Sends(*tables)


def _slowed(usual: Step, said: Communication, pace: np.ndarray, sends: Sends) -> Step:
    """The step placed again: nodes of each slot so many times longer, sends as they are given."""
    factors: dict[tuple[int, Variant], np.ndarray] = {}
    for slot, times in zip(said.slots, pace.tolist(), strict=True):
        costs = usual.times_of[slot.part].costs[slot.variant]
        factors.setdefault((slot.part, slot.variant), np.ones(len(costs.nodes)))[slot.node] = times
    known: dict[tuple[object, ...], ChunkTimes] = {}
    made: list[ChunkTimes] = []
    for part, was in enumerate(usual.times_of):
        own = {variant: factors.get((part, variant)) for variant in was.costs}
        key = id(was), *(None if each is None else each.tobytes() for each in own.values())
        if key not in known:
            slowed = {variant: longer(was.costs[variant], factor) for variant, factor in own.items()}
            known[key] = retime(was, slowed, usual.plan, usual.device)
        made.append(known[key])
    pipeline = place_tasks(usual.orders, made, usual.plan, sends)
    return replace(usual, times_of=tuple(made), pipeline=pipeline, sends=sends)
