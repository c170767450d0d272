"""What hosts take for collectives beside issuing them: checks of every rank, and shares that Python cuts one by one;
and for prompts, where engines have CUDA graphs of decoding alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...datasets.devices import Device
from ...datasets.ops import KINDS
from ..graph import REST_SUFFIX, Node
from ..question.plan import Stack
from .costs import DATA_PARALLEL, Costs
from .latencies import HOSTS_APART

MERGED = {"fused.qkv": 3, "fused.gate_up": 2}  # forward products of merged weights, and of how many


def add_collective_checks(costs: Costs, stack: Stack) -> Costs:
    """The costs with what hosts take to check collectives before they issue them, once a rank (``Stack.check_us``).

    Messages between the ranks of a node may be faster (``Stack.check_inside_us``; 0: they are not).
    """
    if not stack.check_us:
        return costs
    extra = np.zeros(len(costs.nodes))
    for position, node in enumerate(costs.nodes):
        if node.op is not None and node.group and _checks(node):
            inside = node.op.ranks <= node.op.ranks_per_node
            faster = stack.check_inside_us if inside else 0.0
            extra[position] = node.op.ranks * (faster or stack.check_us)
    return replace(costs, host_us=costs.host_us + extra)


def add_shard_copies(costs: Costs, share_us: float) -> Costs:
    """The costs with what hosts take to cut weights and gradients in shares of ranks (``Stack.share_us``): ZeRO-1's.

    Once for each weight and rank; weights that one product reads merged are one.
    """
    if not share_us:
        return costs
    extra, apart = np.zeros(len(costs.nodes)), _weights_apart(costs)
    for position, node in enumerate(costs.nodes):
        if node.op is not None and node.group in DATA_PARALLEL and node.op.kind in ("all_gather", "reduce_scatter"):
            extra[position] = share_us * node.op.ranks * len(node.reads) * apart
    return replace(costs, host_us=costs.host_us + extra)


def issue_prompts(costs: Costs, issue_us: float, device: Device) -> Costs:
    """The costs of a pass over prompts where the host takes ``issue_us`` for each kernel (``Stack.prompt_issue_us``).

    Read off one host: on another it may be :data:`.latencies.HOSTS_APART` times as long or short. A host that computes
    itself issues nothing.
    """
    if not issue_us or device.synchronous:
        return costs
    host_us = np.full(len(costs.nodes), issue_us)
    low, high = 1.0 / HOSTS_APART, HOSTS_APART
    return replace(costs, host_us=host_us, host_low=low, host_high=high, outside_graphs=True)


def _weights_apart(costs: Costs) -> float:
    """Weights in the framework's own list for each weight of the model: those of a merged product count as one."""
    gathered = [len(node.reads) for node in costs.nodes if node.phase == "optimizer" and node.group in DATA_PARALLEL]
    merged = [MERGED.get(node.source, 1) - 1 if node.phase == "forward" else 0 for node in costs.nodes]
    return 1.0 - float(costs.repeats @ merged) / sum(gathered) if gathered else 1.0


def _checks(node: Node) -> bool:
    """Whether a node is a collective that torch.distributed checks: sends are not, nor are ZeRO's coalesced ones."""
    if node.op is None or KINDS[node.op.kind].family != "collective" or node.source.endswith(REST_SUFFIX):
        return False
    return node.op.kind == "all_reduce" or node.group not in DATA_PARALLEL
