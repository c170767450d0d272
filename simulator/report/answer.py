"""The answer of a simulated step: time with its interval, memory, breakdown, provenance.

Every total is a sum over the spans of one timeline, so that breakdown and total agree by construction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..memory.breakdown import Memory
from .display import display_html
from .distribution import probability_within
from .figures import notebook
from .view import dims_text, time_text

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
class Answer:
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


@dataclass(frozen=True, kw_only=True)
class StepReport(Answer):
    """One training step. Times in seconds; the step lies from ``low_s`` to ``high_s``. ``stages``: of a pipeline."""

    step_time_s: float
    low_s: float
    high_s: float
    stages: tuple[StageShare, ...] = ()

    def _repr_html_(self) -> str:
        return notebook(self)

    def named_times_us(self) -> list[tuple[str, str, float]]:
        """(what it is called, what that means, microseconds) of each time."""
        return [("step time", "", 1e6 * self.step_time_s)]

    @property
    def times_s(self) -> tuple[float, float, float]:
        """Seconds of the step, with its interval."""
        return self.step_time_s, self.low_s, self.high_s

    def probability_within(self, seconds: float) -> float:
        """P(the step takes at most ``seconds``)."""
        return probability_within(seconds, self.step_time_s, self.low_s, self.high_s, self.coverage)


@dataclass(frozen=True, kw_only=True)
class InferenceReport(Answer):
    """Prefill, decode or a whole generation. Times in milliseconds; the interval is that of ``e2e_ms``.

    ``ttft_ms`` is the prefill, ``tpot_ms`` the mean step per output token after the first, ``e2e_ms`` the whole
    of what the workload asked for. What a workload does not contain is None.
    """

    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float
    low_ms: float
    high_ms: float

    def _repr_html_(self) -> str:
        return notebook(self)

    def named_times_us(self) -> list[tuple[str, str, float]]:
        """(what it is called, what that means, microseconds) of each time that the workload has."""
        named = [("TTFT", "time to first token", self.ttft_ms), ("TPOT", "time per output token", self.tpot_ms)]
        return [
            (name, meaning, 1e3 * ms)
            for name, meaning, ms in (*named, ("end to end", "", self.e2e_ms))
            if ms is not None
        ]

    @property
    def times_s(self) -> tuple[float, float, float]:
        """Seconds of the whole, with its interval."""
        return self.e2e_ms / 1e3, self.low_ms / 1e3, self.high_ms / 1e3

    def probability_within(self, seconds: float) -> float:
        """P(the whole takes at most ``seconds``)."""
        return probability_within(seconds * 1e3, self.e2e_ms, self.low_ms, self.high_ms, self.coverage)


@dataclass(frozen=True)
class OpPrediction:
    """How long one op takes on one device, who says so and how sure."""

    op: Mapping[str, Any]
    device: str
    latency_us: float
    low_us: float
    high_us: float
    coverage: float
    engine: str
    predictor: str | None
    in_envelope: bool
    roofline_us: float
    bound: str
    cache: str
    clause: str = ""  # the clause by which it was asked (models/choice.py)
    source: str = ""  # whose measurements it learned from
    power_w: float | None = None  # while it runs again and again; None where nothing is known
    energy_mj: float | None = None  # of one execution
    energy_in_envelope: bool = False
    network: Mapping[str, Any] = field(default_factory=dict)  # of a collective on a cluster: what its links did
    placed: Any = field(default=None, repr=False, compare=False)  # topology and load of its links, for pictures

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what pictures are made of is left out."""
        return plain(self, drop=("placed",))

    def _repr_html_(self) -> str:
        by = f"{self.engine}: {self.predictor}" if self.predictor else self.engine
        facts = [
            ("latency", time_text(self.latency_us)),
            (f"{self.coverage:.0%} interval", f"{time_text(self.low_us)} to {time_text(self.high_us)}"),
            ("answered by", by if self.in_envelope else f"{by}, outside what was measured"),
            ("which is", self.clause),
            ("roofline", f"{time_text(self.roofline_us)}, {self.bound} bound"),
            ("power", "" if self.power_w is None else f"{self.power_w:.0f} W"),
        ]
        return display_html(f"{self.op['kind']} {dims_text(self.op)} on {self.device}", facts)


def plain(value: Any, drop: Sequence[str] = ()) -> Any:
    """Dataclasses, mappings and tuples as dicts and lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name not in drop}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value


def ape(predicted: float, measured: float) -> float:
    """Absolute percentage error |predicted - measured| / measured, in percent."""
    return abs(predicted - measured) / measured * 100.0
