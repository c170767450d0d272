"""The answer about a served model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..question.serving import ServingRequest
from .histogram import Histogram
from .rules import ServingSetup
from .state import LoopState

if TYPE_CHECKING:
    from .setup import ServedReplica

PERCENTILES = (50, 90, 99)
CDF_POINTS = 100
OVERLOADED = 0.1  # of all requests still waiting when the last comes in, more than at half time
MS = 1e3


@dataclass(frozen=True)
class TimeSpread:
    """A time over all requests, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    count: int
    cdf: tuple[tuple[float, float], ...] = field(default=(), repr=False)  # (ms, share of requests at most as long)

    @classmethod
    def of(cls, times: Histogram) -> TimeSpread:
        """The spread of times in microseconds."""
        points = tuple((value / MS, share) for value, share in times.cdf(CDF_POINTS))
        p50, p90, p99 = (times.percentile(each) / MS for each in PERCENTILES)
        return cls(times.mean / MS, p50, p90, p99, int(times.count), points)

    def to_dict(self) -> dict[str, float]:
        """Without the CDF."""
        return {"mean": self.mean, "p50": self.p50, "p90": self.p90, "p99": self.p99}


@dataclass(frozen=True)
class ServingReport:
    """What came of the traffic. Times in milliseconds; ``goodput`` is requests a second that met all targets.

    ``over_time`` are spans of equal length with means over their iterations. ``kv_peak`` is the largest share of KV
    blocks in use on any rank. ``overload`` says in words that the queue grew without end; empty where it did not.
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
    kv_peak: float
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
    over_time: tuple[Mapping[str, float], ...] = field(default=(), repr=False)
    pools: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    kv_transfer_ms: TimeSpread | None = None
    kv_transfer_bytes: float = 0.0
    notes: tuple[str, ...] = ()
    wall_time_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values; CDFs and spans of time are in ``cdf`` and ``over_time``."""
        values: dict[str, Any] = {}
        curves: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, TimeSpread):
                values[name] = value.to_dict()
                curves[name] = [list(point) for point in value.cdf]
            elif name in ("over_time", "backlog"):
                values[name] = [dict(each) for each in value]
            elif name == "pools":
                values[name] = {pool: dict(each) for pool, each in value.items()}
            else:
                values[name] = list(value) if isinstance(value, tuple) else value
        return values | {"cdf": curves}


def report_of(
    request: ServingRequest,
    made: ServingSetup,
    state: LoopState,
    times: Mapping[str, Histogram],
    good: int,
    backlog: list[tuple[float, int, int]],
    replicas: tuple[ServedReplica, ServedReplica],
    wall_s: float,
) -> ServingReport:
    """The report of a run that has ended."""
    totals = {name: state.totals[name][0].item() for name in state.totals.dtype.names}
    gaps = Histogram(state.gaps, (totals["gaps"], totals["gap_us"], totals["least_gap_us"], totals["most_gap_us"]))
    seconds = max(totals["now_us"] / 1e6, 1e-9)
    done, pool = totals["completed"], request.decode_pool
    devices = request.replicas * replicas[0].devices + pool.replicas * replicas[1].devices
    rows = over_time(state, made)
    return ServingReport(
        requests=totals["arrived"],
        completed=done,
        rejected=totals["rejected"],
        **{f"{name}_ms": TimeSpread.of(times[name]) for name in ("ttft", "tpot", "e2e", "queue", "normalised")},
        itl_ms=TimeSpread.of(gaps),
        duration_s=seconds,
        requests_per_s=done / seconds,
        output_tokens_per_s=totals["output_tokens"] / seconds,
        output_tokens_per_s_per_gpu=totals["output_tokens"] / seconds / devices,
        total_tokens_per_s=(totals["output_tokens"] + totals["input_tokens"]) / seconds,
        goodput=good / seconds,
        slo_attainment=good / totals["arrived"] if totals["arrived"] else 0.0,
        kv_peak=kv_peak(state, made),
        preemptions=totals["preemptions"],
        swaps=totals["swaps"],
        prefix_hit_share=totals["hit_tokens"] / max(1, totals["hit_tokens"] + totals["computed_tokens"]),
        iterations=totals["iterations"],
        mean_batch=totals["computed_tokens"] / max(1, totals["iterations"]),
        utilisation=float(state.spans["busy_us"].sum()) / (totals["now_us"] or 1.0) / len(state.ranks),
        replicas=made.replicas,
        devices=devices,
        overload=overload(request, backlog, totals["rejected"]),
        backlog=tuple({"s": at / 1e6, "came": came, "waiting": waits} for at, came, waits in backlog),
        over_time=rows,
        pools=pools(state, made) if pool.replicas else {},
        kv_transfer_ms=TimeSpread.of(times["kv_transfer"]) if pool.replicas else None,
        kv_transfer_bytes=replicas[0].kv.bytes_per_token * totals["input_tokens"] if pool.replicas else 0.0,
        notes=notes(totals),
        wall_time_s=wall_s,
    )


def kv_peak(state: LoopState, made: ServingSetup) -> float:
    """The largest share of its KV blocks that any rank had in use."""
    first = made.first_decode * made.ranks_per_replica
    blocks = np.where(np.arange(len(state.ranks)) < first, made.rules.blocks, made.decode_rules.blocks)
    return float((state.ranks["peak"] / blocks).max())


def over_time(state: LoopState, made: ServingSetup) -> tuple[Mapping[str, float], ...]:
    """The spans of time up to the last iteration: means over their iterations, weighted by their length."""
    used = np.flatnonzero(state.spans["iterations"])
    if not len(used):
        return ()
    width_s = float(state.totals["width_us"][0]) / 1e6
    spans = state.spans[: used[-1] + 1]
    busy = np.maximum(spans["busy_us"], 1e-9)
    columns = {
        "start_s": np.arange(len(spans)) * width_s,
        "iterations": spans["iterations"],
        "busy_share": spans["busy_us"] / (width_s * 1e6 * len(state.ranks)),
        "decodes": spans["decodes"] / busy,
        "prefill_tokens": spans["prefill_tokens"],
        "kv_share": spans["blocks"] / busy / made.rules.blocks,
        "waiting": spans["waiting"] / busy,
    }
    return tuple(dict(zip(columns, map(float, row), strict=True)) for row in zip(*columns.values(), strict=True))


def pools(state: LoopState, made: ServingSetup) -> dict[str, dict[str, float]]:
    """How many replicas each pool has, and the most KV memory in use on one of their ranks."""
    first = made.first_decode * made.ranks_per_replica
    parts = {"prefill": (slice(0, first), made.rules), "decode": (slice(first, None), made.decode_rules)}
    return {
        name: {
            "replicas": len(state.ranks[part]) / made.ranks_per_replica,
            "kv_peak": float(state.ranks["peak"][part].max()) / own.blocks,
        }
        for name, (part, own) in parts.items()
    }


def overload(request: ServingRequest, backlog: list[tuple[float, int, int]], rejected: int) -> str:
    """What to say where the queue grew as long as requests came, empty where it did not. Clients of a closed loop wait
    for answers: they cannot overload anything."""
    if request.traffic.arrival == "closed" or len(backlog) < 2:
        return ""
    at = {came: (time_us, waiting) for time_us, came, waiting in backlog[:-1]}
    last, half = max(at), min(at, key=lambda came: abs(came - max(at) / 2))
    grown = at[last][1] - at[half][1]
    if grown < OVERLOADED * (last - half) or at[last][1] < 10:
        return ""
    seconds = max((at[last][0] - at[half][0]) / 1e6, 1e-9)
    share = grown / max(1, last - half)
    return (
        f"overload: when {last:,} requests had come {at[last][1]:,} waited, {grown / seconds:.3g} more every second; "
        f"{share:.0%} of what comes is more than is served, so that times depend on how long the run is"
    )


def notes(totals: Mapping[str, Any]) -> tuple[str, ...]:
    """What a reader should know."""
    said = []
    if totals["rejected"]:
        said.append(
            f"{totals['rejected']:,} of {totals['arrived']:,} requests were rejected: longer than the context "
            "(scheduler.max_model_len), the KV memory, or an iteration (scheduler.max_tokens) allows"
        )
    return tuple(said)
