"""One point simulated; what is found of it is a flat row."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ...datasets.clusters import Cluster
from ...datasets.devices import Device
from ...models import power
from ..engines import FusedEngine
from ..question.plan import Plan
from ..question.requests import plan_of
from ..report.account import report_of
from ..report.answer import StepReport
from ..report.trust import LEANING
from ..simulate import laid_out, timed_state
from .request import Asked, request_of

Row = dict[str, Any]
OK, TOO_LARGE, REFUSED = "evaluated", "memory", "refused"


class Bench(Protocol):
    """What a search needs of a workbench: devices, engines that are kept, the folder of traced graphs."""

    @property
    def graphs(self) -> Path: ...

    def device(self, given: Device | str, cluster: Cluster | None = None) -> Device: ...

    def engine(self, device: Device, cluster: Cluster | None = None) -> FusedEngine: ...


class Evaluator:
    """Simulates points of one search from a workbench, whose engines it keeps."""

    def __init__(self, made: Asked, bench: Bench) -> None:
        self.made = made
        self.bench = bench
        self.graphs = bench.graphs
        self.places: dict[tuple[Any, ...], tuple[Device, FusedEngine]] = {}

    def place(self, point: Mapping[str, Any]) -> tuple[Plan, Device, FusedEngine]:
        """Plan, device and engine of a point."""
        request = request_of(self.made, point)
        key = point["cluster"], point["nodes"]
        if key not in self.places:
            device = self.bench.device(request.device, request.cluster)
            device = power.capped(device, request.power_cap_w)
            self.places[key] = device, self.bench.engine(device, request.cluster)
        device, engine = self.places[key]
        return plan_of(request, device), device, engine

    def report(self, point: Mapping[str, Any]) -> StepReport:
        """The whole report of a point. PlanError where its parts do not go together."""
        plan, device, engine = self.place(point)
        work = request_of(self.made, point).work
        started = time.perf_counter()
        laid = laid_out(self.made.base.model, work, plan, device, self.graphs)
        report = report_of(timed_state(laid, engine), started, {})
        assert isinstance(report, StepReport)
        return report

    def row(self, point: Mapping[str, Any]) -> Row:
        """What is found of a point: ``status`` says whether it was timed, did not fit, or why it cannot be."""
        started = time.perf_counter()
        try:
            plan, device, engine = self.place(point)
            work = request_of(self.made, point).work
            laid = laid_out(self.made.base.model, work, plan, device, self.graphs)
            if laid.peak_gib > device.memory_gib:
                return _row(
                    point, TOO_LARGE, f"{laid.peak_gib:.1f} GiB of {device.memory_gib:g}", peak_gib=laid.peak_gib
                )
            report = report_of(timed_state(laid, engine), started, {})
        except ValueError as error:
            if not type(error).__module__.startswith("opcast"):
                raise
            return _row(point, REFUSED, " ".join(str(error).split()))
        assert isinstance(report, StepReport)
        return _row(point, OK, "", **figures(report))


def _row(point: Mapping[str, Any], status: str, why: str, **found: Any) -> Row:
    return {**point, "status": status, "why": why, **found}


def figures(report: StepReport) -> dict[str, float | None]:
    """The figures of a report that a search compares (:data:`.request.FIGURES`) and the degrees that follow."""
    memory, made = report.memory, report.breakdown
    exposed = made.by_parallelism
    data = sum(exposed.get(name, 0.0) for name in ("dp", "dp_cp", "edp"))
    return {
        "dp": report.parallel["dp"],
        "devices": report.devices,
        "micro_batches": report.parallel["micro_batches"],
        "step_time_s": report.step_time_s,
        "low_s": report.low_s,
        "high_s": report.high_s,
        "tokens_per_s": report.tokens_per_s_per_gpu * report.devices,
        "tokens_per_s_per_gpu": report.tokens_per_s_per_gpu,
        "tflops_per_gpu": report.tflops_per_gpu,
        "mfu": report.mfu,
        "hfu": report.hfu,
        "peak_gib": memory.peak_gib,
        "weights_gib": memory.weights_gib,
        "gradients_gib": memory.gradients_gib,
        "optimizer_gib": memory.optimizer_gib,
        "activations_gib": memory.activations_gib,
        "other_gib": memory.other_gib,
        "compute_s": made.compute_s,
        "exposed_comm_s": made.exposed_comm_s,
        "bubble_s": made.bubble_s,
        "optimizer_s": made.optimizer_s,
        "host_s": made.host_s,
        **{f"exposed_{name}_s": exposed.get(name, 0.0) for name in ("tp", "cp", "pp")},
        "exposed_ep_s": sum(exposed.get(name, 0.0) for name in ("ep", "etp")),
        "exposed_dp_s": data,
        "cost": report.cost,
        "energy_j": report.energy_j,
        "power_w": report.power_w,
        "p_oom": report.p_oom,
        "leaning": sum(report.trust.get(name, 0.0) for name in LEANING),
    }
