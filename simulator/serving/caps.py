"""The same traffic under several power caps: joules of a token against what users wait for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...datasets.loading import number
from ...datasets.own_warnings import own_warnings
from ...models.power import Limits
from ..question.canonical import RequestError
from ..question.serving import ServingRequest
from ..report.served import ServingReport
from ..report.served_view import LOADS, NAME, load_row, time_columns
from ..report.view import ViewColumn, ViewTable
from .capacity import Apply, PlayedReplicas, sweep
from .connect import replicas_of
from .studies import without_curves

if TYPE_CHECKING:
    from ..engines.bench import Bench


@dataclass(frozen=True)
class ServedCap:
    """A run under one cap (None: the GPUs' own limit).

    ``gpu_joules`` are those of the GPUs for an output token, ``joules`` with hosts and the building. ``front`` says
    that no other cap is at least as good in joules and in the share of requests that had what ``slo`` asks for
    (without one: in the p90 of TPOT), and better in one.
    """

    cap_w: float | None
    report: ServingReport
    gpu_joules: float
    joules: float
    front: bool = False

    @property
    def worse(self) -> float:
        """What a cap makes worse: requests without their targets, else milliseconds of a token."""
        tpot_ms = self.report.tpot_ms
        if self.report.slo:
            return 1.0 - self.report.slo_attainment
        return tpot_ms.p90 if tpot_ms.count else math.inf

    def to_dict(self) -> dict[str, Any]:
        """The run as plain values."""
        figures = {"cap_w": self.cap_w, "gpu_joules_per_token": self.gpu_joules, "joules_per_token": self.joules}
        return figures | {"front": self.front} | without_curves(self.report)


@own_warnings()
def serving_caps(
    request: ServingRequest, power_caps_w: Sequence[Any], node_w: Any, pue: Any, bench: Bench, apply: Apply
) -> list[ServedCap]:
    """The traffic without a cap and under each: ``node_w`` are watts of a node beside its GPUs, ``pue`` the building's.

    RequestError for caps that cannot be, and where nobody knows what the GPUs draw; the errors of `serving`.
    """
    caps = [number(RequestError, "power_caps_w", cap) for cap in power_caps_w]
    node, building = number(RequestError, "node_w", node_w), number(RequestError, "pue", pue, 1)
    if not caps:
        raise RequestError("`opcast serving caps` needs power_caps_w=[600,500,400]")
    if request.step is None:
        raise RequestError("a law by hand has no watts: `opcast serving caps` needs a model")
    if request.step.power_cap_w is not None:
        raise RequestError("power_cap_w and power_caps_w both hold GPUs back: leave power_cap_w out")
    for cap in caps:
        if cap == 0:
            raise RequestError("power_caps_w=0 lets a GPU draw nothing: give watts above 0")
        Limits(cap)
    return with_front([_served(request, cap, node, building, bench, apply) for cap in (None, *caps)])


def _served(
    request: ServingRequest, cap_w: float | None, node_w: float, pue: float, bench: Bench, apply: Apply
) -> ServedCap:
    assert request.step is not None
    capped = replace(request, step=replace(request.step, power_cap_w=cap_w))
    side = PlayedReplicas(*replicas_of(capped, bench))
    if capped.traffic.arrival == "closed" or capped.traffic.trace is not None:
        report = side(capped)
    else:
        ((_, report),) = sweep(capped, [capped.traffic.rate], side, apply)
    if report.power_w is None:
        raise RequestError("nobody knows what these GPUs draw: give device.tdp_w")
    cluster = request.step.cluster
    node = node_w * report.devices / (cluster.devices_per_node if cluster else 1)
    gpus = report.power_w * report.devices
    rate = report.output_tokens_per_s
    if rate == 0:
        raise RequestError("nobody was served, so no token has joules: take a lower traffic.rate, or other admission.*")
    return ServedCap(cap_w, report, gpus / rate, pue * (gpus + node) / rate)


def with_front(rows: Sequence[ServedCap]) -> list[ServedCap]:
    """The rows, marked where no other is at least as good in both and better in one."""
    points = [(row.joules, row.worse) for row in rows]
    return [
        replace(
            row, front=not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)
        )
        for row, point in zip(rows, points, strict=True)
    ]


def caps_values(rows: Sequence[ServedCap], node_w: Any, pue: Any) -> dict[str, Any]:
    """Caps as plain values."""
    return {"caps": [row.to_dict() for row in rows], "node_w": float(node_w), "pue": float(pue)}


def caps_table(rows: Sequence[ServedCap]) -> ViewTable:
    """Each cap: what users wait for, what a token costs, whether another cap is better in both or it is overloaded."""
    priced = any(row.report.cost_per_million_tokens is not None for row in rows)
    joules = ViewColumn("W a GPU", "count"), ViewColumn("J a token", "amount"), ViewColumn("with all", "amount")
    cost = [ViewColumn("cost of 1M", "figure")] if priced else []
    columns = [ViewColumn("cap, W", "digits"), *time_columns("p90"), *LOADS, *joules, *cost, NAME]
    lines = [
        [row.cap_w, *load_row(row.report), row.report.power_w, row.gpu_joules, row.joules]
        + [row.report.cost_per_million_tokens for _ in cost]
        + ["front" if row.front else "overload" if row.report.overload else ""]
        for row in rows
    ]
    return ViewTable("joules of an output token against latency, milliseconds", columns, lines)
