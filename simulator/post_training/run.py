"""From a request about post-training to its report: ways to place it, the phases of each, and the lives of the best."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ...datasets.clusters import Cluster
from ...datasets.devices import Device
from ..job.answer import spread_of
from ..question.canonical import RequestError
from ..question.plan import PlanError
from ..question.predictions import PredictRequest
from ..question.requests import SimulateRequest
from ..question.work import COVERAGE
from ..report.answer import OpPrediction, StepReport
from ..report.distribution import factors
from ..serving.bench import ServingBench
from ..serving.engines import load_serving_engine
from ..serving.figures import Z90
from ..serving.kv import KvError
from ..serving.kv_memory import usual_fraction
from ..serving.policies import policy_of
from .answer import PostTrainReport, PostTrainWay, RolloutFigures
from .groups import GpuGroups, apart, beside, cluster_of, colocated, spaced, splits
from .lengths import LengthBatch, MicroBatches, data_ranks, drawn_batch, micro_batches
from .phases import (
    ROLL,
    SYNC,
    Phase,
    PhaseMemory,
    TrainingParts,
    frozen_gib,
    memory_of,
    offloads,
    phases_of,
    state_gib,
)
from .request import PostTrainRequest
from .rollout import CHUNK, GRAPHS, RolledOut, Rollout, played, rollout_of
from .schedule import idle_shares, iteration_times, timeline
from .sync import WeightSync, weight_sync

LIVED = 64  # iterations of a life that are drawn; all of a run are as these are in the mean
POINTS = 60  # of the curve of responses that run
CANNOT = (RequestError, PlanError, KvError)


class Answering(ServingBench, Protocol):
    """What is asked of a workbench."""

    def simulate(self, request: SimulateRequest) -> Any:
        """The report of a step."""

    def predict(self, request: PredictRequest) -> list[OpPrediction]:
        """The predictions of collectives."""


@dataclass(frozen=True)
class PlacedRun:
    """A way to place post-training, with its phases of a first batch."""

    groups: GpuGroups
    asynchronous: bool
    parts: TrainingParts
    micro: MicroBatches
    rollout: Rollout | None
    rolled: RolledOut | None
    sync: WeightSync | None
    phases: tuple[Phase, ...]
    memory: tuple[PhaseMemory, ...]

    @property
    def rollout_s(self) -> float:
        """Seconds of rollout."""
        return sum(phase.seconds for phase in self.phases if phase.name == ROLL)

    @property
    def trained_s(self) -> float:
        """Seconds of all phases but rollout and weight sync."""
        return sum(phase.seconds for phase in self.phases if phase.name not in (ROLL, SYNC))

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration whose batches are all alike."""
        sync_s = 0.0 if self.sync is None else self.sync.seconds
        one, other = (np.array([[seconds]]) for seconds in (self.rollout_s, self.trained_s))
        return float(iteration_times(one, other, sync_s, self.asynchronous).iteration_s[0, 0])

    @property
    def fits(self) -> bool:
        """Whether each phase fits into the memory of a GPU."""
        return all(memory.fits for memory in self.memory)


class PlacementTrial:
    """Places post-training in several ways: what two ways have in common is simulated once."""

    def __init__(self, request: PostTrainRequest, bench: Answering) -> None:
        self.request, self.bench = request, bench
        self.batches = [drawn_batch(request, place) for place in range(request.batches)]
        self._parts: dict[int, tuple[TrainingParts, MicroBatches]] = {}
        self._rolled: dict[tuple[int, float], tuple[Rollout, RolledOut]] = {}

    def placed(self, groups: GpuGroups, asynchronous: bool) -> PlacedRun:
        """Post-training on such groups. The errors of a step, KvError, RequestError for what does not divide."""
        request = self.request
        device = self.bench.device(request.step.device, groups.training)
        parts, micro = self.parts(groups.training)
        if not request.rolls_out:
            memory = memory_of(request, parts, groups, device, 0.0)
            phases = phases_of(request, parts, groups, device, 0.0, None)
            return PlacedRun(groups, False, parts, micro, None, None, None, phases, memory)
        resident = 0.0
        if groups.colocated and not offloads(request, groups):
            resident = (state_gib(parts) + frozen_gib(request, parts)) / device.memory_gib
        rollout, rolled = self.rolled(groups, resident)
        sync = weight_sync(request, parts.actor, groups, self.bench)
        phases = phases_of(request, parts, groups, device, rolled.seconds, sync)
        memory = memory_of(request, parts, groups, device, engine_share(rollout, device))
        return PlacedRun(groups, asynchronous, parts, micro, rollout, rolled, sync, phases, memory)

    def parts(self, cluster: Cluster) -> tuple[TrainingParts, MicroBatches]:
        """Optimizer steps on so many GPUs, and their micro-batches."""
        if cluster.devices not in self._parts:
            request, step = self.request, self.request.step
            micro = micro_batches(request, self.batches, cluster.devices)
            sequences = micro.micro_batch * micro.count * data_ranks(request, cluster.devices)
            work = replace(step.work, seq_len=micro.seq_len, micro_batch=micro.micro_batch, global_batch=sequences)
            trained = replace(step, cluster=cluster, work=work)
            actor: StepReport = self.bench.simulate(trained)
            critic = reward = None
            if request.method == "ppo":
                critic = actor if request.critic is None else self.bench.simulate(replace(trained, model=request.critic))
            if request.reward.model is not None:
                reward = self.bench.simulate(replace(trained, model=request.reward.model))
            self._parts[cluster.devices] = TrainingParts(actor, critic, reward), micro
        return self._parts[cluster.devices]

    def rolled(self, groups: GpuGroups, resident_share: float) -> tuple[Rollout, RolledOut]:
        """The rollout of a first batch on so many GPUs."""
        key = groups.rollout_gpus, round(resident_share, 3)
        if key not in self._rolled:
            rollout = rollout_of(self.request, groups, self.bench, resident_share)
            self._rolled[key] = rollout, played(rollout, self.request, self.batches[:1])[0]
        return self._rolled[key]


def engine_share(rollout: Rollout, device: Device) -> float:
    """The share of a GPU's memory that an engine takes."""
    own = rollout.request.kv.fraction or load_serving_engine(
        policy_of(rollout.request.scheduler.policy).framework
    ).kv.fraction
    return own or usual_fraction(device.memory_gib, CHUNK, GRAPHS, rollout.replica.devices)


def post_train(request: PostTrainRequest, bench: Answering) -> PostTrainReport:
    """The report of post-training. RequestError for what cannot be, KvError, and the errors of a step."""
    started = time.perf_counter()
    trial = PlacementTrial(request, bench)
    best, ways = best_way(trial)
    report = report_of(trial, best, ways)
    return replace(report, wall_time_s=time.perf_counter() - started)


def best_way(trial: PlacementTrial) -> tuple[PlacedRun, tuple[PostTrainWay, ...]]:
    """The way that is asked for, or the quickest that fits of those searched, and all that were tried."""
    request = trial.request
    if request.placement == "colocated":
        return trial.placed(colocated(request), False), ()
    runs: dict[tuple[int, bool], PlacedRun | PostTrainWay] = {}

    def tried(gpus: int) -> PlacedRun | None:
        """The better of the ways with so many GPUs for rollout; 0: colocated."""
        modes = [False] if not gpus else [True] if request.asynchronous else [False]
        if gpus and request.placement == "search":
            modes = [False, True]
        for mode in modes:
            try:
                runs[gpus, mode] = trial.placed(apart(request, gpus) if gpus else colocated(request), mode)
            except CANNOT as error:
                if request.rollout.gpus is not None:
                    raise
                runs[gpus, mode] = _failed(request, gpus, mode, str(error))
        return _best(run for (count, _), run in runs.items() if count == gpus)

    if request.placement == "search" and request.rollout.gpus is None:
        tried(0)
    counts = splits(request)
    few = {gpus: tried(gpus) for gpus in spaced(counts)}
    able = {gpus: run for gpus, run in few.items() if run is not None}
    while able:  # towards the numbers beside the best, until none of them is better
        best = min(able, key=lambda gpus: (not able[gpus].fits, able[gpus].iteration_s))
        new = [gpus for gpus in beside(counts, best) if gpus not in few]
        if not new:
            break
        few |= {gpus: tried(gpus) for gpus in new}
        able = {gpus: run for gpus, run in few.items() if run is not None}
    chosen = _best(runs.values())
    if chosen is None:
        raise RequestError(next(run.why_not for run in runs.values() if isinstance(run, PostTrainWay)))
    ways = tuple(run if isinstance(run, PostTrainWay) else _way(run) for _, run in sorted(runs.items()))
    return chosen, ways


def _best(runs: Iterator[PlacedRun | PostTrainWay] | Sequence[PlacedRun | PostTrainWay] | Any) -> PlacedRun | None:
    """The quickest of those that fit, else of all that run."""
    able = [run for run in runs if isinstance(run, PlacedRun)]
    return min(able, key=lambda run: (not run.fits, run.iteration_s), default=None)


def _way(run: PlacedRun) -> PostTrainWay:
    groups = run.groups
    return PostTrainWay(
        "colocated" if groups.colocated else "apart",
        groups.rollout_gpus,
        groups.training.devices,
        run.asynchronous,
        run.iteration_s,
        run.rollout_s,
        run.trained_s,
        run.fits,
    )


def _failed(request: PostTrainRequest, gpus: int, asynchronous: bool, why: str) -> PostTrainWay:
    devices = cluster_of(request).devices
    place = ("apart", gpus, devices - gpus) if gpus else ("colocated", devices, devices)
    return PostTrainWay(*place, asynchronous, None, None, None, False, why)


@dataclass(frozen=True)
class LivedRun:
    """Lives of a run: seconds of iterations [lives, iterations] and of the start [lives], and tokens of each."""

    iteration_s: np.ndarray
    begin_s: np.ndarray
    tokens: np.ndarray


def lived(request: PostTrainRequest, run: PlacedRun, rolled: Sequence[RolledOut], batches: Sequence[LengthBatch]) -> LivedRun:
    """Lives of a run. In each, steps and iterations of the engine are slower or faster than expected by a factor each,
    and batches come by chance."""
    random = np.random.default_rng([request.seed, 1 << 20])
    count = min(request.iterations, LIVED)
    which = random.integers(0, len(batches), (request.lives, count))
    z = random.standard_normal((2, request.lives))
    actor = run.parts.actor
    slower = factors(z[0], actor.step_time_s, actor.low_s, actor.high_s, actor.coverage)
    tokens = np.array([batch.tokens for batch in batches], float)
    more = (tokens / tokens.mean())[which]
    trained = np.zeros(which.shape)
    for phase in run.phases:
        if phase.name not in (ROLL, SYNC):
            seconds = phase.seconds * (slower[:, None] if phase.simulated else 1.0)
            trained += seconds * more if phase.by_tokens else seconds
    rollout_s = np.zeros(which.shape)
    if run.rollout is not None and rolled:
        ends = np.array([batch.seconds for batch in rolled])
        rollout_s = ends[which] * engine_factors(request, run.rollout, rolled[0], z[1])[:, None]
    sync_s = 0.0 if run.sync is None else run.sync.seconds
    times = iteration_times(rollout_s, trained, sync_s, run.asynchronous)
    return LivedRun(times.iteration_s, times.begin_s, tokens[which])


def engine_factors(request: PostTrainRequest, rollout: Rollout, usual: RolledOut, z: np.ndarray) -> np.ndarray:
    """How many times as long as expected a rollout takes in each life [lives]: the first batch once more, with
    iterations at both ends of their interval."""
    if rollout.replica.figures is None:
        return np.ones(len(z))
    first = [drawn_batch(request, 0)]
    fast, slow = (played(rollout.at(side), request, first)[0].seconds for side in (-Z90, Z90))
    return factors(z, usual.seconds, min(fast, usual.seconds), max(slow, usual.seconds), COVERAGE)


def report_of(trial: PlacementTrial, run: PlacedRun, ways: tuple[PostTrainWay, ...]) -> PostTrainReport:
    """What all lives of a way say."""
    request, groups = trial.request, run.groups
    rolled: list[RolledOut] = []
    batches = trial.batches
    phases = run.phases
    if run.rollout is not None and run.rolled is not None:
        rolled = played(run.rollout, request, trial.batches) if request.partial else [
            run.rolled, *played(run.rollout, request, trial.batches[1:])
        ]
        batches = [each.batch for each in rolled]
        mean_s = float(np.mean([each.seconds for each in rolled]))
        phases = tuple(replace(phase, seconds=mean_s) if phase.name == ROLL else phase for phase in phases)
        run = replace(run, phases=phases)
    lives = lived(request, run, rolled, batches)
    hours = (lives.iteration_s.mean(axis=1) * request.iterations + lives.begin_s) / 3600.0
    price = request.step.price_per_gpu_hour
    price = cluster_of(request).price_per_device_hour if price is None else price
    actor = run.parts.actor
    return PostTrainReport(
        model=actor.model,
        method=request.method,
        device=actor.device,
        gpus=groups.gpus,
        training_gpus=groups.training.devices,
        rollout_gpus=groups.rollout_gpus,
        placement="colocated" if groups.colocated else "apart",
        asynchronous=run.asynchronous,
        layout=tuple(actor.degrees()),
        prompts=request.prompts,
        responses=request.responses_of_prompt,
        tokens=float(np.mean([batch.tokens for batch in batches])),
        optimizer_steps=request.optimizer_steps,
        micro_batches=run.micro,
        iterations=request.iterations,
        iteration_s=spread_of(lives.iteration_s.ravel()),
        hours=spread_of(hours),
        gpu_hours=spread_of(hours * groups.gpus),
        cost=spread_of(hours * groups.gpus * price) if price else None,
        tokens_per_s_per_gpu=spread_of((lives.tokens / lives.iteration_s).ravel() / groups.gpus),
        phases=phases,
        idle=idle_shares(phases, run.iteration_s),
        rollout=figures_of(run.rollout, rolled, request) if run.rollout is not None else None,
        sync=run.sync,
        memory=run.memory,
        fits=run.fits,
        ways=ways,
        lives=request.lives,
        seed=request.seed,
        notes=tuple(notes_of(request, run)),
        wall_time_s=0.0,
        timeline=timeline(phases, run.asynchronous),
        running=running(rolled[0]) if rolled else (),
    )


def figures_of(rollout: Rollout, rolled: Sequence[RolledOut], request: PostTrainRequest) -> RolloutFigures:
    """The mean of the batches."""
    own = request.rollout
    degrees = [f"{name.upper()} {getattr(own, name)}" for name in ("tp", "pp", "ep") if getattr(own, name) > 1]
    responses = np.concatenate([each.batch.response for each in rolled])
    gpus = rollout.replicas * rollout.replica.devices
    rates = [each.batch.response.sum() / each.seconds / gpus for each in rolled]
    return RolloutFigures(
        rollout.replicas,
        ", ".join(degrees),
        own.engine,
        float(responses.mean()),
        int(responses.max()),
        float(np.mean(rates)),
        float(np.mean([each.tail_share for each in rolled])),
        float(np.mean([each.at_work_share for each in rolled])),
        max(each.kv_peak for each in rolled),
        float(np.mean([each.preemptions for each in rolled])),
        float(np.mean([each.carried for each in rolled])),
    )


def running(rolled: RolledOut) -> tuple[tuple[float, float], ...]:
    """(seconds, share of the responses that still run) of a batch."""
    at = np.linspace(0.0, rolled.seconds, POINTS)
    share = 1.0 - np.searchsorted(rolled.ends_s, at, side="left") / len(rolled.ends_s)
    return tuple(zip(at.tolist(), share.tolist(), strict=True))


def notes_of(request: PostTrainRequest, run: PlacedRun) -> list[str]:
    """What the answer leaves out, and what does not fit."""
    notes = [
        f"{memory.name} DOES NOT FIT: it needs {memory.needed_gib:.1f} of {memory.total_gib:.1f} GiB of a GPU"
        for memory in run.memory
        if not memory.fits
    ]
    if request.rolls_out:
        notes += [] if run.rollout is None else list(run.rollout.replica.notes)
        if request.step.work.lora_rank:
            notes.append("the engine rolls out as with merged weights: what adapters add to its kernels is left out")
        if request.reward.model is None and not request.reward.seconds:
            notes.append("rewards take no time: give reward.seconds, or reward.model")
        if run.groups.colocated:
            notes.append("an engine that wakes allocates its KV memory at no cost, and its CUDA graphs stay")
    if run.sync is not None:
        notes.append(f"weight sync: {run.sync.size_bytes / 1e9:,.3g} GB over the network; load time of the engine is left out")
    return notes


