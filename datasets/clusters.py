"""Nodes of devices and the network between them. One YAML per kind of cluster in ``conf/cluster``.

Each figure of a data sheet stands beside its source. ``nodes`` is the user's: a file describes one node and how
nodes are joined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from .devices import Device
from .loading import choice, finite, load, whole
from .near import did_you_mean
from .ops import LINKS
from .reading import read_yaml

CLUSTER_DIRECTORY = Path(__file__).resolve().parent.parent / "conf" / "cluster"
MOST_DEVICES = 2**20
COUNTS = ("nodes", "devices_per_node", "nics_per_node", "host_cores")
POSITIVE = ("nic_gbps", "host_gbps")
HOST_SUSTAINED = 0.4
"""Of the memory bandwidth by the data sheet, between two published runs of DeepSpeedCPUAdam. One process on a DGX-2
takes 0.22 s for a billion parameters and 2.57 s for ten, 30 bytes each of 256 GB/s: 53 and 46 % (ZeRO-Offload, arXiv
2101.06840, table 4). Two on a DGX A100 take 1.1 s longer with offload than without for 1.5 billion, some 46 bytes each
of 410 GB/s, copies among them: 20 to 25 % (DeepSpeed's blogs/zenflow-corebinding)."""
CORE_GBPS = 10.0
"""Of one core: it waits for 16 cache lines of 64 bytes at a time (line fill buffers), some 100 ns each."""
MESHED = ("cdna3", "cdna4")  # whose nodes join each pair by one link (AMD Instinct platform data sheet)
HOST_MAKERS = ("amd", "arm", "intel")
NCCL_ALGORITHMS = ("ring", "tree", "nvls", "collnet")
NCCL_PROTOCOLS = ("LL", "LL128", "Simple")
NCCL_SETTINGS = {"algorithm": NCCL_ALGORITHMS, "protocol": NCCL_PROTOCOLS, "nvls": (True, False)}


class ClusterError(ValueError):
    """An unknown cluster, a missing or impossible figure. The message says which and what to do."""


@dataclass(frozen=True)
class Cluster:
    """``nodes`` nodes of ``devices_per_node`` devices of one kind.

    Inside a node devices talk over ``link`` (its rate is the device's own ``link_gbps`` or ``pcie_gbps``); between
    nodes over ``fabric`` through ``nics_per_node`` NICs of ``nic_gbps`` each (GB/s, one direction). A domain of NVLink
    larger than a chassis (NVL72) is one node here. ``topology`` describes the fabric beyond the NICs for the network
    simulator (empty: a full-bisection switch). ``nccl`` tells NCCL what to take: an ``algorithm``, a ``protocol``, at
    most so many ``channels`` (as NCCL_ALGO, NCCL_PROTO and NCCL_MAX_NCHANNELS do), or to leave out ``nvls`` (as
    NCCL_NVLS_ENABLE=0 does); empty: its own choice. ``mesh_links`` are the links of a device where each of them goes
    to one other device and there is no switch (xGMI), so that few devices of a node have few of them; 0: a switch. With
    ``peers`` cards on PCIe reach each other's memory, whatever the host did that their tables are of. ``host_gbps`` is
    the bandwidth of a node's host memory by its data sheet, ``host_cores`` its processor cores: what is offloaded is
    computed with them (usual: two EPYC of 64 cores with eight channels of DDR4-3200 each). By their ``host_maker`` NCCL
    chooses between nodes.
    """

    id: str
    name: str
    device: str
    nodes: int = 1
    devices_per_node: int = 8
    link: str = "nvlink"
    fabric: str = "ib"
    nics_per_node: int = 8
    nic_gbps: float = 50.0
    nic_latency_us: float = 2.0
    topology: Mapping[str, Any] = field(default_factory=dict)
    nccl: Mapping[str, Any] = field(default_factory=dict)
    mesh_links: int = 0
    peers: bool = False
    host_gbps: float = 409.6
    host_cores: int = 128
    host_maker: str = "amd"
    price_per_device_hour: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """All devices of the cluster."""
        return self.nodes * self.devices_per_node

    @property
    def has_own_links(self) -> bool:
        """Whether a file of the user's own gives every link and its rate."""
        return "file" in self.topology

    def host_share_gbps(self, threads: int = 0) -> float:
        """GB/s of host memory that one device's process keeps up while those of all others do the same.

        ``threads`` are those that it runs (0: its share of the cores).
        """
        cores = threads or self.host_cores / self.devices_per_node
        return float(min(HOST_SUSTAINED * self.host_gbps / self.devices_per_node, cores * CORE_GBPS))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as the YAML has them."""
        return dataclasses.asdict(self)

    def __post_init__(self) -> None:
        for name in COUNTS:
            whole(ClusterError, f"cluster.{name}", getattr(self, name), 1)
        if self.nodes * self.devices_per_node > MOST_DEVICES:
            raise ClusterError(
                f"cluster.nodes={self.nodes} of {self.devices_per_node} devices are more than the {MOST_DEVICES:,} "
                "devices that are simulated"
            )
        whole(ClusterError, "cluster.mesh_links", self.mesh_links, 0)
        for name in (*POSITIVE, "nic_latency_us", "price_per_device_hour"):
            value = getattr(self, name)
            if not finite(value) or value < 0 or (name in POSITIVE and value == 0):
                raise ClusterError(f"cluster.{name}={value!r} must be a positive number")
        for name in ("link", "fabric"):
            choice(ClusterError, f"cluster.{name}", getattr(self, name), LINKS)
        choice(ClusterError, "cluster.host_maker", self.host_maker, HOST_MAKERS)
        if not isinstance(self.topology, Mapping):
            raise ClusterError(f"cluster.topology={self.topology!r} must be a mapping, such as {{shape: rails}}")
        check_nccl(self.nccl)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cluster:
        """A checked cluster; ClusterError names an unknown, missing or impossible figure."""
        return load(cls, values, ClusterError, "cluster", "figure")


def one_device(device: Device) -> Cluster:
    """A device by itself, as a cluster, with its part of a usual node's host."""
    host_gbps, host_cores = Cluster.host_gbps / 8, Cluster.host_cores // 8  # of a node of eight
    return Cluster(
        *(device.id, device.name, device.id),
        devices_per_node=1,
        nics_per_node=1,
        link="pcie",
        host_gbps=host_gbps,
        host_cores=host_cores,
    )


def one_node(device: Device) -> Cluster:
    """A node of devices as most have, joined by NVLink where the device has any, AMD's by a link between each pair."""
    node = Cluster(device.id, device.name, device.id, link="nvlink" if device.link_gbps else "pcie")
    return replace(node, mesh_links=node.devices_per_node - 1) if device.architecture in MESHED else node


def check_nccl(settings: Any) -> None:
    """ClusterError for what NCCL cannot be told."""
    if not isinstance(settings, Mapping):
        raise ClusterError(f"cluster.nccl={settings!r} must be a mapping, such as {{algorithm: ring}}")
    for name, value in settings.items():
        if name == "channels":
            whole(ClusterError, "cluster.nccl.channels", value, 1)
        elif name not in NCCL_SETTINGS:
            raise ClusterError(f"cluster.nccl has no setting {name!r}; it has {', '.join(NCCL_SETTINGS)}, channels")
        else:
            choice(ClusterError, f"cluster.nccl.{name}", value, NCCL_SETTINGS[name])


def cluster_of_file(path: Path) -> Cluster:
    """The cluster that a file in the format of ``conf/cluster`` describes. ClusterError for one that cannot be read."""
    path = path.expanduser()
    if not path.is_file():
        raise ClusterError(f"cluster={path}: there is no such file, nor a cluster of that name")
    return Cluster.from_dict(read_yaml(path, ClusterError, f"cluster={path}"))


def known_clusters() -> list[str]:
    """The ids of the clusters that ship with opcast."""
    return sorted(path.stem for path in CLUSTER_DIRECTORY.glob("*.yaml"))


@lru_cache
def load_cluster(cluster_id: str) -> Cluster:
    """A shipped cluster by id; ClusterError suggests the nearest known one."""
    path = CLUSTER_DIRECTORY / f"{cluster_id}.yaml"
    if not path.is_file() or path.parent != CLUSTER_DIRECTORY:
        hint = did_you_mean(cluster_id, known_clusters(), f"choose from {', '.join(known_clusters())}")
        raise ClusterError(f"unknown cluster {cluster_id!r}; {hint}")
    return Cluster.from_dict(read_yaml(path, ClusterError))
