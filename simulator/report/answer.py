"""The answer of a simulated step: time with its interval, memory, breakdown, provenance; and that of one op.

Every total is a sum over the spans of one timeline, so that breakdown and total agree by construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .display import display_html
from .distribution import probability_within
from .figures import notebook
from .step import Answer, StageShare, plain
from .view import dims_text, time_text


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


def ape(predicted: float, measured: float) -> float:
    """Absolute percentage error |predicted - measured| / measured, in percent."""
    return abs(predicted - measured) / measured * 100.0
