"""One point simulated; what is found of it is a flat row."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from ...datasets.devices import Device
from ...datasets.own_errors import refusal
from ...models import power
from ..engines import FusedEngine
from ..question.plan import Plan
from ..question.requests import plan_of
from ..report.account import report_of
from ..report.answer import StepReport
from ..report.trust import UNMEASURED_SOURCES
from ..simulate import laid_out, timed_state
from ..step.build import LaidOut
from .bounds import Probe, probe
from .outcome import OK, Row
from .request import SearchRequest, SearchSetup, request_of, set_up

if TYPE_CHECKING:
    from ..engines.bench import Bench

TOO_LARGE, REFUSED = "memory", "refused"
MEMORY = ("peak_gib", "weights_gib", "gradients_gib", "optimizer_gib", "activations_gib", "other_gib")
TIMES = ("compute_s", "exposed_comm_s", "bubble_s", "optimizer_s", "host_s")


class Evaluator:
    """Simulates points of one search from a workbench, whose engines it keeps."""

    def __init__(self, setup: SearchSetup, bench: Bench) -> None:
        self.setup = setup
        self.bench = bench
        self.graphs = bench.graphs
        self.places: dict[tuple[Any, ...], tuple[Device, FusedEngine]] = {}

    @classmethod
    def of(cls, request: SearchRequest, bench: Bench) -> Self:
        """The evaluator of a request."""
        return cls(set_up(request), bench)

    def place(self, point: Mapping[str, Any]) -> tuple[Plan, Device, FusedEngine]:
        """Plan, device and engine of a point."""
        request = request_of(self.setup, point)
        key = point["cluster"], point["nodes"]
        if key not in self.places:
            device = self.bench.device(request.device, request.cluster)
            device = power.capped(device, request.power_cap_w)
            self.places[key] = device, self.bench.engine(device, request.cluster)
        device, engine = self.places[key]
        return plan_of(request, device), device, engine

    def report(self, point: Mapping[str, Any]) -> StepReport:
        """The whole report of a point. PlanError where its parts do not go together."""
        return self._timed(time.perf_counter(), *self._laid(point)[::2])

    def _laid(self, point: Mapping[str, Any]) -> tuple[LaidOut, Device, FusedEngine]:
        """A point before it is timed, and what times it."""
        plan, device, engine = self.place(point)
        work = request_of(self.setup, point).work
        return laid_out(self.setup.base.model, work, plan, device, self.graphs), device, engine

    def _timed(self, started: float, laid: LaidOut, engine: FusedEngine) -> StepReport:
        report = report_of(timed_state(laid, engine), started, {})
        assert isinstance(report, StepReport)
        return report

    def probe(self, point: Mapping[str, Any]) -> Probe | None:
        """The probe (:func:`.bounds.probe`) of a point's family."""
        return probe(self, point)

    def row(self, point: Mapping[str, Any]) -> Row:
        """What is found of a point: ``status`` says whether it was timed, did not fit, or why it cannot be."""
        started = time.perf_counter()
        try:
            laid, device, engine = self._laid(point)
            if laid.peak_gib > device.memory_gib:
                return _row(
                    point, TOO_LARGE, f"{laid.peak_gib:.1f} GiB of {device.memory_gib:g}", peak_gib=laid.peak_gib
                )
            report = self._timed(started, laid, engine)
        except ValueError as error:
            return _row(point, REFUSED, refusal(error))
        return _row(point, OK, "", **figures(report))


def _row(point: Mapping[str, Any], status: str, why: str, **row_figures: Any) -> Row:
    return {**point, "status": status, "why": why, **row_figures}


def figures(report: StepReport) -> dict[str, float | None]:
    """The figures of a report that a search compares (:data:`.request.FIGURES`) and the degrees that follow."""
    exposed = report.breakdown.by_parallelism
    groups = {"tp": ("tp",), "cp": ("cp",), "pp": ("pp",), "ep": ("ep", "etp"), "dp": ("dp", "dp_cp", "edp")}
    return {
        "dp": report.parallel["dp"],
        "devices": report.devices,
        "micro_batches": report.parallel["micro_batches"],
        **{name: getattr(report, name) for name in ("step_time_s", "low_s", "high_s")},
        "tokens_per_s": report.tokens_per_s_per_gpu * report.devices,
        **{name: getattr(report, name) for name in ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "hfu")},
        **{name: getattr(report.memory, name) for name in MEMORY},
        **{name: getattr(report.breakdown, name) for name in TIMES},
        **{f"exposed_{name}_s": sum(exposed.get(part_name, 0.0) for part_name in of) for name, of in groups.items()},
        **{name: getattr(report, name) for name in ("cost", "energy_j", "power_w", "p_oom")},
        "leaning": sum(report.trust.get(name, 0.0) for name in UNMEASURED_SOURCES),
    }
