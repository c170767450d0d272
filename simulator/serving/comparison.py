"""Replicas that do both against pools that prefill and decode, on the same traffic and, as far as it goes, GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..question.canonical import RequestError
from ..question.serving import DecodePool, ServingRequest
from ..report.served import ServingReport
from ..report.served_view import NAME, attained, time_columns, user_times
from ..report.view import ViewColumn, ViewTable, written
from .capacity import Apply, PlayedReplicas
from .replica import ServedReplica


@dataclass(frozen=True)
class WayOfServing:
    """So many replicas that prefill (and decode, where ``decode`` is 0) and so many that only decode."""

    prefill: int
    decode: int
    report: ServingReport

    @property
    def name(self) -> str:
        """The way in a few words."""
        return f"{self.prefill} prefill + {self.decode} decode" if self.decode else f"{self.prefill} co-located"

    @property
    def score(self) -> float:
        """What ways are ranked by: goodput of a GPU where users expect something, else output tokens of a GPU."""
        report = self.report
        return report.goodput / report.devices if report.slo else report.output_tokens_per_s_per_gpu


def ways(request: ServingRequest, replica: ServedReplica, decoder: ServedReplica | None) -> list[ServingRequest]:
    """The requests to compare: co-located first, then every split of the same replicas.

    Where the request says how many decode, that split alone; co-located has as many replicas as its GPUs hold.
    RequestError for a single replica, which cannot be split.
    """
    pool = request.decode_pool
    if pool.replicas:
        devices = request.replicas * replica.devices + pool.replicas * (decoder or replica).devices
        together = replace(request, replicas=max(devices // replica.devices, 1), decode_pool=DecodePool())
        return [together, request]
    if request.replicas < 2:
        raise RequestError("compare needs two replicas at least, replicas=2, or decode_pool.replicas=1 beside one")
    splits = [
        replace(request, replicas=count, decode_pool=replace(pool, replicas=request.replicas - count))
        for count in range(1, request.replicas)
    ]
    return [replace(request, decode_pool=DecodePool()), *splits]


def compare(candidates: list[ServingRequest], side: PlayedReplicas, apply: Apply) -> list[WayOfServing]:
    """What came of each, the best first."""
    reports = apply(side, [(candidate,) for candidate in candidates])
    results = [
        WayOfServing(candidate.replicas, candidate.decode_pool.replicas, report)
        for candidate, report in zip(candidates, reports, strict=True)
    ]
    return sorted(results, key=lambda way: -way.score)


def ways_table(ways_compared: Sequence[WayOfServing]) -> ViewTable:
    """The ways, the best first, and what they are ranked by."""
    rows = []
    for way in ways_compared:
        report = way.report
        moved_ms = report.kv_transfer_ms.p50 if report.kv_transfer_ms else None
        kv_tokens = " / ".join(f"{kv['kv_tokens']:,.0f}" for kv in (report.pools or {"": vars(report)}).values())
        rates = report.output_tokens_per_s_per_gpu, report.goodput / report.devices
        share = f"{written(attained(report), 'share')}{' overload' if report.overload else ''}"
        rows.append([way.name, report.devices, *user_times(report, "p90"), moved_ms, kv_tokens, *rates, share])
    rates_columns = ViewColumn("tokens/s/GPU", "tenths"), ViewColumn("goodput/GPU", "amount"), ViewColumn("slo")
    columns = [NAME, ViewColumn("GPUs"), *time_columns("p90"), ViewColumn("KV transfer", "time_ms")]
    ranked = "goodput of a GPU" if any(way.report.slo for way in ways_compared) else "output tokens of a GPU"
    caption = f"co-located and disaggregated, milliseconds, by {ranked}"
    return ViewTable(caption, [*columns, ViewColumn("KV tokens"), *rates_columns], rows)
