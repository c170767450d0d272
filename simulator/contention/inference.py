"""Steps of inference whose collectives and sends share the fabric's links, as :mod:`.fixed_point` does it for training.

Micro-batches follow each other through the stages: each enters a stage a period of the slowest one after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ...datasets.devices import Device
from ..engines.flow import FlowEngine
from ..network.together import Shared, run_together
from ..question.plan import Plan
from ..report.inference import Step
from ..timing.costs import Costs, longer
from ..timing.phases import MIDDLE
from .fixed_point import AGREED, FREELY, ROUNDS
from .use import Collective, Communication, Send, Slot, pace_of, phase_spans, traffic_of, uses_of

Timed = Callable[[Step, Sequence[Costs], np.ndarray, Plan, Device], Step]  # a step with other costs and sends


def share_stages(step: Step, plan: Plan, device: Device, flows: FlowEngine, timed: Timed) -> Step:
    """The step with its communication as long as it takes beside all other; ``shared`` is what the links saw of it."""
    plan = replace(plan, explicit_links=True)
    step = timed(step, step.costs, step.sends_us, plan, device)
    said = _communication(step, plan, device)
    if not len(said.collectives.slot) and not len(said.sends.stage):
        return step
    usual, uses = step, uses_of(said, plan, flows)
    pace, sends_us = np.ones(len(said.slots)), step.sends_us

    def placed(took_us: np.ndarray, part: float) -> Step:
        nonlocal pace, sends_us
        sent = _mean(said.sends.stage, took_us[len(said.collectives.slot) :], sends_us)
        pace, sends_us = pace + part * (pace_of(said, pace, took_us) - pace), sends_us + part * (sent - sends_us)
        return timed(usual, _slowed(usual, said, pace), sends_us, plan, device)

    traffic = traffic_of(said, uses, pace, usual.sends_us[said.sends.stage])
    start, end = traffic.start_us, traffic.start_us + traffic.alone_us
    if (uses.part < 1.0).any():
        step = placed(traffic.alone_us, 1.0)
    apart_us = before = step.total_us
    rounds, residual = 0, 1.0
    while residual > AGREED and rounds < ROUNDS:
        said = _communication(step, plan, device)
        traffic = traffic_of(said, uses, pace, usual.sends_us[said.sends.stage])
        start, end = run_together(uses.patterns, traffic)
        step = placed(end - start, 1.0 if rounds < FREELY else 0.5)
        rounds, residual, before = rounds + 1, abs(step.total_us - before) / step.total_us, step.total_us
    shared = Shared(uses.patterns, traffic, uses.size_bytes, start, end, before, apart_us, rounds, residual)
    return replace(step, shared=shared)


def _communication(step: Step, plan: Plan, device: Device) -> Communication:
    """What every stage communicates for every micro-batch, and what it sends on."""
    totals = np.array([stage.total_us for stage in step.stages])
    enters = np.cumsum(totals + step.sends_us) - totals - step.sends_us
    turns = max(totals.max(), step.sends_us.max()) * np.arange(plan.micro_batches)
    slots: dict[Slot, int] = {}
    parts = []
    for stage, costs in enumerate(step.costs):
        node, offset, lasts = phase_spans(costs, "forward", plan, device)
        own = [slots.setdefault(Slot(stage, MIDDLE, each), len(slots)) for each in node.tolist()]
        starts = (enters[stage] + turns[:, None] + offset).ravel()
        count = len(turns)
        parts.append((np.tile(own, count), np.full(starts.size, stage), starts, np.tile(lasts, count)))
    whole = [np.concatenate(column) for column in zip(*parts, strict=True)]
    sending = np.array([stage for stage, chunk in enumerate(step.chunks) if chunk.send_bytes], dtype=np.int64)
    sender, turn = np.repeat(sending, plan.micro_batches), np.tile(np.arange(plan.micro_batches), len(sending))
    sends = Send(
        np.zeros(len(sender), dtype=bool),
        sender,
        np.zeros_like(sender),
        turn,
        sender + 1,
        np.array([chunk.send_bytes for chunk in step.chunks])[sender],
        (enters + totals)[sender] + turns[turn],
        step.sends_us[sender],
    )
    nodes = [step.costs[slot.part].nodes[slot.node] for slot in slots]
    return Communication(
        list(slots), nodes, Collective(whole[0].astype(np.int64), whole[1].astype(np.int64), *whole[2:]), sends
    )


def _mean(stage: np.ndarray, took_us: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """The mean time of what each stage sends."""
    count = np.bincount(stage, minlength=len(otherwise))
    return np.where(count > 0, np.bincount(stage, took_us, len(otherwise)) / np.maximum(count, 1), otherwise)


def _slowed(usual: Step, said: Communication, pace: np.ndarray) -> list[Costs]:
    factors = [np.ones(len(costs.nodes)) for costs in usual.costs]
    for slot, times in zip(said.slots, pace.tolist(), strict=True):
        factors[slot.part][slot.node] = times
    return [longer(costs, factor) for costs, factor in zip(usual.costs, factors, strict=True)]
