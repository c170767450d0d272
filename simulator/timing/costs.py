"""What the nodes of folded graphs cost: each stored node once, however often it runs.

Each distinct op of all graphs is asked once, warm and once cold; a node lies between the two by how cold its
inputs are (:mod:`.residency`), on average over the repetitions of its block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...datasets.devices import Device
from ...datasets.ops import KINDS, Op
from ..engines import Engine
from ..graph import REST_SUFFIX, Graph, Node
from ..question.calibration import cell_of, family_of
from .coldness import coldness_of, concatenate, warm
from .latencies import host_times, node_latencies, python_us

DATA_PARALLEL = ("dp", "dp_cp", "edp")  # groups that sum gradients and shard optimizers


@dataclass(frozen=True)
class Costs:
    """Stored nodes of a graph with their times; arrays have one entry per stored node.

    ``repeats`` is how often each runs, ``block`` the block it stands in. ``kernel_us`` is the work, ``host_us`` what
    the host spends to issue it; ``low`` and ``high`` bound the work as factors, ``host_low`` and ``host_high`` the
    host's time; ``witness`` says who knows the work. ``outside_graphs``: the host issues them, though CUDA graphs hold
    others of the framework.
    """

    graph: Graph
    nodes: Sequence[Node]
    block: np.ndarray
    repeats: np.ndarray
    kernel_us: np.ndarray
    host_us: np.ndarray
    host_low: float
    host_high: float
    low: np.ndarray
    high: np.ndarray
    engine: np.ndarray
    in_envelope: np.ndarray
    witness: np.ndarray
    outside_graphs: bool = False


def cost_graphs(
    graphs: Sequence[Graph],
    device: Device,
    engine: Engine,
    issue: Mapping[str, float] | None = None,
    eager: bool = False,
    without: Sequence[str] = (),
) -> list[Costs]:
    """The costs of every graph, all ops asked together.

    ``issue`` is what a framework adds to the host's time (``Stack.issue_us``); ``eager``: it calls operators one by
    one from a model's Python (``Stack.eager``); ``without`` names modifiers that are left out (:mod:`.modifiers`).
    """
    stored = [[node for block in graph.blocks for node in block.nodes] for graph in graphs]
    nodes = [node for graph_nodes in stored for node in graph_nodes]
    cold = (
        warm(len(nodes)) if "cold_caches" in without else concatenate([coldness_of(graph, device) for graph in graphs])
    )
    kernel, *others = node_latencies(nodes, cold, device, engine)
    times = host_times(nodes, device, engine, eager)
    host = times.us + python_us(nodes, cold)
    if issue:
        issued = [0.0 if node.source.endswith(REST_SUFFIX) else issue_of(node.op, issue) for node in nodes]
        host = host + np.array(issued)
    if "host_issue" in without:
        host = np.zeros(len(nodes))
    costs = []
    start = 0
    for graph, own in zip(graphs, stored, strict=True):
        at = slice(start, start + len(own))
        lengths = [len(block.nodes) for block in graph.blocks]
        block = np.repeat(np.arange(len(graph.blocks)), lengths)
        repeats = np.repeat([block.repeat for block in graph.blocks], lengths)
        low, high, answered, inside, witness = (each[at] for each in others)
        of_host = host[at], times.low, times.high
        costs.append(Costs(graph, own, block, repeats, kernel[at], *of_host, low, high, answered, inside, witness))
        start = at.stop
    return costs


def slow_compute(costs: Costs, slowdown: float) -> Costs:
    """The same where everything but communication takes ``slowdown`` times longer."""
    if slowdown == 1.0:
        return costs
    computes = np.array([node.op is None or node.op.cost.unit != "network" for node in costs.nodes], dtype=bool)
    return replace(costs, kernel_us=costs.kernel_us * np.where(computes, slowdown, 1.0))


def multiply_kernels(costs: Costs, factor: np.ndarray | None) -> Costs:
    """The costs with the kernels of each node ``factor`` [nodes] times longer; the very same where nothing changes."""
    if factor is None or (factor == 1.0).all():
        return costs
    return replace(costs, kernel_us=costs.kernel_us * factor)


def scale_times(costs: Costs, *scales: Mapping[str, float]) -> Costs:
    """The costs with times multiplied by kind of op, family or ``host``; the very same where nothing changes."""
    if not any(scales):
        return costs
    factor = np.array([scale_of(node, *scales) for node in costs.nodes])
    host = next((scale["host"] for scale in scales if "host" in scale), 1.0)
    return replace(costs, kernel_us=costs.kernel_us * factor, host_us=costs.host_us * host)


def scale_of(node: Node, *scales: Mapping[str, float]) -> float:
    """The factor for a node: that of its cell, its kind, its family or of ``*``, in the first that has any; else 1.

    Cells are families of calibrations with the op's format (:func:`..question.calibration.cell_of`): they go first, as
    a family may be called like a kind. Families are those of calibrations and those of kinds.
    """
    kind = node.op.kind if node.op else ""
    names = (cell_of(node.op), kind, family_of(node.op), KINDS[kind].family if kind else "pointwise", "*")
    return next((float(scale[name]) for scale in scales for name in names if name in scale), 1.0)


def issue_of(op: Op | None, issue: Mapping[str, float]) -> float:
    """Microseconds of a framework's Python before an op: of its kind, else its family, else ``*``; and by expert."""
    if op is None:
        return issue.get("*", 0.0)
    names = (op.kind, KINDS[op.kind].family, "*")
    issue_us = next((issue[name] for name in names if name in issue), 0.0)
    if op.kind != "grouped_gemm":
        return issue_us
    return issue_us + op.experts * issue.get(f"expert_{op.dtype}", issue.get("expert", 0.0))
