"""A job in steps: its phases with the time of a step in each, and its timeline between checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..question.canonical import RequestError
from .request import BatchRamp, JobPhase

MOST_CHECKPOINTS = 1_000_000
MOST_TRAINED = 10**18  # tokens of a job: 64 bits hold them; some 10,000 times the largest known job (judged)


@dataclass(frozen=True)
class PhaseSteps:
    """A part of a job in which all steps are alike: ``steps`` of ``sequences`` of ``seq_len`` tokens.

    ``step_s`` is the time of one; 0 until it is known.
    """

    steps: int
    seq_len: int
    sequences: int
    step_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of the phase."""
        return self.steps * self.seq_len * self.sequences


@dataclass(frozen=True)
class JobTimeline:
    """A job that nothing interrupts, at its start (0), at each checkpoint and at its end: arrays [n + 1].

    ``steps_s`` are seconds of steps until then, ``other_s`` those of evaluations and of waiting for checkpoints, the
    one at this place included; ``evaluation_s`` those of all evaluations. ``durable_s`` after that a checkpoint can be
    read.
    """

    steps: np.ndarray
    tokens: np.ndarray
    steps_s: np.ndarray
    other_s: np.ndarray
    durable_s: float
    evaluation_s: float = 0.0

    @property
    def waits_s(self) -> float:
        """Seconds in which all steps wait for checkpoints, the last one until it can be read."""
        return float(self.other_s[-1]) - self.evaluation_s + self.durable_s

    @property
    def checkpoints(self) -> int:
        """How many are written; the last one at the end."""
        return len(self.steps) - 1

    @property
    def undisturbed_s(self) -> float:
        """Seconds of a life without interruptions whose steps take what they are expected to."""
        return float(self.steps_s[-1] + self.other_s[-1] + self.durable_s)


def phase_steps(
    phases: Sequence[JobPhase], ramp: BatchRamp, tokens: float | None, steps: int | None, seq_len: int, sequences: int
) -> tuple[PhaseSteps, ...]:
    """The phases of a job, none of them timed. A phase has whole steps: the last one of each is full.

    RequestError for phases that are longer than the job, for a ramp that does not lead to the batch, and for more
    tokens than are counted.
    """
    timed = _phases(phases, ramp, tokens, steps, seq_len, sequences)
    longest = max(timed, key=lambda phase: phase.tokens)
    if sum(phase.tokens for phase in timed) > MOST_TRAINED:
        raise RequestError(
            f"steps={longest.steps:,} of {longest.seq_len * longest.sequences:,} tokens are too long a job: "
            f"at most {MOST_TRAINED:.0e} tokens are counted; take fewer steps or tokens"
        )
    return timed


def _phases(
    phases: Sequence[JobPhase], ramp: BatchRamp, tokens: float | None, steps: int | None, seq_len: int, sequences: int
) -> tuple[PhaseSteps, ...]:
    """The phases of a job, however long."""
    if ramp.start:
        return _ramped(ramp, tokens, steps, seq_len, sequences)
    timed: list[PhaseSteps] = []
    for phase in phases or (JobPhase(),):
        length, batch = phase.seq_len or seq_len, phase.global_batch or sequences
        count = phase.steps if phase.tokens is None else _steps(phase.tokens, length * batch)
        timed.append(PhaseSteps(count or 0, length, batch))
    open_at = next((at for at, phase in enumerate(timed) if not phase.steps), None)
    if open_at is not None:
        timed[open_at] = _rest(timed, open_at, tokens, steps)
    return tuple(timed)


def _steps(tokens: float, tokens_a_step: int) -> int:
    """Whole steps for so many tokens."""
    return max(-int(-tokens // tokens_a_step), 1)


def _rest(timed: Sequence[PhaseSteps], at: int, tokens: float | None, steps: int | None) -> PhaseSteps:
    """The phase that is what the others leave."""
    others = [phase for index, phase in enumerate(timed) if index != at]
    a_step = timed[at].seq_len * timed[at].sequences
    if tokens is not None:
        remaining = tokens - sum(phase.tokens for phase in others)
        if remaining <= 0:
            raise RequestError(f"tokens={tokens:g} is not more than the phases that say how long they are")
        return replace(timed[at], steps=_steps(remaining, a_step))
    left_steps = (steps or 0) - sum(phase.steps for phase in others)
    if left_steps <= 0:
        raise RequestError(f"steps={steps} is not more than the phases that say how long they are")
    return replace(timed[at], steps=left_steps)


def _ramped(
    ramp: BatchRamp, tokens: float | None, steps: int | None, seq_len: int, sequences: int
) -> tuple[PhaseSteps, ...]:
    """A batch that grows by equal increments after equal numbers of sequences (Megatron-LM's ``RampupBatchsize``)."""
    levels, odd = divmod(sequences - ramp.start, ramp.increment)
    if levels <= 0 or odd:
        raise RequestError(
            f"ramp.start={ramp.start} with ramp.increment={ramp.increment} does not lead to the batch of {sequences}"
        )
    timed = []
    for level in range(levels):
        batch = ramp.start + level * ramp.increment
        timed.append(PhaseSteps(_steps(ramp.sequences / levels, batch), seq_len, batch))
    timed.append(PhaseSteps(0, seq_len, sequences))
    timed[-1] = _rest(timed, len(timed) - 1, tokens, steps)
    return tuple(timed)


def timeline(
    phases: Sequence[PhaseSteps],
    interval: int | float,
    in_seconds: bool,
    blocking_s: float,
    durable_s: float,
    evaluation_every: int = 0,
    evaluation_s: float = 0.0,
    most: int = MOST_CHECKPOINTS,
) -> JobTimeline:
    """A job with a checkpoint every ``interval`` steps, or seconds of steps, and one at its end.

    Training waits ``blocking_s`` for each; ``durable_s`` later it can be read. A checkpoint that is not durable when
    the next one is due holds that up. RequestError for more checkpoints than ``most``.
    """
    ends = np.cumsum([0, *(phase.steps for phase in phases)])
    ends_s = np.cumsum([0.0, *(phase.steps * phase.step_s for phase in phases)])
    ends_tokens = np.cumsum([0, *(phase.tokens for phase in phases)])
    total, total_s = int(ends[-1]), float(ends_s[-1])
    count = (total_s if in_seconds else total) / interval
    if count > most:
        raise RequestError(f"a job with {count:,.0f} checkpoints is not simulated: save less often (checkpoint.*)")
    if in_seconds:
        at = np.unique(np.interp(np.arange(1, int(count) + 1) * interval, ends_s, ends).astype(np.int64))
    else:
        at = np.arange(interval, total, interval, dtype=np.int64)
    at = np.concatenate([[0], at[(at > 0) & (at < total)], [total]])
    steps_s = np.interp(at, ends, ends_s)
    pauses = at // min(evaluation_every, total + 1) if evaluation_every else np.zeros(len(at))
    pauses_s = pauses * evaluation_s
    waits_s = np.full(len(at), blocking_s)
    waits_s[0] = 0.0
    waits_s[2:] += np.maximum(durable_s - np.diff(steps_s + pauses_s)[1:], 0.0)  # of the one before it
    other_s = np.cumsum(waits_s) + pauses_s
    return JobTimeline(at, np.interp(at, ends, ends_tokens), steps_s, other_s, durable_s, float(pauses_s[-1]))
