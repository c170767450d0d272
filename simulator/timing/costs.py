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
from ..graph import REST, Graph, Node
from ..question.calibration import cell_of, family_of
from .coldness import coldness_of, joined
from .latencies import host_times, node_latencies, python_us

DATA_PARALLEL = ("dp", "dp_cp", "edp")  # groups that sum gradients and shard optimizers


@dataclass(frozen=True)
class Costs:
    """Stored nodes of a graph with their times; arrays have one entry per stored node.

    ``repeats`` is how often each runs, ``block`` the block it stands in. ``kernel_us`` is the work, ``host_us`` what
    the host spends to issue it; ``low`` and ``high`` bound the work as factors; ``witness`` says who knows the work.
    """

    graph: Graph
    nodes: Sequence[Node]
    block: np.ndarray
    repeats: np.ndarray
    kernel_us: np.ndarray
    host_us: np.ndarray
    low: np.ndarray
    high: np.ndarray
    engine: np.ndarray
    in_envelope: np.ndarray
    witness: np.ndarray


def cost_graphs(
    graphs: Sequence[Graph],
    device: Device,
    engine: Engine,
    issue: Mapping[str, float] | None = None,
) -> list[Costs]:
    """The costs of every graph, all ops asked together.

    ``issue`` is what a framework adds to the host's time (``Stack.issue_us``).
    """
    stored = [[node for block in graph.blocks for node in block.nodes] for graph in graphs]
    nodes = [node for each in stored for node in each]
    cold = joined([coldness_of(graph, device) for graph in graphs])
    kernel, *others = node_latencies(nodes, cold, device, engine)
    host = host_times(nodes, device, engine) + python_us(nodes, cold)
    if issue:
        host = host + np.array([0.0 if node.source.endswith(REST) else issue_of(node.op, issue) for node in nodes])
    found = []
    start = 0
    for graph, own in zip(graphs, stored, strict=True):
        at = slice(start, start + len(own))
        lengths = [len(block.nodes) for block in graph.blocks]
        block = np.repeat(np.arange(len(graph.blocks)), lengths)
        repeats = np.repeat([block.repeat for block in graph.blocks], lengths)
        found.append(Costs(graph, own, block, repeats, kernel[at], host[at], *(each[at] for each in others)))
        start = at.stop
    return found


def slowed(costs: Costs, slowdown: float) -> Costs:
    """The same where everything but communication takes ``slowdown`` times longer."""
    if slowdown == 1.0:
        return costs
    own = np.array([node.op is None or node.op.cost.unit != "network" for node in costs.nodes], dtype=bool)
    return replace(costs, kernel_us=costs.kernel_us * np.where(own, slowdown, 1.0))


def longer(costs: Costs, factor: np.ndarray | None) -> Costs:
    """The costs with each node ``factor`` [nodes] times longer; the very same where nothing changes."""
    if factor is None or (factor == 1.0).all():
        return costs
    return replace(costs, kernel_us=costs.kernel_us * factor)


def scaled(costs: Costs, *scales: Mapping[str, float]) -> Costs:
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
    own = next((issue[name] for name in names if name in issue), 0.0)
    if op.kind != "grouped_gemm":
        return own
    return own + op.experts * issue.get(f"expert_{op.dtype}", issue.get("expert", 0.0))


def stepping(costs: Costs, step_us: Mapping[str, float]) -> Costs:
    """The costs with what the steps of rings between nodes take longer (``Stack.step_us``)."""
    if not step_us:
        return costs
    return replace(costs, kernel_us=costs.kernel_us + np.array([_steps(node, step_us) for node in costs.nodes]))


def ringing(costs: Costs, factor: float) -> Costs:
    """The costs with gathers and scatters inside a node ``factor`` times longer (``Stack.ring_factor``)."""
    if factor == 1.0:
        return costs
    own = np.array([_rings(node) for node in costs.nodes], dtype=bool)
    return replace(costs, kernel_us=costs.kernel_us * np.where(own, factor, 1.0))


def _rings(node: Node) -> bool:
    """Whether a node is a gather or a scatter between the ranks of a node."""
    op = node.op
    return op is not None and op.kind in ("all_gather", "reduce_scatter") and op.ranks <= op.ranks_per_node


def _steps(node: Node, step_us: Mapping[str, float]) -> float:
    """What the steps of a ring that leaves its node take longer: one to each other rank, to reduce and gather two."""
    op = node.op
    if op is None or not node.group or op.ranks <= op.ranks_per_node or node.source.endswith(REST):
        return 0.0
    ring = 2.0 if op.kind == "all_reduce" else 1.0 if op.kind in ("all_gather", "reduce_scatter") else 0.0
    own = step_us.get(op.kind, 0.0) if op.kind == "all_reduce" else step_us.get(node.group, step_us.get("*", 0.0))
    return ring * own * (op.ranks - 1)
