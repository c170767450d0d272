"""Phases in time: what an iteration takes, and what each group of GPUs does when.

Synchronous: a batch is rolled out, trained on, and the weights are sent; then comes the next. One step off (veRL's
one-step-off-policy trainer): as soon as a batch is rolled out and the one before is trained on, weights are sent, the
next batch is rolled out, and meanwhile this one is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .groups import ALL, ROLLOUT, TRAINING
from .phases import ROLL, SYNC, Phase

SHOWN = 3  # iterations of the timeline


@dataclass(frozen=True)
class PhaseSpan:
    """A phase of a batch on a group of GPUs, in seconds from the start of the run."""

    group: str
    name: str
    batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class IterationTimes:
    """Seconds of each iteration [lives, iterations] and until the first begins to be trained on [lives]."""

    iteration_s: np.ndarray
    begin_s: np.ndarray


def iteration_times(rollout_s: np.ndarray, training_s: np.ndarray, sync_s: float, asynchronous: bool) -> IterationTimes:
    """What iterations take whose rollout and training are so long [lives, iterations]."""
    if not asynchronous:
        return IterationTimes(rollout_s + training_s + sync_s, np.zeros(len(rollout_s)))
    following = np.roll(rollout_s, -1, axis=1)  # of the next batch, which is rolled out meanwhile
    return IterationTimes(np.maximum(following, training_s) + sync_s, rollout_s[:, 0])


def timeline(phases: Sequence[Phase], asynchronous: bool, iterations: int = SHOWN) -> tuple[PhaseSpan, ...]:
    """The first iterations, phase by phase."""
    rollout = [phase for phase in phases if phase.name == ROLL]
    syncs = [phase for phase in phases if phase.name == SYNC]
    if not asynchronous:
        spans: list[PhaseSpan] = []
        for batch in range(iterations):
            spans += _in_a_row(phases, batch, spans[-1].end_s if spans else 0.0)
        return tuple(spans)
    training = [phase for phase in phases if phase.name not in (ROLL, SYNC)]
    spans = _in_a_row(rollout, 0, 0.0)
    rolled_s, trained_s = spans[-1].end_s, 0.0
    for batch in range(iterations):
        spans += (sync := _in_a_row(syncs, batch, max(rolled_s, trained_s)))
        begin_s = sync[-1].end_s
        spans += (trained_on := _in_a_row(training, batch, begin_s))
        trained_s = trained_on[-1].end_s
        if batch + 1 < iterations:
            spans += (next_rollout := _in_a_row(rollout, batch + 1, begin_s))
            rolled_s = next_rollout[-1].end_s
    return tuple(spans)


def _in_a_row(phases: Sequence[Phase], batch: int, begin_s: float) -> list[PhaseSpan]:
    """Phases of a batch one after the other."""
    ends = begin_s + np.cumsum([phase.seconds for phase in phases])
    starts = [begin_s, *ends[:-1].tolist()]
    return [
        PhaseSpan(phase.group, phase.name, batch, start, end)
        for phase, start, end in zip(phases, starts, ends.tolist(), strict=True)
    ]


def idle_shares(phases: Sequence[Phase], iteration_s: float) -> dict[str, float]:
    """Share of an iteration in which each group waits for the other; none where all GPUs take turns."""
    groups = {phase.group for phase in phases}
    if groups == {ALL} or not iteration_s:
        return {}
    busy = {
        group: sum(phase.seconds for phase in phases if phase.group in (group, ALL)) for group in (ROLLOUT, TRAINING)
    }
    return {group: max(1.0 - seconds / iteration_s, 0.0) for group, seconds in busy.items()}
