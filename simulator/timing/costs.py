"""What the nodes of folded graphs cost: each stored node once, however often it runs.

Each distinct op of all graphs is asked once, warm and once cold; a node lies between the two by how cold its
inputs are (:mod:`.residency`). A block is walked for two repetitions and the second counts for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...datasets.devices import Device
from ...datasets.ops import KINDS, Op
from ..engines import Engine
from ..graph import REST, Graph, Node
from .latencies import host_times, node_latencies
from .residency import CODE_BYTES, cold_fractions

WALKED = 2  # repetitions of a block


@dataclass(frozen=True)
class Costs:
    """Stored nodes of a graph with their times; arrays have one entry per stored node.

    ``repeats`` is how often each runs, ``block`` the block it stands in. ``kernel_us`` is the work, ``host_us`` what
    the host spends to issue it; ``low`` and ``high`` bound the work as factors.
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


def cost_graphs(
    graphs: Sequence[Graph],
    device: Device,
    engine: Engine,
    scale: Mapping[str, float] | None = None,
    issue: Mapping[str, float] | None = None,
) -> list[Costs]:
    """The costs of every graph, all ops asked together; ``scale`` multiplies times by kind, family or ``host``.

    ``issue`` is what a framework adds to the host's time (``Stack.issue_us``).
    """
    walked: list[Node] = []
    cold: list[np.ndarray] = []
    kept: list[np.ndarray] = []
    code_bytes = CODE_BYTES if device.synchronous else 0
    for graph in graphs:
        nodes, last = _walk(graph)
        fractions = cold_fractions(nodes, graph.tensor_bytes, device.l2_mib * 2**20, code_bytes)
        kept.append(last + len(walked))
        walked += nodes
        cold.append(fractions)
    kernel, low, high, names, inside = node_latencies(
        walked, np.concatenate(cold) if cold else np.zeros(0), device, engine
    )
    host = host_times(walked, device, engine)
    if issue:
        host = host + np.array([0.0 if node.source.endswith(REST) else issue_of(node.op, issue) for node in walked])
    if scale:
        kernel = kernel * np.array([scale_of(node, scale) for node in walked])
        host = host * scale.get("host", 1.0)
    return [
        Costs(
            graph,
            [walked[i] for i in at.tolist()],
            np.repeat(np.arange(len(graph.blocks)), [len(b.nodes) for b in graph.blocks]),
            np.repeat([b.repeat for b in graph.blocks], [len(b.nodes) for b in graph.blocks]),
            kernel[at],
            host[at],
            low[at],
            high[at],
            names[at],
            inside[at],
        )
        for graph, at in zip(graphs, kept, strict=True)
    ]


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


def scale_of(node: Node, scale: Mapping[str, float]) -> float:
    """The factor for a node: that of its kind, else of its family, else of ``*``, else 1.

    ``gemm_bf16`` counts for 16-bit products alone and goes before ``gemm``: clocks under load depend on the format.
    """
    kind = node.op.kind if node.op else ""
    family = KINDS[kind].family if kind else "pointwise"
    dtype = {"fp16": "bf16"}.get(node.op.dtype, node.op.dtype) if node.op else ""
    for name in (f"{kind}_{dtype}", f"{family}_{dtype}", kind, family, "*"):
        if name in scale:
            return float(scale[name])
    return 1.0


def issue_of(op: Op | None, issue: Mapping[str, float]) -> float:
    """Microseconds of a framework's Python before an op: of its kind, else its family, else ``*``; and by expert."""
    if op is None:
        return issue.get("*", 0.0)
    names = (op.kind, KINDS[op.kind].family, "*")
    own = next((issue[name] for name in names if name in issue), 0.0)
    if op.kind != "grouped_gemm":
        return own
    return own + op.experts * issue.get(f"expert_{op.dtype}", issue.get("expert", 0.0))


def _walk(graph: Graph) -> tuple[list[Node], np.ndarray]:
    """Nodes of at most ``WALKED`` repetitions of every block, and where the last of each stored node stands."""
    nodes: list[Node] = []
    at: list[np.ndarray] = []
    for block in graph.blocks:
        for repetition in range(min(WALKED, block.repeat)):
            start = len(nodes)
            nodes += block.repetition(repetition)
        at.append(np.arange(start, start + len(block.nodes)))
    return nodes, np.concatenate(at) if at else np.zeros(0, dtype=np.int64)
