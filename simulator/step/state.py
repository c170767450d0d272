"""A workload on a cluster as it runs: the one state that everything is read from.

A workload is one kind of step, or several: a generation is a prefill and decode steps whose contexts grow. Of each,
ranks that do the same work are placed once: one data rank and one tensor rank stand for all, and of the chunks of a
pipeline each distinct one is timed. What communication finds on the links (:mod:`..contention`) makes a new state;
reports, pictures and files are read from the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ...datasets.devices import Device
from ..graph import Graph
from ..memory.breakdown import Memory
from ..network.timeline_sharing import SharedTimeline
from ..passes.pipeline import Chunk
from ..question.orders import BACKWARD, FORWARD, INPUT, Orders, parts_of
from ..question.plan import Plan
from ..question.work import Work
from ..timing.costs import Costs
from ..timing.phases import FIRST, LAST, MIDDLE, ONLY, ChunkTimes, PhaseTime, Variant
from ..timing.placement import Sends
from ..timing.schedule.pipeline import PipelineTimes


@dataclass(frozen=True)
class Executed:
    """A phase of a chunk that a stage runs ``times`` times in the whole workload."""

    stage: int
    phase: str
    variant: Variant
    time: PhaseTime
    costs: Costs
    times: float


@dataclass(frozen=True)
class Step:
    """One kind of step (train, prefill, decode), which the workload runs ``times`` times (a mean may be a fraction).

    ``graph`` is one micro-batch on one device before any pass; ``chunks`` are the parts of the model after them, first
    to last, ``times_of`` their times and ``saved_gib`` what a micro-batch keeps in each from forward to backward.
    ``overhead_us`` is time in which no device works; ``shared`` what the links saw, where they were simulated.
    """

    kind: str
    times: float
    graph: Graph
    plan: Plan
    device: Device
    chunks: tuple[Chunk, ...]
    times_of: tuple[ChunkTimes, ...]
    saved_gib: tuple[float, ...]
    orders: Orders
    sends: Sends
    pipeline: PipelineTimes
    overhead_us: float = 0.0
    shared: SharedTimeline | None = None

    @property
    def trains(self) -> bool:
        """Whether it is a training step."""
        return self.kind == "train"

    def parts(self, stage: int) -> list[int]:
        """The parts of the model that a stage holds, by position."""
        return parts_of(self.orders, stage)

    def optimizer_us(self, stage: int) -> float:
        """Microseconds of a stage's optimizer phase."""
        longest_us = 0.0
        for chunk in self.parts(stage):
            phases = self.times_of[chunk].phases
            longest_us += phases[ONLY if ONLY in phases else LAST]["optimizer"].total_us
        return longest_us

    @cached_property
    def total_us(self) -> float:
        """Microseconds of the step.

        Training: the pipeline, then the slowest optimizer. Inference: :func:`stream_us`.
        """
        if self.trains:
            last = max(self.optimizer_us(stage) for stage in range(self.orders.stages))
            return self.pipeline.makespan_us + last + self.overhead_us
        count = self.orders.micro_batches
        stages_us = self.pipeline.busy_us / count
        sends_us = self.sends.onward_us.reshape(self.orders.stages, -1).mean(axis=1)
        return stream_us(stages_us, sends_us, count, self.kind) + self.overhead_us

    @cached_property
    def busiest(self) -> int:
        """The stage that works longest, its optimizer included."""
        optimizer = [self.optimizer_us(stage) for stage in range(self.orders.stages)]
        return int(np.argmax(self.pipeline.busy_us + np.array(optimizer)))

    @property
    def speaking(self) -> Sequence[int]:
        """The stages whose time the step is: of training the busiest, of inference all that a token passes through."""
        return (self.busiest,) if self.trains else range(self.orders.stages)

    def executions(self, stage: int) -> Iterator[Executed]:
        """What a stage runs: every phase of its chunks, first and last micro-batches apart."""
        row = slice(self.orders.offsets[stage], self.orders.offsets[stage + 1])
        kinds, chunks = self.orders.kind[row], self.orders.chunk[row]
        for position, chunk in enumerate(self.parts(stage)):
            times = self.times_of[chunk]
            here = chunks == position
            forwards = int(np.sum(here & (kinds == FORWARD)))
            backwards = int(np.sum(here & ((kinds == BACKWARD) | (kinds == INPUT))))
            if ONLY in times.phases:
                counts = {ONLY: {"forward": forwards, "backward": backwards, "optimizer": int(self.trains)}}
            else:
                counts = {
                    FIRST: {"forward": 1},
                    MIDDLE: {"forward": forwards - 1, "backward": backwards - 1},
                    LAST: {"backward": 1, "optimizer": 1},
                }
            for variant, by_phase in counts.items():
                for phase, count in by_phase.items():
                    if count:
                        time, costs = times.phases[variant][phase], times.costs[variant]
                        yield Executed(stage, phase, variant, time, costs, count * self.times)


def stream_us(stages_us: np.ndarray, sends_us: np.ndarray, micro_batches: int, kind: str) -> float:
    """Microseconds of one step of all micro-batches through the stages and the sends between them [stages].

    The last one leaves a prefill when the slowest stage, or send, has had all of them. Decode steps follow each other:
    a micro-batch begins its next token when it has left the last stage, so that a step takes its own way through all
    stages or, with more micro-batches than that, the slowest stage's time for each.
    """
    slowest, way = float(max(*stages_us, *sends_us)), float(np.sum(stages_us) + np.sum(sends_us))
    if kind == "decode":
        return max(way, micro_batches * slowest)
    return way + (micro_batches - 1) * slowest


@dataclass(frozen=True)
class State:
    """A workload as it runs: its kinds of step, and what each stage needs of its device's memory.

    ``registries`` are the folders of predictors that were asked, for ``backend`` where it was named.
    """

    work: Work
    plan: Plan
    device: Device
    steps: tuple[Step, ...]
    memories: tuple[Memory, ...]
    registries: tuple[Path, ...] = ()
    backend: str | None = None

    @cached_property
    def total_us(self) -> float:
        """Microseconds of the whole workload."""
        return sum(step.total_us * step.times for step in self.steps)

    @cached_property
    def memory(self) -> Memory:
        """Peak memory of the stage that needs most."""
        return max(self.memories, key=lambda memory: memory.peak_gib)

    @property
    def main(self) -> Step:
        """The kind of step that most of the time goes to."""
        return max(self.steps, key=lambda step: step.total_us * step.times)

    def executions(self) -> Iterator[Executed]:
        """What the stages run whose time the workload is."""
        for step in self.steps:
            for stage in step.speaking:
                yield from step.executions(stage)
