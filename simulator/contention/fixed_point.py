"""A step whose collectives and sends share the fabric's links for real: all of its timeline at once.

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
from ..report.training import ClusterStep, step_us
from ..timing.costs import longer
from ..timing.phases import ChunkTimes, Variant
from ..timing.placement import Sends, by_micro_batch, place_tasks, retime
from .traffic import communication
from .use import Communication, Send, pace_of, traffic_of, uses_of

ROUNDS = 12  # of placing and sharing
FREELY = 2  # rounds that take what was found; later ones go half the way, so that nothing swings to and fro
AGREED = 5e-4  # relative change of the step below which starts and lengths agree


def share_links(step: ClusterStep, flows: FlowEngine) -> ClusterStep:
    """The step with its communication as long as it takes beside all other; ``shared`` is what the links saw of it."""
    usual = step = _on_links(step)
    said = communication(step)
    uses = uses_of(said, step.plan, flows)
    pace, sends = np.ones(len(said.slots)), by_micro_batch(step.sends, step.orders.micro_batches)

    def placed(took_us: np.ndarray, part: float) -> ClusterStep:
        nonlocal pace, sends
        pace = pace + part * (pace_of(said, pace, took_us) - pace)
        sends = _moved(sends, said.sends, took_us[len(said.collectives.slot) :], part)
        return _slowed(usual, said, pace, sends)

    traffic = traffic_of(said, uses, pace, usual.sends.of(*said.sends[:3]))
    start, end = traffic.start_us, traffic.start_us + traffic.alone_us
    if (uses.part < 1.0).any():
        step = placed(traffic.alone_us, 1.0)
    apart_us = before = step_us(step)
    rounds, residual = 0, 1.0
    while residual > AGREED and rounds < ROUNDS:
        said = communication(step)
        traffic = traffic_of(said, uses, pace, usual.sends.of(*said.sends[:3]))
        start, end = run_together(uses.patterns, traffic)
        step = placed(end - start, 1.0 if rounds < FREELY else 0.5)
        now = step_us(step)
        rounds, residual, before = rounds + 1, abs(now - before) / now, now
    shared = Shared(uses.patterns, traffic, uses.size_bytes, start, end, before, apart_us, rounds, residual)
    return replace(step, shared=shared)


def _on_links(step: ClusterStep) -> ClusterStep:
    """The step with a graph of its own for every part, where only real links make communications wait."""
    plan = replace(step.plan, explicit_links=True)
    times = {which: retime(each, each.costs, plan, step.device, anew=True) for which, each in step.times.items()}
    chunks = [replace(chunk, graph=replace(chunk.graph)) for chunk in step.chunks]
    own = {id(new.graph): times[id(old.graph)] for old, new in zip(step.chunks, chunks, strict=True)}
    saved = {id(new.graph): step.saved_gib[id(old.graph)] for old, new in zip(step.chunks, chunks, strict=True)}
    pipeline = place_tasks(step.orders, tuple(chunks), own, plan, step.sends)
    return replace(step, plan=plan, chunks=chunks, times=own, saved_gib=saved, pipeline=pipeline)


def _moved(sends: Sends, sent: Send, took_us: np.ndarray, part: float) -> Sends:
    """Sends by [stage, chunk, micro-batch], nearer by a ``part`` to what each of them took."""
    tables = sends.onward_us.copy(), sends.back_us.copy()
    for table, way in zip(tables, (~sent.back, sent.back), strict=True):
        at = sent.stage[way], sent.chunk[way], sent.micro_batch[way]
        table[at] += part * (took_us[way] - table[at])
    return Sends(*tables)


def _slowed(usual: ClusterStep, said: Communication, pace: np.ndarray, sends: Sends) -> ClusterStep:
    """The step placed again: nodes of each slot so many times longer, sends as they are given."""
    factors: dict[tuple[int, Variant], np.ndarray] = {}
    for slot, times in zip(said.slots, pace.tolist(), strict=True):
        costs = usual.times[id(usual.chunks[slot.part].graph)].costs[slot.variant]
        factors.setdefault((slot.part, slot.variant), np.ones(len(costs.nodes)))[slot.node] = times
    known: dict[tuple[object, ...], ChunkTimes] = {}
    made: dict[int, ChunkTimes] = {}
    for part, chunk in enumerate(usual.chunks):
        times = usual.times[id(chunk.graph)]
        own = {variant: factors.get((part, variant)) for variant in times.costs}
        key = id(times), *(None if each is None else each.tobytes() for each in own.values())
        if key not in known:
            slowed = {variant: longer(times.costs[variant], factor) for variant, factor in own.items()}
            known[key] = retime(times, slowed, usual.plan, usual.device)
        made[id(chunk.graph)] = known[key]
    pipeline = place_tasks(usual.orders, tuple(usual.chunks), made, usual.plan, sends)
    return replace(usual, times=made, pipeline=pipeline, sends=sends)
