"""Whole reports of iterations that decode, of the ways to serve that an answer shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ....models.power import capped
from ...question.requests import plan_of
from ...report.answer import InferenceReport
from ...simulate import simulate_all
from .played import find
from .replicas import LayoutReplica, Replicas
from .request import LAYOUT, ServedSearchRequest

if TYPE_CHECKING:
    from ...engines.bench import Bench

ALIKE = ("cluster", "policy", *LAYOUT, "batch")  # rows that are the same in these have one report


def decode_reports(
    request: ServedSearchRequest, replica: LayoutReplica, batches: Sequence[int], bench: Bench
) -> list[InferenceReport]:
    """The whole reports of the iterations in which so many sequences of a replica decode."""
    step, context = replica.step, round(request.input_len + request.output_len / 2)
    works = [replace(step.work, kind="decode", batch=batch, input_len=context, cache="static") for batch in batches]
    device = capped(bench.device(step.device, step.cluster), step.power_cap_w)
    plan = plan_of(step, device)
    engine = bench.engine_with_links(device, step.cluster, step.network, plan)
    study: Any = step.network.faults_study
    reports = simulate_all(step.model, works, plan, device, engine, bench.graphs, study)
    return [report for report in reports if isinstance(report, InferenceReport)]


@dataclass(frozen=True)
class DecodeReports:
    """Reports of rows: those that are asked for together are made together, and kept."""

    request: ServedSearchRequest
    replicas: Replicas
    bench: Bench
    reports: dict[tuple[Any, ...], InferenceReport] = field(default_factory=dict)
    factors: dict[tuple[Any, ...], tuple[float, float]] = field(default_factory=dict)

    def ahead(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Make the reports of rows that will be asked for one by one."""
        batches: dict[int, tuple[LayoutReplica, dict[tuple[Any, ...], int]]] = {}
        for row in rows:
            if (key := key_of(row)) not in self.reports and key not in self.factors:
                replica = find(row, LAYOUT, self.replicas)
                batches.setdefault(id(replica), (replica, {}))[1][key] = row["batch"]
        for replica, by_key in batches.values():
            new_reports = decode_reports(self.request, replica, list(by_key.values()), self.bench)
            self.reports.update(zip(by_key, new_reports, strict=True))

    def of(self, row: Mapping[str, Any]) -> InferenceReport:
        """The whole report of a row's iteration that decodes."""
        report = self.reports.get(key_of(row))
        return report or decode_reports(self.request, find(row, LAYOUT, self.replicas), [row["batch"]], self.bench)[0]

    def interval(self, row: Mapping[str, Any]) -> tuple[float, float]:
        """Low and high of a row's times of iterations by that of the answer, at the coverage of its report."""
        key = key_of(row)
        if key not in self.factors:
            report = self.of(row)
            self.factors[key] = report.low_ms / report.e2e_ms, report.high_ms / report.e2e_ms
        return self.factors[key]


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a report is of."""
    return tuple(row[name] for name in ("precision", *ALIKE))
