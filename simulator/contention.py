"""A step whose collectives and sends share the fabric's links for real: all of its timeline at once.

Placing a step says when each communication starts; flows on the links say how long it then takes beside all others that
run on any stage; that moves what comes after it, so the step is placed again, until starts and lengths agree. Where
nothing contends the first placing stands. A node that many micro-batches run takes the mean of what they found; sends
are kept apart for every micro-batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .cluster_report import ClusterStep, step_us
from .costs import Costs
from .engines.flow import FlowEngine
from .network.together import Patterns, Shared, Traffic, Usage, run_together
from .placement import Sends, by_micro_batch, place_tasks, retime, send_ops
from .programs import ChunkTimes, Variant
from .traffic import Communication, Send, communication

ROUNDS = 12  # of placing and sharing
FREELY = 2  # rounds that take what was found; later ones go half the way, so that nothing swings to and fro
AGREED = 5e-4  # relative change of the step below which starts and lengths agree
NOTHING = 1e-6  # by which a communication may take longer than alone and count as unhindered


class _Uses(NamedTuple):
    """Of every communication of a step, collectives first [n]: its pattern, bytes, and latency before they move."""

    patterns: Patterns
    pattern: np.ndarray
    size_bytes: np.ndarray
    still_us: np.ndarray


def share_links(step: ClusterStep, flows: FlowEngine) -> ClusterStep:
    """The step with its communication as long as it takes beside all other; ``shared`` is what the links saw of it."""
    usual = step = _on_links(step)
    said = communication(step)
    uses = _uses(step, said, flows)
    pace, sends = np.ones(len(said.slots)), by_micro_batch(step.sends, step.orders.micro_batches)
    apart_us = before = step_us(step)
    rounds, residual = 0, 1.0
    while residual > AGREED and rounds < ROUNDS:
        said = communication(step)
        traffic = _traffic(said, uses, pace, usual.sends)
        start, end = run_together(uses.patterns, traffic)
        took = end - start
        part = 1.0 if rounds < FREELY else 0.5
        pace = pace + part * (_pace(said, traffic, took) - pace)
        sends = _moved(sends, said.sends, took[len(said.collectives.slot) :], part)
        step = _slowed(usual, said, pace, sends)
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


def _uses(step: ClusterStep, said: Communication, flows: FlowEngine) -> _Uses:
    number: dict[tuple[object, int], int] = {}
    usages: list[Usage] = []
    devices = [step.plan.stage_devices(stage) for stage in range(step.orders.stages)]

    def numbered(key: tuple[object, int], usage: Usage) -> int:
        if key not in number:
            number[key] = len(usages)
            usages.append(usage)
        return number[key]

    own, sent = said.collectives, said.sends
    pairs, at = np.unique(np.stack([own.slot, own.stage]), axis=1, return_inverse=True)
    found = []
    for slot, stage in pairs.T.tolist():
        key, usage, moved = flows.usage(said.ops[slot], devices[stage])
        found.append((numbered((key, stage), usage), moved))
    ways, way = np.unique(np.stack([sent.stage, sent.other]), axis=1, return_inverse=True)
    sends = [numbered((one, other), flows.sends(devices[one], devices[other])) for one, other in ways.T.tolist()]
    pattern = np.array([each for each, _ in found], dtype=np.int64)[at.ravel()]
    size = np.array([each for _, each in found], dtype=float)[at.ravel()]
    still = flows.still_us(said.ops)[own.slot]
    return _Uses(
        Patterns(usages, flows.topology.bandwidth_gbps),
        np.concatenate([pattern, np.array(sends, dtype=np.int64)[way.ravel()]]),
        np.concatenate([size, sent.size_bytes]),
        np.concatenate([still, np.full(len(sent.stage), _latency(step, flows))]),
    )


def _latency(step: ClusterStep, flows: FlowEngine) -> float:
    """What a send between stages takes before its bytes move."""
    ops = send_ops(tuple(step.chunks), step.plan)
    return float(flows.still_us(ops[:1])[0]) if ops else 0.0


def _traffic(said: Communication, uses: _Uses, pace: np.ndarray, sends: Sends) -> Traffic:
    """What moves when: lengths are those alone, starts those of the present placing."""
    own, sent = said.collectives, said.sends
    alone = np.concatenate([own.lasts_us / pace[own.slot], sends.of(sent.back, sent.stage, sent.chunk)])
    still = np.minimum(uses.still_us, alone)
    return Traffic(uses.pattern, np.concatenate([own.start_us, sent.start_us]), still, alone - still, said.previous)


def _pace(said: Communication, traffic: Traffic, took_us: np.ndarray) -> np.ndarray:
    """How many times longer than alone the executions of each slot take together [slots]."""
    slot, count = said.collectives.slot, len(said.slots)
    alone = np.bincount(slot, traffic.alone_us[: len(slot)], count)
    pace: np.ndarray = np.bincount(slot, took_us[: len(slot)], count) / np.maximum(alone, 1e-300)
    return np.where(pace > 1.0 + NOTHING, pace, 1.0)


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
            longer = {variant: _longer(times.costs[variant], factor) for variant, factor in own.items()}
            known[key] = retime(times, longer, usual.plan, usual.device)
        made[id(chunk.graph)] = known[key]
    pipeline = place_tasks(usual.orders, tuple(usual.chunks), made, usual.plan, sends)
    return replace(usual, times=made, pipeline=pipeline, sends=sends)


def _longer(costs: Costs, factor: np.ndarray | None) -> Costs:
    if factor is None or (factor == 1.0).all():
        return costs
    return replace(costs, kernel_us=costs.kernel_us * factor)
