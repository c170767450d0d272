"""GPUs that train and GPUs that roll out: all of a cluster in turns, or a part each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...datasets.clusters import Cluster
from ..question.canonical import RequestError
from .request import PostTrainRequest

ALL, TRAINING, ROLLOUT = "all GPUs", "training", "rollout"
MOST_SPLITS = 6  # that are tried before those beside the best


@dataclass(frozen=True)
class GpuGroups:
    """The clusters that train and that roll out; the same one where they are ``colocated``."""

    training: Cluster
    rollout: Cluster | None
    colocated: bool
    nodes: int  # of both together

    @property
    def rollout_gpus(self) -> int:
        """GPUs that roll out."""
        return 0 if self.rollout is None else self.rollout.devices

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.training.devices + (0 if self.colocated else self.rollout_gpus)


def colocated(request: PostTrainRequest) -> GpuGroups:
    """All GPUs in turns. RequestError where replicas do not share them out."""
    cluster = cluster_of(request)
    if not request.rolls_out:
        return GpuGroups(cluster, None, True, cluster.nodes)
    if cluster.devices % request.rollout.replica_gpus:
        raise RequestError(
            f"rollout.tp={request.rollout.tp} pp={request.rollout.pp} do not divide the {cluster.devices} GPUs"
        )
    return GpuGroups(cluster, cluster, True, cluster.nodes)


def apart(request: PostTrainRequest, gpus: int) -> GpuGroups:
    """So many GPUs that roll out, and all others that train: whole nodes, or parts of one node."""
    cluster = cluster_of(request)
    training, rollout = cluster_of_gpus(cluster, cluster.devices - gpus), cluster_of_gpus(cluster, gpus)
    return GpuGroups(training, rollout, False, cluster.nodes)


def cluster_of_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """So many GPUs of a cluster. RequestError for parts of several nodes."""
    if gpus % cluster.devices_per_node == 0:
        return replace(cluster, nodes=gpus // cluster.devices_per_node)
    if cluster.nodes > 1:
        raise RequestError(f"{gpus} GPUs are no whole nodes of {cluster.devices_per_node}: a node rolls out or trains")
    return replace(cluster, devices_per_node=gpus)


def splits(request: PostTrainRequest) -> list[int]:
    """Numbers of GPUs that could roll out, ascending. RequestError where there is none."""
    cluster, layout = cluster_of(request), request.step.parallel
    of_copy = layout.tp * layout.pp * layout.cp
    unit = 1 if cluster.nodes == 1 else cluster.devices_per_node
    counts = [
        gpus
        for gpus in range(unit, cluster.devices, unit)
        if gpus % request.rollout.replica_gpus == 0 and (cluster.devices - gpus) % of_copy == 0
    ]
    chosen_gpus = request.rollout.gpus
    if chosen_gpus is not None:
        counts = [gpus for gpus in counts if gpus == chosen_gpus]
    if not counts:
        what = f"rollout.gpus={chosen_gpus} leaves" if chosen_gpus is not None else "no split leaves"
        raise RequestError(
            f"{what} whole replicas of {request.rollout.replica_gpus} GPUs and whole copies of {of_copy} GPUs that "
            f"train of {cluster.devices}: take other degrees or more nodes"
        )
    return counts


def spaced(counts: list[int]) -> list[int]:
    """A few of many numbers, evenly."""
    if len(counts) <= MOST_SPLITS:
        return counts
    indices = {round(step * (len(counts) - 1) / (MOST_SPLITS - 1)) for step in range(MOST_SPLITS)}
    return [counts[index] for index in sorted(indices)]


def beside(counts: list[int], best: int) -> Iterator[int]:
    """The numbers next to the best one."""
    index = counts.index(best)
    for other in (index - 1, index + 1):
        if 0 <= other < len(counts):
            yield counts[other]


def cluster_of(request: PostTrainRequest) -> Cluster:
    """The cluster of a request."""
    assert request.step.cluster is not None
    return request.step.cluster
