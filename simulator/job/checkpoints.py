"""What a checkpoint weighs, how long training waits for it, and how often it is best written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...datasets.clusters import Cluster
from ...datasets.devices import Device
from ..graph import FROZEN, WEIGHT
from ..memory.breakdown import GIB
from ..passes.expert import is_expert
from ..report.answer import StepReport
from ..step.state import Step
from .request import JobCheckpoints

# NVIDIA DGX SuperPOD reference architecture, "Guidelines for storage performance", column "better": GB/s of a node
# alone, and of a scalable unit of 32 nodes
NODE_WRITE_GBPS, NODE_READ_GBPS = 4.0, 8.0
UNIT_NODES, UNIT_WRITE_GBPS, UNIT_READ_GBPS = 32, 20.0, 40.0
WEIGHTS = [WEIGHT, FROZEN]
TRIED = tuple(2.0 ** (half / 2) for half in range(-4, 5))  # intervals that are lived through, times Daly's


@dataclass(frozen=True)
class CheckpointCost:
    """Seconds of a checkpoint: ``blocking_s`` that training waits, ``durable_s`` from then until it can be read,
    ``load_s`` of a restart."""

    size_gb: float
    write_gbps: float
    read_gbps: float
    blocking_s: float
    durable_s: float
    load_s: float


def state_gb(report: StepReport) -> float:
    """GB of weights and optimizer states of a job, each once, by the memory walk of its stages.

    What data ranks hold alike is saved by one of them: weights below ZeRO 3, optimizer states without ZeRO. Experts
    have copies of their own, on fewer ranks.
    """
    state = report.state
    assert state is not None
    layout = state.plan.parallel
    ranks = report.devices // layout.pp
    gib = 0.0
    for stage, memory in enumerate(state.memories):
        share = expert_share(state.main, stage)
        for group, weight_share in (("dp_cp", 1.0 - share), ("edp", share)):
            alike = max(state.plan.group(group).ranks, 1)
            copy = max(ranks // alike, 1)  # ranks that hold one copy of what is not sharded
            sharded = copy * min(layout.shard or alike, alike)  # HSDP: so many ranks share a copy
            weights = sharded if layout.zero_stage == 3 else copy
            states = sharded if layout.zero_stage else copy
            gib += weight_share * (memory.weights_gib * weights + memory.optimizer_gib * states)
    return gib * GIB / 1e9


def expert_share(step: Step, stage: int) -> float:
    """The share of a stage's bytes of weights, on one rank, that are those of routed experts."""
    expert_bytes = all_bytes = 0
    for chunk in step.parts(stage):
        graph = step.chunks[chunk].graph
        weight = np.isin(graph.tensor_roles, WEIGHTS)
        expert = np.zeros(len(weight), dtype=bool)
        for block in graph.blocks:
            mine = np.array([is_expert(node.path) and node.phase != "optimizer" for node in block.nodes], dtype=bool)
            touched = mine[block.read.node]
            ids = block.read.tensor[touched] + block.read.step[touched] * np.arange(block.repeat)[:, None]
            expert[ids.ravel()] = True
        expert_bytes += int(graph.tensor_bytes[weight & expert].sum())
        all_bytes += int(graph.tensor_bytes[weight].sum())
    return expert_bytes / all_bytes if all_bytes else 0.0


def cost_of(policy: JobCheckpoints, size_gb: float, cluster: Cluster, device: Device | None) -> CheckpointCost:
    """What a checkpoint of so many GB costs on a cluster.

    Training waits until it is written; ``asynchronous`` until the GPUs have copied their parts to the host.
    """
    write_gbps = policy.store_gbps or guideline_gbps(cluster.nodes, NODE_WRITE_GBPS, UNIT_WRITE_GBPS)
    read_gbps = policy.read_gbps or policy.store_gbps or guideline_gbps(cluster.nodes, NODE_READ_GBPS, UNIT_READ_GBPS)
    written_s = size_gb / write_gbps
    copied_s = 0.0
    if policy.asynchronous and device is not None and device.pcie_gbps:
        copied_s = size_gb / (device.pcie_gbps * cluster.devices)
    blocking, durable = (copied_s, written_s) if policy.asynchronous else (written_s, 0.0)
    return CheckpointCost(size_gb, write_gbps, read_gbps, blocking, durable, size_gb / read_gbps)


def guideline_gbps(nodes: int, node: float, unit: float) -> float:
    """GB/s of a store for so many nodes: what a node can take at most, and what a unit of them shares."""
    return min(node * nodes, max(unit, unit * nodes / UNIT_NODES))


def daly_s(blocking_s: float, mean_s: float) -> float:
    """The interval of checkpoints that cost ``blocking_s`` where interruptions come every ``mean_s``.

    Daly 2006 (doi 10.1016/j.future.2004.11.016), eq. 37, seconds of work between two; of small costs that is
    Young's sqrt(2 x cost x mean) (1974). From a cost of twice the mean on it is the mean.
    """
    if blocking_s >= 2.0 * mean_s:
        return mean_s
    ratio = blocking_s / (2.0 * mean_s)
    return math.sqrt(2.0 * blocking_s * mean_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - blocking_s


def best_interval_s(around_s: float, longest_s: float, mean_s_of: Callable[[float], float]) -> float:
    """The interval with the shortest mean life of those around one, none of them longer than the job."""
    tried = np.unique(np.minimum(around_s * np.array(TRIED), longest_s))
    means = [mean_s_of(float(interval)) for interval in tried]
    return float(tried[int(np.argmin(means))])
