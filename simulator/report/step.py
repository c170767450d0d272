"""What the answer of a step is made of: breakdown, stages, spans, and all that training and inference share."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..memory.breakdown import Memory

if TYPE_CHECKING:
    from ..step.state import State


@dataclass(frozen=True)
class Knowledge:
    """Whose measurements answered for how much of a step, by which clause of the rule (``models/choice.py``)."""

    clause: str
    source: str
    predictor: str
    time_s: float


@dataclass(frozen=True)
class OpShare:
    """One kind's part of a step: ``count`` executions, their time and share, who answered and by whose measurements."""

    kind: str
    count: int
    time_s: float
    share: float
    engines: tuple[str, ...]
    known_by: tuple[Knowledge, ...] = ()


@dataclass(frozen=True)
class Breakdown:
    """Where a step's time goes; the five ``*_s`` figures add up to the step."""

    compute_s: float
    exposed_comm_s: float
    bubble_s: float
    optimizer_s: float
    host_s: float
    by_op: tuple[OpShare, ...]
    by_phase: Mapping[str, float]
    by_parallelism: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StageShare:
    """One pipeline stage of a step: its layers, time in tasks and time waiting, and the parameters that each of its
    devices holds (its share of them under tensor and expert ranks and ZeRO-3)."""

    stage: int
    layers: int
    busy_s: float
    bubble_s: float
    parameters: int


@dataclass(frozen=True)
class MissingMeasurement:
    """An op whose time was not measured: what it takes of the step, in seconds and as a share."""

    op: Mapping[str, Any]
    time_s: float
    share: float


@dataclass(frozen=True)
class Span:
    """One node on the timeline, in microseconds from the start of the step."""

    name: str
    kind: str
    path: str
    phase: str
    start_us: float
    duration_us: float
    engine: str


@dataclass(frozen=True, kw_only=True)
class Answer(ABC):
    """What training and inference reports have in common.

    ``coverage`` is the chance that the interval holds the truth; ``provenance`` the share of the time by who answered;
    ``sources`` the share of kernel time by who measured what answered: ``own rows``, labs, ``physics``;
    ``unmapped`` lists operators that are costed by their bytes alone. ``trust`` is the share of kernel time by source
    (:mod:`.trust`), ``measure_next`` what to measure to make it better, ``quantiles`` the distribution of the answer in
    its own unit. ``power_w`` is of one device, ``energy_j`` and ``cost`` of the whole step on all ``devices``;
    ``energy_measured`` is the share of the energy that is of ops whose watts were measured.
    ``network`` says how the links of a cluster were simulated, and which were fullest; ``stack`` is the framework's
    name. ``state`` is what it was all read from, for timelines and pictures; ``timeline`` the nodes of one step in time
    (:func:`.timeline.timeline`), where a page shows them. JSON has neither.
    """

    model: str
    device: str
    precision: str
    workload: str
    coverage: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float
    hfu: float
    memory: Memory
    fits: bool
    breakdown: Breakdown
    provenance: Mapping[str, float]
    unmapped: tuple[str, ...]
    notes: tuple[str, ...]
    wall_time_s: float
    timeline: tuple[Span, ...] = field(default=(), repr=False)
    devices: int = 1
    parallel: Mapping[str, Any] = field(default_factory=dict)
    trust: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, float] = field(default_factory=dict)
    measure_next: tuple[MissingMeasurement, ...] = ()
    quantiles: Mapping[str, float] = field(default_factory=dict)
    p_oom: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    energy_measured: float = 0.0
    cost: float | None = None
    cost_per_million_tokens: float | None = None
    network: Mapping[str, Any] = field(default_factory=dict)
    stack: str = ""
    state: State | None = field(default=None, repr=False, compare=False)

    @abstractmethod
    def named_times_us(self) -> list[tuple[str, str, float]]:
        """(what it is called, what that means, microseconds) of each time."""

    @property
    @abstractmethod
    def times_s(self) -> tuple[float, float, float]:
        """Seconds of the whole, with its interval."""

    @abstractmethod
    def probability_within(self, seconds: float) -> float:
        """P(the whole takes at most ``seconds``)."""

    def degrees(self) -> list[str]:
        """The degrees of the layout above 1, and the stage of ZeRO."""
        layout = self.parallel
        degrees = [
            f"{name.upper()} {layout[name]}" for name in ("tp", "cp", "pp", "vpp", "dp", "ep") if layout[name] > 1
        ]
        return [*degrees, *([f"ZeRO-{layout['zero_stage']}"] if layout.get("zero_stage") else [])]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the timeline is left out (it has its own export)."""
        return plain(self, drop=("timeline", "state"))

    def to_pandas(self) -> Any:
        """The breakdown by op kind as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame([dataclasses.asdict(share) for share in self.breakdown.by_op])


def plain(value: Any, drop: Sequence[str] = ()) -> Any:
    """Dataclasses, mappings and tuples as dicts and lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name not in drop}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value
