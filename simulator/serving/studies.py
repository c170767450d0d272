"""Questions that play the same traffic many times: capacity, a sweep of rates, ways to split replicas. Their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...datasets.own_warnings import own_warnings
from ..question.canonical import RequestError
from ..question.serving import ServingRequest
from ..report.served import ServingReport
from .capacity import Apply, Capacity, PlayedReplicas, capacity, sweep
from .comparison import WayOfServing, compare, ways
from .connect import replicas_of

if TYPE_CHECKING:
    from ..engines.bench import Bench

CURVES = ("cdf", "over_time", "backlog", "slo_curve", "fleet_over_time")


@own_warnings()
def serving_capacity(request: ServingRequest, bench: Bench, apply: Apply) -> Capacity:
    """The largest rate that meets what users expect. Raises RequestError where the traffic has no rate."""
    return capacity(request, PlayedReplicas(*replicas_of(request, bench)), apply)


@own_warnings()
def serving_sweep(
    request: ServingRequest, rates: Sequence[float], bench: Bench, apply: Apply
) -> list[tuple[float, ServingReport]]:
    """The report at each of the ``rates`` (none: a tenth of the request's own to twice it)."""
    return sweep(request, list(rates), PlayedReplicas(*replicas_of(request, bench)), apply)


@own_warnings()
def serving_ways(request: ServingRequest, bench: Bench, apply: Apply) -> list[WayOfServing]:
    """Replicas that do both beside pools that prefill and decode, the best first. RequestError for one replica."""
    if request.second_kind.replicas or request.changing:
        raise RequestError("compare is of replicas that are alike and stay: leave out second_kind, autoscale, failures")
    pool = request.decode_pool
    paired = replace(request, decode_pool=replace(pool, replicas=pool.replicas or 1))  # so that a decoder is made
    replica, decoder = replicas_of(paired, bench)
    return compare(ways(request, replica, decoder), PlayedReplicas(replica, decoder), apply)


def sweep_values(reports: Sequence[tuple[float, ServingReport]]) -> dict[str, Any]:
    """A sweep as plain values."""
    return {"rates": [{"rate": rate} | without_curves(report) for rate, report in reports]}


def ways_values(ways_compared: Sequence[WayOfServing]) -> dict[str, Any]:
    """Ways to split replicas as plain values."""
    return {
        "ways": [
            {"way": way.name, "prefill": way.prefill, "decode": way.decode} | without_curves(way.report)
            for way in ways_compared
        ]
    }


def without_curves(report: ServingReport) -> dict[str, Any]:
    """The report without what is long."""
    return {name: value for name, value in report.to_dict().items() if name not in CURVES}
