"""Ways to place rollout and training on GPUs, and the quickest of them that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets.clusters import Cluster
from ...datasets.devices import Device
from ..question.canonical import RequestError
from ..question.plan import PlanError
from ..serving.engines import load_serving_engine
from ..serving.kv import KvError
from ..serving.kv_memory import usual_fraction
from ..serving.policies import policy_of
from .answer import PostTrainWay
from .groups import GpuGroups, apart, beside, cluster_of, colocated, spaced, splits
from .lengths import MicroBatches, batch_of, data_ranks, micro_batches
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
from .rollout import CHUNK, GRAPHS, BatchRollout, RolloutReplicas, roll_out, rollout_of
from .schedule import iteration_times
from .sync import WeightSync, weight_sync

if TYPE_CHECKING:
    from ..engines.bench import Bench

CANNOT = (RequestError, PlanError, KvError)


@dataclass(frozen=True)
class PlacedRun:
    """A way to place post-training, with its phases of a first batch."""

    groups: GpuGroups
    device: Device
    asynchronous: bool
    parts: TrainingParts
    micro: MicroBatches
    rollout: RolloutReplicas | None
    first: BatchRollout | None
    sync: WeightSync | None
    phases: tuple[Phase, ...]
    memory: tuple[PhaseMemory, ...]

    @property
    def rollout_s(self) -> float:
        """Seconds of rollout."""
        return sum(phase.seconds for phase in self.phases if phase.name == ROLL)

    @property
    def training_s(self) -> float:
        """Seconds of all phases but rollout and weight sync."""
        return sum(phase.seconds for phase in self.phases if phase.name not in (ROLL, SYNC))

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration whose batches are all alike."""
        sync_s = 0.0 if self.sync is None else self.sync.seconds
        one, other = (np.array([[seconds]]) for seconds in (self.rollout_s, self.training_s))
        return float(iteration_times(one, other, sync_s, self.asynchronous).iteration_s[0, 0])

    @property
    def fits(self) -> bool:
        """Whether each phase fits into the memory of a GPU."""
        return all(memory.fits for memory in self.memory)


class PlacementTrial:
    """Places post-training in several ways: what two ways have in common is simulated once."""

    def __init__(self, request: PostTrainRequest, bench: Bench) -> None:
        self.request, self.bench = request, bench
        self.batches = [batch_of(request, index) for index in range(request.batches)]
        self._parts: dict[int, tuple[TrainingParts, MicroBatches]] = {}
        self._replicas: dict[float, RolloutReplicas] = {}
        self._rollouts: dict[tuple[int, float], BatchRollout] = {}

    def place_on(self, groups: GpuGroups, asynchronous: bool) -> PlacedRun:
        """Post-training on such groups. The errors of a step, KvError, RequestError for what does not divide."""
        request = self.request
        device = self.bench.device(request.step.device, groups.training)
        parts, micro = self.parts(groups.training)
        if not request.rolls_out:
            memory = memory_of(request, parts, groups, device, 0.0)
            phases = phases_of(request, parts, groups, device, 0.0, None, None)
            return PlacedRun(groups, device, False, parts, micro, None, None, None, phases, memory)
        resident = 0.0
        if groups.colocated and not offloads(request, groups):
            resident = (state_gib(parts) + frozen_gib(request, parts)) / device.memory_gib
        rollout, first = self.first_rollout(groups, resident)
        sync = weight_sync(request, parts.actor, groups, self.bench)
        phases = phases_of(request, parts, groups, device, first.seconds, first.gpu_w, sync)
        memory = memory_of(request, parts, groups, device, engine_share(rollout, device))
        return PlacedRun(groups, device, asynchronous, parts, micro, rollout, first, sync, phases, memory)

    def parts(self, cluster: Cluster) -> tuple[TrainingParts, MicroBatches]:
        """Optimizer steps on so many GPUs, and their micro-batches."""
        if cluster.devices not in self._parts:
            request, step = self.request, self.request.step
            micro = micro_batches(request, self.batches, cluster.devices)
            sequences = micro.micro_batch * micro.count * data_ranks(request, cluster.devices)
            work = replace(step.work, seq_len=micro.seq_len, micro_batch=micro.micro_batch, global_batch=sequences)
            optimizer_step = replace(step, cluster=cluster, work=work)

            def trained(model: Any) -> Any:
                return self.bench.simulate(replace(optimizer_step, model=model))

            actor = trained(step.model)
            critic = None
            if request.method == "ppo":
                critic = actor if request.critic is None else trained(request.critic)
            reward = trained(request.reward.model) if request.reward.model is not None else None
            share = 1.0
            if request.log_prob_micro_batch is not None:
                forward = micro_batches(request, self.batches, cluster.devices, request.log_prob_micro_batch)
                share = forward.tokens / micro.tokens
            self._parts[cluster.devices] = TrainingParts(actor, critic, reward, share), micro
        return self._parts[cluster.devices]

    def first_rollout(self, groups: GpuGroups, resident_share: float) -> tuple[RolloutReplicas, BatchRollout]:
        """The rollout of a first batch on so many GPUs."""
        if resident_share not in self._replicas:
            self._replicas[resident_share] = rollout_of(self.request, groups, self.bench, resident_share)
        served = self._replicas[resident_share]
        rollout = replace(served, replicas=groups.rollout_gpus // served.replica.devices)
        key = rollout.replicas, resident_share
        if key not in self._rollouts:
            self._rollouts[key] = roll_out(rollout, self.request, self.batches[:1])[0]
        return rollout, self._rollouts[key]


def engine_share(rollout: RolloutReplicas, device: Device) -> float:
    """The share of a GPU's memory that an engine takes."""
    fraction = (
        rollout.request.kv.fraction
        or load_serving_engine(policy_of(rollout.request.scheduler.policy).framework).kv.fraction
    )
    return fraction or usual_fraction(device.memory_gib, CHUNK, GRAPHS, rollout.replica.devices)


def best_way(trial: PlacementTrial) -> tuple[PlacedRun, tuple[PostTrainWay, ...]]:
    """The way that is asked for, or the quickest that fits of those searched, and all that were tried."""
    request = trial.request
    if request.placement == "colocated":
        return trial.place_on(colocated(request), False), ()
    runs: dict[tuple[int, bool], PlacedRun | PostTrainWay] = {}

    def try_split(gpus: int) -> PlacedRun | None:
        """The better of the ways with so many GPUs for rollout; 0: colocated."""
        modes = [False] if not gpus else [True] if request.asynchronous else [False]
        if gpus and request.placement == "search":
            modes = [False, True]
        for mode in modes:
            try:
                runs[gpus, mode] = trial.place_on(apart(request, gpus) if gpus else colocated(request), mode)
            except CANNOT as error:
                if request.rollout.gpus is not None:
                    raise
                runs[gpus, mode] = _impossible(request, gpus, mode, str(error))
        return _best(run for (count, _), run in runs.items() if count == gpus)

    if request.placement == "search" and request.rollout.gpus is None:
        try_split(0)
    counts = splits(request)
    runs_by_gpus = {gpus: try_split(gpus) for gpus in spaced(counts)}
    possible = {gpus: run for gpus, run in runs_by_gpus.items() if run is not None}
    while possible:  # towards the numbers beside the best, until none of them is better
        best = min(possible, key=lambda gpus: (not possible[gpus].fits, possible[gpus].iteration_s))
        new = [gpus for gpus in beside(counts, best) if gpus not in runs_by_gpus]
        if not new:
            break
        runs_by_gpus |= {gpus: try_split(gpus) for gpus in new}
        possible = {gpus: run for gpus, run in runs_by_gpus.items() if run is not None}
    chosen = _best(runs.values())
    if chosen is None:
        raise RequestError(next(run.why_not for run in runs.values() if isinstance(run, PostTrainWay)))
    ways = tuple(run if isinstance(run, PostTrainWay) else _way(run) for _, run in sorted(runs.items()))
    return chosen, ways


def _best(runs: Iterator[PlacedRun | PostTrainWay] | Sequence[PlacedRun | PostTrainWay] | Any) -> PlacedRun | None:
    """The quickest of those that fit, else of all that run."""
    possible = [run for run in runs if isinstance(run, PlacedRun)]
    return min(possible, key=lambda run: (not run.fits, run.iteration_s), default=None)


def _way(run: PlacedRun) -> PostTrainWay:
    groups = run.groups
    return PostTrainWay(
        "colocated" if groups.colocated else "apart",
        groups.rollout_gpus,
        groups.training.devices,
        run.asynchronous,
        run.iteration_s,
        run.rollout_s,
        run.training_s,
        run.fits,
    )


def _impossible(request: PostTrainRequest, gpus: int, asynchronous: bool, why: str) -> PostTrainWay:
    devices = cluster_of(request).devices
    groups = ("apart", gpus, devices - gpus) if gpus else ("colocated", devices, devices)
    return PostTrainWay(*groups, asynchronous, None, None, None, False, why)
