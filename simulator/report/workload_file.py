"""The report of a step that a file of SimAI describes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..step.workload_file import FileCollective, FileStep
from .step import plain


@dataclass(frozen=True)
class FileReport:
    """A step of a workload file. Seconds; parts of ``breakdown`` add up to the step.

    ``communications`` are all distinct collectives, those that take longest in all first; ``provenance`` is the share
    of their time by who answered.
    """

    step_time_s: float
    low_s: float
    high_s: float
    workload: str
    cluster: str
    device: str
    devices: int
    parallel: Mapping[str, int]
    breakdown: Mapping[str, Any]
    communications: tuple[FileCollective, ...]
    provenance: Mapping[str, float]
    wall_time_s: float
    network: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values: dict[str, Any] = plain(self)
        return values | {"communications": [exchange._asdict() for exchange in self.communications]}


def file_report(step: FileStep, name: str, started: float, network: Mapping[str, Any]) -> FileReport:
    """The report; ``started`` is when the question came (``perf_counter``), ``network`` what links do."""
    plan, account = step.plan, step.account
    low, high = (_bound(step, bound) for bound in ("low_us", "high_us"))
    return FileReport(
        step_time_s=step.total_us * 1e-6,
        low_s=low * 1e-6,
        high_s=high * 1e-6,
        workload=name,
        cluster=plan.cluster.id,
        device=plan.cluster.device,
        devices=plan.cluster.devices,
        parallel={**{key: value for key, value in step.workload.degrees.items() if key != "gpus"}, "dp": plan.dp},
        breakdown={
            "compute_s": account.compute * 1e-6,
            "exposed_comm_s": sum(account.exposed.values()) * 1e-6,
            "bubble_s": step.bubble_us * 1e-6,
            "by_parallelism": {group: us * 1e-6 for group, us in account.exposed.items() if us > 0},
        },
        communications=tuple(
            sorted(step.communications.values(), key=lambda exchange: -exchange.time_us * exchange.times)
        ),
        provenance=_provenance(step),
        wall_time_s=time.perf_counter() - started,
        network=network,
    )


def _bound(step: FileStep, bound: str) -> float:
    """The step if each group's communication took as long as its bound says; what is hidden stays hidden."""
    change = 0.0
    for group, exposed in step.account.exposed.items():
        names = (group, "edp") if group == "dp" else (group,)
        exchanges = [exchange for exchange in step.communications.values() if exchange.group in names]
        total_us = sum(exchange.time_us * exchange.times for exchange in exchanges)
        if total_us:
            change += exposed * (
                sum(getattr(exchange, bound) * exchange.times for exchange in exchanges) / total_us - 1.0
            )
    return step.total_us + change


def _provenance(step: FileStep) -> dict[str, float]:
    shares: dict[str, float] = {}
    for exchange in step.communications.values():
        shares[exchange.engine] = shares.get(exchange.engine, 0.0) + exchange.time_us * exchange.times
    total_us = sum(shares.values())
    return {name: time_us / total_us for name, time_us in shares.items()} if total_us else {}
