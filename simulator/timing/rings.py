"""Rings of a framework's NCCL that take longer than the tables and the network's law have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..graph import REST_SUFFIX, Node
from .costs import Costs

GATHERS = ("all_gather", "reduce_scatter")


def add_ring_steps(costs: Costs, step_us: Mapping[str, float]) -> Costs:
    """The costs with what the steps of rings between nodes take longer (``Stack.step_us``)."""
    if not step_us:
        return costs
    return replace(costs, kernel_us=costs.kernel_us + np.array([_steps_us(node, step_us) for node in costs.nodes]))


def slow_rings(costs: Costs, factor: float) -> Costs:
    """The costs with gathers and scatters inside a node ``factor`` times longer (``Stack.ring_factor``)."""
    if factor == 1.0:
        return costs
    inside = np.array([_within_node(node) for node in costs.nodes], dtype=bool)
    return replace(costs, kernel_us=costs.kernel_us * np.where(inside, factor, 1.0))


def _within_node(node: Node) -> bool:
    """Whether a node of the graph is a gather or a scatter between the ranks of one node of the cluster."""
    op = node.op
    return op is not None and op.kind in GATHERS and op.ranks <= op.ranks_per_node


def _steps_us(node: Node, step_us: Mapping[str, float]) -> float:
    """What the steps of a ring that leaves its node take longer: one to each other rank, to reduce and gather two."""
    op = node.op
    if op is None or not node.group or op.ranks <= op.ranks_per_node or node.source.endswith(REST_SUFFIX):
        return 0.0
    ring = 2.0 if op.kind == "all_reduce" else 1.0 if op.kind in GATHERS else 0.0
    each_us = step_us.get(op.kind, 0.0) if op.kind == "all_reduce" else step_us.get(node.group, step_us.get("*", 0.0))
    return ring * each_us * (op.ranks - 1)
