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
from ..network.timeline_sharing import SharedTimeline, run_traffic
from ..step.state import State, Step
from ..timing.costs import multiply_kernels
from ..timing.phases import ChunkTimes, Variant
from ..timing.placement import Sends, by_micro_batch, place_tasks, retime, time_chunk
from .link_usage import Communication, Send, build_traffic, link_uses, measure_pace
from .traffic import collect_communication

MAX_ROUNDS = 12  # of placing and sharing
UNDAMPED_ROUNDS = 2  # rounds that take what was found; later ones go half the way, so that nothing swings to and fro
TOLERANCE = 5e-4  # relative change of the step below which starts and lengths agree


def share_links(state: State, flows: FlowEngine) -> State:
    """The workload with communication as long as it takes beside all other of the same step."""
    return replace(state, steps=tuple(share_step(step, flows) for step in state.steps))


def share_step(step: Step, flows: FlowEngine) -> Step:
    """The step with its communication as long as it takes beside all other; ``shared`` is what the links saw of it."""
    baseline = step = _place_on_links(step)
    communication_ = collect_communication(step)
    if not len(communication_.collectives.slot) and not len(communication_.sends.stage):
        return step
    uses = link_uses(communication_, step.plan, flows)
    pace, sends = np.ones(len(communication_.slots)), by_micro_batch(step.sends, step.orders.micro_batches)

    def place_again(took_us: np.ndarray, damping: float) -> Step:
        nonlocal pace, sends
        pace = pace + damping * (measure_pace(communication_, pace, took_us) - pace)
        sends = _update_sends(sends, communication_.sends, took_us[len(communication_.collectives.slot) :], damping)
        return _slow_down(baseline, communication_, pace, sends)

    traffic = build_traffic(communication_, uses, pace, baseline.sends.of(*communication_.sends[:3]))
    start, end = traffic.start_us, traffic.start_us + traffic.alone_us
    if (uses.share < 1.0).any():
        step = place_again(traffic.alone_us, 1.0)
    uncontended_us = before = step.total_us
    rounds, residual = 0, 1.0
    while residual > TOLERANCE and rounds < MAX_ROUNDS:
        communication_ = collect_communication(step)
        traffic = build_traffic(communication_, uses, pace, baseline.sends.of(*communication_.sends[:3]))
        start, end = run_traffic(uses.patterns, traffic)
        step = place_again(end - start, 1.0 if rounds < UNDAMPED_ROUNDS else 0.5)
        now = step.total_us
        rounds, residual, before = rounds + 1, abs(now - before) / now, now
    shared = SharedTimeline(
        uses.patterns, traffic, uses.size_bytes, start, end, before, uncontended_us, rounds, residual
    )
    return replace(step, shared=shared)


def _place_on_links(step: Step) -> Step:
    """The step where only real links make communications wait."""
    plan = replace(step.plan, explicit_links=True)
    timed = {id(chunk): time_chunk(chunk.costs, plan, step.device) for chunk in step.times_of}
    times = tuple(timed[id(chunk)] for chunk in step.times_of)
    return replace(step, plan=plan, times_of=times, pipeline=place_tasks(step.orders, times, plan, step.sends))


def _update_sends(sends: Sends, sent: Send, took_us: np.ndarray, damping: float) -> Sends:
    """Sends by [stage, chunk, micro-batch], nearer by a ``damping`` to what each of them took."""
    tables = sends.onward_us.copy(), sends.back_us.copy()
    for table, way in zip(tables, (~sent.back, sent.back), strict=True):
        cells = sent.stage[way], sent.chunk[way], sent.micro_batch[way]
        table[cells] += damping * (took_us[way] - table[cells])
    return Sends(*tables)


def _slow_down(baseline: Step, communication_: Communication, pace: np.ndarray, sends: Sends) -> Step:
    """The step placed again: nodes of each slot so many times longer, sends as they are given."""
    factors: dict[tuple[int, Variant], np.ndarray] = {}
    for slot, times in zip(communication_.slots, pace.tolist(), strict=True):
        costs = baseline.times_of[slot.part].costs[slot.variant]
        factors.setdefault((slot.part, slot.variant), np.ones(len(costs.nodes)))[slot.node] = times
    retimed: dict[tuple[object, ...], ChunkTimes] = {}
    chunk_times: list[ChunkTimes] = []
    for part, times_before in enumerate(baseline.times_of):
        variant_factors = {variant: factors.get((part, variant)) for variant in times_before.costs}
        key = id(times_before), *(None if factor is None else factor.tobytes() for factor in variant_factors.values())
        if key not in retimed:
            slowed = {
                variant: multiply_kernels(times_before.costs[variant], factor)
                for variant, factor in variant_factors.items()
            }
            retimed[key] = retime(times_before, slowed, baseline.plan, baseline.device)
        chunk_times.append(retimed[key])
    pipeline = place_tasks(baseline.orders, chunk_times, baseline.plan, sends)
    return replace(baseline, times_of=tuple(chunk_times), pipeline=pipeline, sends=sends)
