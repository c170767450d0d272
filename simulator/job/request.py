"""What is asked of a whole training job, as frozen data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...datasets.loading import check_fields, choice, load
from ..question.canonical import RequestError
from ..question.declaration import setting
from ..question.requests import SimulateRequest, StepQuestion
from ..search.space import Space
from .fleets import PUBLISHED, fleet_names

MOST_LIVES = 1_000_000
LAYOUTS = ("given", "search")
OWN_RATES = ("per_gpu_year", "per_node_year", "per_link_year", "per_job_year")
MOST_SPREAD = 3  # of a logarithm: a factor of 20 each way already says nothing


@dataclass(frozen=True)
class JobPhase:
    """A part of a job with its own sequence length or batch. One phase at most says neither ``tokens`` nor ``steps``:
    it is what the others leave. ``step_time_s`` stands for a step that was measured."""

    tokens: float | None = setting(None, positive=True)
    steps: int | None = setting(None, least=1)
    seq_len: int | None = setting(None, least=1)
    global_batch: int | None = setting(None, least=1)
    step_time_s: float | None = setting(None, positive=True)

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "phases")
        if self.tokens is not None and self.steps is not None:
            raise RequestError("a phase has tokens or steps, not both: leave one out")


@dataclass(frozen=True)
class BatchRamp:
    """A batch that grows, as Megatron-LM's ``--rampup-batch-size START INCREMENT SAMPLES`` says it."""

    start: int = setting(0, "sequences of the first step; 0: no ramp")
    increment: int = setting(0, "sequences that the batch grows by at a time")
    sequences: int = setting(0, "sequences until the batch is full")
    step_time_s: float | None = setting(None, "of the first step where it was measured; null: simulated", positive=True)

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "ramp")
        if self.start and not (self.increment and self.sequences):
            raise RequestError(f"ramp.start={self.start} also needs ramp.increment and ramp.sequences")


@dataclass(frozen=True)
class JobEvaluation:
    """Pauses in which the model is tested."""

    every_steps: int = setting(0, "steps between two; 0: none")
    sequences: int | None = setting(
        None, "that a pause takes through the model's forward pass; null: one batch", least=1
    )
    duration_s: float | None = setting(None, "of a pause, in place of sequences", positive=True)

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "evaluation")


@dataclass(frozen=True)
class JobCheckpoints:
    """What is saved, how often, and how fast. ``*_gbps`` are GB/s of the whole job."""

    every_steps: int | None = setting(
        None, "steps between two; null: by every_minutes, else the best interval", least=1
    )
    every_minutes: float | None = setting(None, "of training between two; null: the best interval", positive=True)
    size_gb: float | None = setting(
        None, "GB of one; null: weights and optimizer of the memory walk, each once", positive=True
    )
    store_gbps: float | None = setting(
        None, "GB/s that the store takes; null: NVIDIA's guideline for so many nodes", positive=True
    )
    read_gbps: float | None = setting(
        None, "GB/s that it gives; null: NVIDIA's guideline, or as store_gbps", positive=True
    )
    asynchronous: bool = setting(False, "true: training waits for the copy to host memory alone")

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "checkpoint")
        if self.every_steps is not None and self.every_minutes is not None:
            raise RequestError("checkpoint.every_steps and checkpoint.every_minutes say the same: leave one out")


@dataclass(frozen=True)
class JobFailures:
    """How often a job is interrupted: as a published fleet was, or at rates of your own."""

    fleet: str = setting(PUBLISHED, f"{' | '.join(fleet_names())} | {PUBLISHED} (their mean) | none")
    per_gpu_year: float | None = setting(None, "your own: interruptions by a GPU in a year; these go before the fleet")
    per_node_year: float | None = setting(None, "your own: by a node, beside its GPUs")
    per_link_year: float | None = setting(None, "your own: by a NIC and its link")
    per_job_year: float | None = setting(None, "your own: by the job itself, whatever its size (software, people)")
    scale: float = setting(1.0, "all rates times this")
    spread: float | None = setting(
        None,
        "how unsure the rate is: standard deviation of its logarithm; null: as published fleets differ, 0 of own",
        most=MOST_SPREAD,
    )

    def __post_init__(self) -> None:
        choice(RequestError, "failures.fleet", self.fleet, (*fleet_names(), PUBLISHED, "none"))
        check_fields(self, RequestError, "failures")

    @property
    def measured(self) -> bool:
        """Whether rates of one's own are given."""
        return any(getattr(self, name) is not None for name in OWN_RATES)


@dataclass(frozen=True)
class JobRestart:
    """From an interruption until the job runs again, beside the time in which it loads its checkpoint."""

    # median time between two tries of automatic restarts on 504 B200, 73 days of logs (technical report of SK Telecom,
    # Upstage, Lablup and others, 2026); 512 B200 of Lambda: under 4 minutes with loading (lambda.ai/blog, Olmo Hybrid)
    minutes: float = setting(11.0, "the median, until the job loads its checkpoint: noticed, replaced, started")
    spread: float = setting(0.5, "standard deviation of the logarithm of these minutes (judged)", most=MOST_SPREAD)
    manual_share: float | None = setting(None, "of interruptions that people look into; null: as in the fleet", most=1)
    manual_hours: float = setting(4.0, "that people take, more than the minutes above (judged)")
    repair_hours: float = setting(24.0, "until a node that was replaced is back as a spare (judged)")
    begin_minutes: float = setting(0.0, "before the first step: data, communicators, compilation")

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "restart")


@dataclass(frozen=True)
class SlowSpells:
    """Nodes that become slow and hold up all others until somebody finds them."""

    per_node_year: float = setting(0.0, "spells of a node in a year; 0: none, because no rate is published")
    slowdown: float = setting(1.2, "times longer that a step takes meanwhile", least=1)
    hours: float = setting(2.0, "until it is found")

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "slow")


@dataclass(frozen=True)
class JobEnergy:
    """What the job draws, and what a kilowatt-hour costs the air."""

    gpu_w: float | None = setting(None, "watts of a GPU while it trains; null: of the simulated step", positive=True)
    node_w: float | None = setting(None, "watts of a node beside its GPUs; null: GPUs alone are counted")
    pue: float = setting(
        1.0, "of the building: all power over that of the machines; 1: cooling is not counted", least=1
    )
    grid_g_per_kwh: float | None = setting(None, "grams of CO2 of a kilowatt-hour; null: no CO2")

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "energy")


@dataclass(frozen=True)
class PlanRequest(StepQuestion):
    """A training job of so many ``tokens`` (or ``steps``) of the ``step``, on its cluster.

    ``phases`` are parts with their own length of sequences or batch, in order. ``layout=search`` takes the best of
    ``space``. ``step_time_s`` stands for a step that was measured: then no step is simulated. ``setbacks`` are what no
    rate of machines explains.
    """

    step: SimulateRequest = field(default_factory=lambda: SimulateRequest(model="llama3_8b"), metadata={"hidden": True})
    space: Space = field(default_factory=Space)
    layout: str = setting("given", "given: that of parallel=…; search: the best of space=…", choices=LAYOUTS)
    tokens: float | None = setting(None, "that the job trains on, such as 15.6e12", positive=True)
    steps: int | None = setting(None, "of the optimizer, in place of tokens", least=1)
    step_time_s: float | None = setting(
        None, "seconds of a step that was measured; null: simulated, with its interval", positive=True
    )
    phases: tuple[JobPhase, ...] = setting(
        (), "parts in order, each with tokens or steps: [{tokens: 1e11, seq_len: 4096}, {seq_len: 8192}]"
    )
    ramp: BatchRamp = field(default_factory=BatchRamp)
    evaluation: JobEvaluation = field(default_factory=JobEvaluation)
    checkpoint: JobCheckpoints = field(default_factory=JobCheckpoints)
    failures: JobFailures = field(default_factory=JobFailures)
    restart: JobRestart = field(default_factory=JobRestart)
    spares: int | None = setting(None, "nodes that stand by and are paid for; null: there is always another node")
    setbacks: float | None = setting(
        None,
        "time that people lose or hold up (losses that diverge, full disks, a cluster that is deleted): the mean "
        "logarithm of what it lengthens a job by; null: as published jobs; 0: a job that is run well",
        most=MOST_SPREAD,
    )
    slow: SlowSpells = field(default_factory=SlowSpells)
    energy: JobEnergy = field(default_factory=JobEnergy)
    lives: int = setting(10_000, "times that the job is lived through", least=1)
    seed: int = setting(0, "of the lives: the same seed has the same answer")

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", phases_of(self.phases))
        check_fields(self, RequestError)
        if self.lives > MOST_LIVES:
            raise RequestError(f"lives={self.lives:,} is more than the {MOST_LIVES:,} that are simulated")
        if self.tokens is not None and self.steps is not None:
            raise RequestError("tokens and steps both say how long the job is: leave one out")
        if self.step.work.kind != "train" or self.step.file is not None:
            raise RequestError(f"workload={self.step.work.kind} is no training job: take workload=train")
        self._check_phases()
        if self.layout == "search" and self.step_time_s is not None:
            raise RequestError("step_time_s is of one layout: leave it or layout=search out")

    def _check_phases(self) -> None:
        """RequestError for a job of no length, and for phases that leave none for one of them, or too much."""
        open_ended = [phase for phase in self.phases if phase.tokens is None and phase.steps is None]
        if self.tokens is None and self.steps is None and (not self.phases or open_ended):
            raise RequestError("a job needs a length: tokens=15.6e12, or steps=100000")
        if len(open_ended) > 1:
            raise RequestError("two phases have neither tokens nor steps: only one can be what the others leave")
        if self.phases and not open_ended and (self.tokens is not None or self.steps is not None):
            raise RequestError("every phase says how long it is: leave tokens and steps out, or open one phase")
        if self.steps is not None and any(phase.tokens is not None for phase in self.phases):
            raise RequestError("steps counts the whole job, but a phase has tokens: count both alike")
        if self.tokens is not None and any(phase.steps is not None for phase in self.phases):
            raise RequestError("tokens counts the whole job, but a phase has steps: count both alike")
        if self.ramp.start and self.phases:
            raise RequestError("ramp and phases both change the batch: write the ramp as phases")
        measured = self.step_time_s is not None
        if self.ramp.start and measured != (self.ramp.step_time_s is not None):
            raise RequestError(
                "a ramp needs both step_time_s and ramp.step_time_s, or neither: then both are simulated"
            )
        if measured and any(
            phase.step_time_s is None and (phase.seq_len or phase.global_batch) for phase in self.phases
        ):
            raise RequestError(
                "step_time_s was measured: give phases with another batch or length their own step_time_s"
            )


def phases_of(values: Sequence[Any]) -> tuple[JobPhase, ...]:
    """Phases that may be plain mappings. RequestError for what is none."""
    if not isinstance(values, (list, tuple)):
        raise RequestError(
            f"phases={values!r} must be a list, such as [{{tokens: 1e11, seq_len: 4096}}, {{seq_len: 8192}}]"
        )
    return tuple(
        value if isinstance(value, JobPhase) else load(JobPhase, value, RequestError, f"phases[{index}]")
        for index, value in enumerate(values)
    )
