"""The answer about a served model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...datasets.counts import counted
from .display import display_html
from .served_times import TIMES, TimeSpread, times_table
from .step import plain
from .view import ViewTable


@dataclass(frozen=True)
class ServingReport:
    """What came of the traffic. Times in milliseconds; ``goodput`` is requests a second that met all targets.

    ``over_time`` are spans of equal length with means over their iterations, by pool (``all`` where there is one).
    ``kv_tokens`` fit into the KV memory of a replica (one that prefills, where pools are apart: ``pools`` has both),
    ``kv_rank_tokens`` into that of each of its ranks; ``kv_peak_tokens`` were in use on one of them at most.
    ``kv_peak`` is the largest share of KV blocks in use on any rank. ``overload`` says in words that the queue grew
    without end; empty where it did not. ``slo_curve`` is the share of requests that would meet all targets if they
    were so many times as long. ``power_w`` is the mean of a device, energy and cost are of a million tokens made.
    ``tokens_per_decode`` is what a decoding sequence gets in an iteration, with what was guessed ahead.
    ``intervals`` are those of figures by name (``ttft_ms.p50``), from those of the steps' times: ``coverage`` of their
    errors are within. ``p_slo_met`` is how likely, by the same errors, enough requests meet all targets, and
    ``p_p99_ttft_met`` how likely the 99th percentile of TTFT is within ``slo.ttft_ms``, by them and by what other seeds
    of the traffic make of it. ``sources`` is the share of kernel time by whose measurements, over some of the steps
    that its tables were made of. ``rejections`` are how many ``requests`` each limit rejected, by its name, and the
    ``most_tokens`` that it allows, or the ``most`` that may come in. ``classes`` are what each class of requests saw,
    ``kv_tiers`` what was found in each tier of the prefix cache, ``adapters`` what low-rank adapters took: those on a
    GPU and ``in_batch``, loads and their time, requests that ``waited`` for a place, and what those of each had.
    ``expert_balance`` is how many times as many tokens the busiest GPU of experts had as the mean, ``over_time`` by
    iteration, what an iteration took longer for it, and what moving weights took. ``images`` is what encoding took.
    ``kinds`` are replicas of two kinds in one pool, what they served and cost. ``fleet`` says what replicas that came
    and went cost and lost, ``fleet_over_time`` what an autoscaler saw at each of its looks, ``failed`` how many
    requests were not tried again where their replica failed, and ``without_failures`` what would be if none failed.
    """

    requests: int
    completed: int
    rejected: int
    ttft_ms: TimeSpread
    tpot_ms: TimeSpread
    itl_ms: TimeSpread
    e2e_ms: TimeSpread
    queue_ms: TimeSpread
    normalised_ms: TimeSpread
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    output_tokens_per_s_per_gpu: float
    total_tokens_per_s: float
    goodput: float
    slo_attainment: float
    kv_tokens: int
    kv_rank_tokens: int
    kv_peak: float
    kv_peak_tokens: int
    preemptions: int
    swaps: int
    prefix_hit_share: float
    iterations: int
    mean_batch: float
    utilisation: float
    replicas: int
    devices: int
    overload: str = ""
    backlog: tuple[Mapping[str, float], ...] = ()
    over_time: Mapping[str, tuple[Mapping[str, float], ...]] = field(default_factory=dict, repr=False)
    slo: Mapping[str, float] = field(default_factory=dict)
    slo_curve: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    power_w: float | None = None
    kwh_per_million_tokens: float | None = None
    cost_per_million_tokens: float | None = None
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    coverage: float | None = None
    p_slo_met: float | None = None
    p_p99_ttft_met: float | None = None
    tokens_per_decode: float = 1.0
    pools: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    prefill_e2e_ms: TimeSpread | None = None
    kv_transfer_ms: TimeSpread | None = None
    decode_e2e_ms: TimeSpread | None = None
    kv_transfer_bytes: float = 0.0
    rejections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    classes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    kv_tiers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    adapters: Mapping[str, Any] = field(default_factory=dict)
    expert_balance: Mapping[str, Any] = field(default_factory=dict)
    images: Mapping[str, float] = field(default_factory=dict)
    kinds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    failed: int = 0
    fleet: Mapping[str, float] = field(default_factory=dict)
    fleet_over_time: tuple[Mapping[str, float], ...] = field(default=(), repr=False)
    without_failures: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sources: Mapping[str, float] = field(default_factory=dict)
    wall_time_s: float = 0.0

    @property
    def all_notes(self) -> list[str]:
        """What a reader should know, the worst first."""
        return [note for note in (self.overload, *self.notes) if note]

    def times_table(self) -> ViewTable:
        """How long requests took, and on a page how sure that is."""
        return times_table({name: getattr(self, name) for name in TIMES}, self.intervals)

    def _repr_html_(self) -> str:
        facts = [
            ("served", f"{self.completed:,} of {counted(self.requests, 'request')}"),
            ("requests/s", f"{self.requests_per_s:,.4g}"),
            ("goodput", f"{self.goodput:,.4g} requests/s"),
            ("output tokens/s a GPU", f"{self.output_tokens_per_s_per_gpu:,.0f}"),
            ("KV memory", f"{self.kv_tokens:,} tokens a replica, {self.kv_peak:.0%} in use at most"),
        ]
        title = f"Traffic on {counted(self.replicas, 'replica')}, {counted(self.devices, 'GPU')}"
        return display_html(title, facts, self.times_table(), " ".join(self.all_notes))

    def to_dict(self) -> dict[str, Any]:
        """Plain values; CDFs and spans of time are in ``cdf`` and ``over_time``."""
        values: dict[str, Any] = {}
        curves: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, TimeSpread):
                values[name] = value.to_dict()
                curves[name] = [list(point) for point in value.cdf]
            else:
                values[name] = plain(value)
        return values | {"cdf": curves}
