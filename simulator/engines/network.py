"""Answers for collectives that cross nodes: a cluster's links and NICs, and how NCCL uses them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...datasets.clusters import Cluster, ClusterError
from ...datasets.devices import Device
from ...datasets.dtypes import itemsize
from ...datasets.ops import KINDS
from ..network.law import LL_GBPS, Groups, collective_us
from ..network.tunings import tuning
from .answers import Answers, Columns

FACTOR_INSIDE, FACTOR_ACROSS = 1.3, 1.6  # of the interval each way; what they cover is measured in docs/network.md
COVERAGE = 0.8


@dataclass(frozen=True)
class NetworkEngine:
    """Collectives of a cluster by formula (:mod:`..network.law`); declines every other kind.

    A rank has the same share of its node's NICs as every other: groups that hold only some ranks of a node leave the
    rest of the NICs to the other groups, which communicate at the same time.
    """

    device: Device
    cluster: Cluster
    name: str = "network"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        """ClusterError for a group that is larger than the cluster."""
        answers = Answers.declined(len(next(iter(columns.values()))))
        if KINDS[kind].family not in ("collective", "expert_parallel"):
            return answers
        groups = self.groups(columns)
        if KINDS[kind].family == "collective":
            settings = tuning(self.device, self.cluster.link)
            latency = collective_us(kind, columns["size_bytes"], groups, settings)
        else:
            latency = self._experts(kind, columns, dtype, out_dtype, groups)
        spread = np.where(groups.nodes > 1, FACTOR_ACROSS, FACTOR_INSIDE)
        answers.latency_us[:] = np.maximum(latency, self.device.launch_us)
        answers.low_us[:], answers.high_us[:] = answers.latency_us / spread, answers.latency_us * spread
        answers.engine[:] = self.name
        answers.in_envelope[:] = groups.nodes == 1
        answers.coverage[:] = COVERAGE
        return answers

    def groups(self, columns: Columns) -> Groups:
        """What the groups of n ops run over."""
        cluster, device = self.cluster, self.device
        ranks = np.asarray(columns["ranks"], dtype=np.float64)
        if ranks.max(initial=0) > cluster.devices:
            raise ClusterError(
                f"a group of {ranks.max():.0f} ranks is larger than {cluster.id} with {cluster.nodes} nodes, "
                f"which has {cluster.devices} devices"
            )
        together = np.minimum(columns["ranks_per_node"], cluster.devices_per_node)
        nvlink = cluster.link == "nvlink" and device.link_gbps > 0
        nic = min(cluster.nic_gbps, device.pcie_gbps or np.inf)
        return Groups(
            ranks,
            np.minimum(np.maximum(together, 1), np.maximum(ranks, 1)).astype(np.float64),
            device.link_gbps if nvlink else device.pcie_gbps,
            nic * cluster.nics_per_node / cluster.devices_per_node,
            "nvlink" if nvlink else "pcie",
            cluster.nic_latency_us,
            LL_GBPS.get(device.architecture, LL_GBPS["hopper"]),
            bool(cluster.topology.get("reduces", False)),
        )

    def _experts(self, kind: str, columns: Columns, dtype: str, out_dtype: str, groups: Groups) -> np.ndarray:
        """Tokens cross the fabric once a node they are wanted in, then NVLink (DeepEP; arXiv 2412.19437, sec. 3.2).

        In low-latency mode each goes straight to every expert.
        """
        settings = tuning(self.device, self.cluster.link)
        ranks, nodes = groups.ranks, groups.nodes
        token_bytes = columns["tokens"] * columns["hidden"] * itemsize(dtype if kind == "ep_dispatch" else out_dtype)
        topk, direct = columns["topk"], np.asarray(columns["mode"]) > 0
        far_nodes = np.where(direct, topk * (ranks - groups.per_node) / ranks, _reached(nodes, topk))
        near = np.where(direct, topk * (groups.per_node - 1.0) / ranks, _reached(ranks, topk))
        outside = token_bytes * far_nodes / (groups.outside_gbps * settings.network)
        inside = token_bytes * near / (groups.inside_gbps * settings.exchange)
        start = collective_us("all_to_all", np.zeros_like(ranks), groups, settings)
        return np.where(ranks > 1, start + np.maximum(inside, outside) / 1e3, 0.0)


def _reached(places: np.ndarray, topk: np.ndarray) -> np.ndarray:
    """How many places other than a token's own hold one of its ``topk`` experts, on average."""
    return (places - 1.0) * (1.0 - (1.0 - 1.0 / places) ** topk)
