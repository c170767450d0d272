"""The answer about post-training: what an iteration takes, phase by phase, and what the whole run does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..job.answer import LifeSpread
from ..report.display import display_html
from ..report.step import plain
from .lengths import MicroBatches
from .phases import Phase, PhaseMemory
from .schedule import PhaseSpan
from .sync import WeightSync


@dataclass(frozen=True)
class RolloutFigures:
    """A batch's rollout: ``tail_share`` of its time less than a tenth of the responses run; ``running_share`` of them
    run in the mean. ``carried`` responses go on in the next batch. ``kv_peak`` is a share of the KV memory."""

    replicas: int
    layout: str
    engine: str
    mean_response: float
    longest_response: int
    output_tokens_per_s_per_gpu: float
    tail_share: float
    running_share: float
    kv_peak: float
    preemptions: float
    carried: float


@dataclass(frozen=True)
class PostTrainWay:
    """A way to place rollout and training, with the median of its iterations; ``why_not`` where it cannot run."""

    placement: str
    rollout_gpus: int
    training_gpus: int
    asynchronous: bool
    iteration_s: float | None
    rollout_s: float | None
    training_s: float | None
    fits: bool
    why_not: str = ""


@dataclass(frozen=True)
class PostTrainReport:
    """Post-training by a method. Spreads are over lives and batches: errors of the parts, and lengths by chance.

    ``iteration_s`` is of one batch, ``hours`` of all ``iterations``. ``phases`` are of a mean batch. ``idle`` is the
    share of the time that each group of GPUs waits. ``kwh`` and ``co2_kg`` are of the whole run, None where watts or
    the grid's grams are not known; ``phase_kwh`` is of a mean batch. ``memory`` is of a GPU, phase by phase. ``ways``
    are what was searched. ``timeline`` and ``running`` (seconds, share of the responses that run) are for pictures.
    """

    model: str
    method: str
    device: str
    gpus: int
    training_gpus: int
    rollout_gpus: int
    placement: str
    asynchronous: bool
    layout: tuple[str, ...]
    prompts: int
    responses: int
    tokens: float
    optimizer_steps: int
    micro_batches: MicroBatches
    iterations: int
    iteration_s: LifeSpread
    hours: LifeSpread
    gpu_hours: LifeSpread
    cost: LifeSpread | None
    iteration_kwh: LifeSpread | None
    kwh: LifeSpread | None
    co2_kg: LifeSpread | None
    phase_kwh: Mapping[str, float]
    tokens_per_s_per_gpu: LifeSpread
    phases: tuple[Phase, ...]
    idle: Mapping[str, float]
    rollout: RolloutFigures | None
    sync: WeightSync | None
    memory: tuple[PhaseMemory, ...]
    fits: bool
    ways: tuple[PostTrainWay, ...]
    lives: int
    seed: int
    notes: tuple[str, ...]
    wall_time_s: float
    timeline: tuple[PhaseSpan, ...] = field(default=(), repr=False)
    running: tuple[tuple[float, float], ...] = field(default=(), repr=False)

    def phase_s(self, name: str) -> float:
        """Seconds of a phase of a mean batch; 0 where there is none of that name."""
        return sum(phase.seconds for phase in self.phases if phase.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what pictures are made of is left out."""
        return plain(self, drop=("timeline", "running"))

    def _repr_html_(self) -> str:
        facts = [
            (
                "iteration",
                f"{self.iteration_s.p50:.3g} s ({self.iteration_s.p10:.3g} to {self.iteration_s.p90:.3g})",
            ),
            *((phase.name, f"{phase.seconds:.3g} s") for phase in self.phases),
            ("tokens/s a GPU", f"{self.tokens_per_s_per_gpu.p50:,.0f}"),
        ]
        return display_html(f"{self.method} of {self.model} on {self.gpus:,} x {self.device}", facts)
