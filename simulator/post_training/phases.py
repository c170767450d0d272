"""The phases of an iteration by method and placement, each with its seconds.

Forward passes (log-probs, values, rewards) are the forward part of the training step of that model on the same
micro-batches: its share of the kernels' time, so that the bubbles of a pipeline come with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...datasets.clusters import Cluster
from ...datasets.devices import Device
from ...models import clocks
from ..memory.breakdown import GIB
from ..report.answer import StepReport
from .groups import ALL, ROLLOUT, TRAINING, GpuGroups
from .request import PostTrainRequest
from .sync import WeightSync

ROLL, SYNC = "rollout", "weight sync"
COPIES = "training state to GPUs", "training state to host"
REWARD_MODEL, REWARD_RULES = "reward model", "rewards by rules"
OLD, REFERENCE, VALUES = "old log-probs", "reference log-probs", "values"
SWAP = "swap of reference weights"
CRITIC, TRAIN = "critic training", "training"


@dataclass(frozen=True)
class TrainingParts:
    """Reports of an optimizer step: of the trained model, of the critic and of the reward model where there is one."""

    actor: StepReport
    critic: StepReport | None = None
    reward: StepReport | None = None
    forward_share: float = 1.0  # tokens of forward passes over those of training, padding included

    @property
    def all(self) -> tuple[StepReport, ...]:
        """Those that there are."""
        return tuple(report for report in (self.actor, self.critic, self.reward) if report is not None)


@dataclass(frozen=True)
class Phase:
    """A part of an iteration in which a group of GPUs does one thing.

    ``by_tokens``: it takes longer with more tokens in the batch. ``simulated``: its time is that of a step, and as
    unsure. ``gpu_w`` is what each GPU of the group draws meanwhile; None where nobody knows.
    """

    name: str
    group: str
    seconds: float
    by_tokens: bool = False
    simulated: bool = False
    gpu_w: float | None = None


@dataclass(frozen=True)
class PhaseMemory:
    """GiB of a GPU that a phase needs at its peak, and that there are."""

    name: str
    needed_gib: float
    total_gib: float

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        return self.needed_gib <= self.total_gib


def forward_s(report: StepReport) -> float:
    """Seconds of the forward passes of a training step."""
    by_phase = report.breakdown.by_phase
    kernels_s = sum(by_phase.values())
    return report.step_time_s * by_phase.get("forward", 0.0) / kernels_s if kernels_s else 0.0


def training_phases(
    request: PostTrainRequest, parts: TrainingParts, group: str, pinned_gbps: float, idle_w: float | None = None
) -> list[Phase]:
    """What happens to a batch once it is rolled out, in order. Forward passes draw what their training step does."""
    # optimizer steps' worth of sequences in the batch
    passes = parts.forward_share * request.optimizer_steps / request.epochs
    phases = []

    def simulated(name: str, seconds: float, report: StepReport) -> None:
        watts = request.energy.gpu_w or report.power_w
        phases.append(Phase(name, group, seconds, by_tokens=True, simulated=True, gpu_w=watts))

    if request.rolls_out:
        if parts.reward is not None:
            simulated(REWARD_MODEL, passes * forward_s(parts.reward), parts.reward)
        if request.reward.seconds:
            phases.append(Phase(REWARD_RULES, group, request.reward.seconds, gpu_w=idle_w))
        if request.old_log_probs:
            simulated(OLD, passes * forward_s(parts.actor), parts.actor)
    if request.swap_reference:
        phases.append(Phase(SWAP, group, swap_s(parts, pinned_gbps), gpu_w=idle_w))
    if request.has_reference:
        simulated(REFERENCE, passes * forward_s(parts.actor), parts.actor)
    if parts.critic is not None:
        simulated(VALUES, passes * forward_s(parts.critic), parts.critic)
        simulated(CRITIC, request.optimizer_steps * parts.critic.step_time_s, parts.critic)
    simulated(TRAIN, request.optimizer_steps * parts.actor.step_time_s, parts.actor)
    return phases


def phases_of(
    request: PostTrainRequest,
    parts: TrainingParts,
    groups: GpuGroups,
    device: Device,
    rollout_s: float,
    rollout_w: float | None,
    sync: WeightSync | None,
) -> tuple[Phase, ...]:
    """All phases of an iteration in order: rollout first, weight sync last."""
    group = ALL if groups.colocated else TRAINING
    idle_w = clocks.idle_w(device)
    training = training_phases(request, parts, group, host_gbps(device, groups.training), idle_w)
    if not request.rolls_out or sync is None:
        return tuple(training)
    rollout = [Phase(ROLL, ALL if groups.colocated else ROLLOUT, rollout_s, gpu_w=rollout_w)]
    sync_phase = [Phase(SYNC, ALL, sync.seconds, gpu_w=idle_w)]
    to_gpus, to_host = (Phase(name, group, copy_s(request, parts, groups, device), gpu_w=idle_w) for name in COPIES)
    if offloads(request, groups):
        return (*rollout, to_gpus, *training, *sync_phase, to_host)
    if request.offload_training and not groups.colocated:
        first = next(index for index, phase in enumerate(training) if phase.name in (CRITIC, TRAIN))
        return (*rollout, to_host, *training[:first], to_gpus, *training[first:], *sync_phase)
    return (*rollout, *training, *sync_phase)


def offloads(request: PostTrainRequest, groups: GpuGroups) -> bool:
    """Whether training's state is in host memory while the GPUs roll out."""
    if request.offload_training is not None:
        return request.offload_training and groups.colocated
    return groups.colocated and request.rolls_out


def copy_s(request: PostTrainRequest, parts: TrainingParts, groups: GpuGroups, device: Device) -> float:
    """Seconds of training's state one way. Weights have pinned memory on the host (Megatron-Core,
    ``_ParamAndGradBuffer.offload_to_cpu``), and stay on GPUs that do not roll out."""
    pinned_gbps = host_gbps(device, groups.training)
    optimizer_gib = sum(report.memory.optimizer_gib for report in training_reports(parts))
    weights_gib = state_gib(parts) - optimizer_gib if groups.colocated else 0.0
    optimizer_gbps = request.offload_gbps or pinned_gbps
    return (weights_gib / pinned_gbps + optimizer_gib / optimizer_gbps) * GIB / 1e9


def swap_s(parts: TrainingParts, pinned_gbps: float) -> float:
    """Seconds of copies around log-probs of a reference model that is on the host: trained weights go there, those of
    the reference come, trained ones come back (NeMo-RL, ``use_reference_model``). ``Tensor.to("cpu",
    non_blocking=True)`` takes pinned memory (PyTorch, ``_to_copy``)."""
    return 3.0 * parts.actor.memory.weights_gib * GIB / 1e9 / pinned_gbps


def host_gbps(device: Device, cluster: Cluster) -> float:
    """GB/s between a GPU and the host while all GPUs of a node copy."""
    rates = [rate for rate in (device.pcie_gbps, cluster.host_share_gbps()) if rate]
    return min(rates)


def training_reports(parts: TrainingParts) -> tuple[StepReport, ...]:
    """Reports of models that train."""
    return tuple(report for report in (parts.actor, parts.critic) if report is not None)


def state_gib(parts: TrainingParts) -> float:
    """GiB of a GPU that training keeps between steps: weights and optimizer states of models that train."""
    return sum(report.memory.weights_gib + report.memory.optimizer_gib for report in training_reports(parts))


def frozen_gib(request: PostTrainRequest, parts: TrainingParts) -> float:
    """GiB of a GPU of models that only run forward. A reference beside adapters is the model without them, and one that
    changes places with the trained weights is on the host."""
    apart = request.has_reference and not request.step.work.lora_rank and not request.swap_reference
    reference = parts.actor.memory.weights_gib if apart else 0.0
    return reference + (parts.reward.memory.weights_gib if parts.reward is not None else 0.0)


def memory_of(
    request: PostTrainRequest, parts: TrainingParts, groups: GpuGroups, device: Device, engine_share: float
) -> tuple[PhaseMemory, ...]:
    """What each phase needs of a GPU. An engine takes ``engine_share`` of it; models that wait are on the host where
    training's state goes there."""
    total, away = device.memory_gib, offloads(request, groups)
    memories = []
    waiting = 0.0 if away else frozen_gib(request, parts)
    peaks = {TRAIN: parts.actor.memory.peak_gib}
    if parts.critic is not None:
        peaks[CRITIC] = parts.critic.memory.peak_gib
    for name, peak in peaks.items():
        other = 0.0
        if parts.critic is not None and not away:
            memory = (parts.critic if name == TRAIN else parts.actor).memory
            other = memory.weights_gib + memory.optimizer_gib
        memories.append(PhaseMemory(name, peak + waiting + other, total))
    if request.rolls_out:
        resident = state_gib(parts) + waiting if groups.colocated and not away else 0.0
        memories.append(PhaseMemory(ROLL, engine_share * total + resident, total))
    return tuple(memories)
