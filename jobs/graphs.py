"""The steps that a job runs for real on one device: their graphs, the ops in them, what they are predicted to take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..datasets.devices import Device
from ..datasets.ops import Op
from ..simulator.engines import Engine
from ..simulator.graph import Graph
from ..simulator.question.work import Work
from ..simulator.report.answer import InferenceReport, StepReport
from ..simulator.simulate import alone, simulate
from ..simulator.trace import Workload, trace


def trace_all(model: Any, workloads: Mapping[str, Workload], precision: str, cache_dir: Path) -> dict[str, Graph]:
    """The graph of each workload."""
    return {name: trace(model, workload, precision, cache_dir) for name, workload in workloads.items()}


def ops_of(graphs: Any) -> set[Op]:
    """Every distinct op of some graphs."""
    return {node.op for graph in graphs for node, _ in graph.weighted() if node.op is not None}


def predict_steps(
    model: Any, workloads: Mapping[str, Workload], device: Device, precision: str, engine: Engine, cache_dir: Path
) -> dict[str, StepReport | InferenceReport]:
    """The report of each workload on one device."""
    plan, reports = alone(device, precision), {}
    for name, workload in workloads.items():
        batch, length = workload.batch, workload.seq_len
        work = Work(workload.kind, length, batch, global_batch=batch, batch=batch, input_len=length)
        reports[name] = simulate(model, work, plan, device, engine, cache_dir)
    return reports
