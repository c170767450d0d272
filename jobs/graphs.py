"""The graphs of the steps that a job runs, and the ops in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..datasets.ops import Op
from ..simulator.graph import Graph
from ..simulator.trace import Workload, trace


def trace_all(model: Any, workloads: Mapping[str, Workload], precision: str, cache_dir: Path) -> dict[str, Graph]:
    """The graph of each workload."""
    return {name: trace(model, workload, precision, cache_dir) for name, workload in workloads.items()}


def ops_of(graphs: Any) -> set[Op]:
    """Every distinct op of some graphs."""
    return {node.op for graph in graphs for node, _ in graph.weighted() if node.op is not None}
