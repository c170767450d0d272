"""Nodes of devices and the network between them. One YAML per kind of cluster in ``conf/cluster``.

Each figure of a data sheet stands beside its source. ``nodes`` is the user's: a file describes one node and how
nodes are joined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from .collective_ops import LINKS
from .devices import Device
from .loading import choice, finite, load, whole
from .near import did_you_mean
from .reading import read_yaml

CLUSTER_DIRECTORY = Path(__file__).resolve().parent.parent / "conf" / "cluster"
MOST_DEVICES = 2**20
COUNTS = ("nodes", "devices_per_node", "nics_per_node")
NCCL_ALGORITHMS = ("ring", "tree", "nvls", "collnet")
NCCL_PROTOCOLS = ("LL", "LL128", "Simple")
NCCL_SETTINGS = {"algorithm": NCCL_ALGORITHMS, "protocol": NCCL_PROTOCOLS}


class ClusterError(ValueError):
    """An unknown cluster, a missing or impossible figure. The message says which and what to do."""


@dataclass(frozen=True)
class Cluster:
    """``nodes`` nodes of ``devices_per_node`` devices of one kind.

    Inside a node devices talk over ``link`` (its rate is the device's own ``link_gbps`` or ``pcie_gbps``); between
    nodes over ``fabric`` through ``nics_per_node`` NICs of ``nic_gbps`` each (GB/s, one direction). A domain of NVLink
    larger than a chassis (NVL72) is one node here. ``topology`` describes the fabric beyond the NICs for the network
    simulator (empty: a full-bisection switch). ``nccl`` tells NCCL what to take: an ``algorithm``, a ``protocol``, at
    most so many ``channels`` (as NCCL_ALGO, NCCL_PROTO and NCCL_MAX_NCHANNELS do); empty: its own choice. With
    ``peers`` cards on PCIe reach each other's memory, whatever the host did that their tables are of.
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
    peers: bool = False
    price_per_device_hour: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """All devices of the cluster."""
        return self.nodes * self.devices_per_node

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
        for name in ("nic_gbps", "nic_latency_us", "price_per_device_hour"):
            value = getattr(self, name)
            if not finite(value) or value < 0 or (name == "nic_gbps" and value == 0):
                raise ClusterError(f"cluster.{name}={value!r} must be a positive number")
        for name in ("link", "fabric"):
            choice(ClusterError, f"cluster.{name}", getattr(self, name), LINKS)
        if not isinstance(self.topology, Mapping):
            raise ClusterError(f"cluster.topology={self.topology!r} must be a mapping, such as {{shape: rails}}")
        check_nccl(self.nccl)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cluster:
        """A checked cluster; ClusterError names an unknown, missing or impossible figure."""
        return load(cls, values, ClusterError, "cluster", "figure")


def one_device(device: Device) -> Cluster:
    """A device by itself, as a cluster."""
    return Cluster(device.id, device.name, device.id, devices_per_node=1, nics_per_node=1, link="pcie")


def one_node(device: Device) -> Cluster:
    """A node of devices as most have, joined by NVLink where the device has any."""
    return Cluster(device.id, device.name, device.id, link="nvlink" if device.link_gbps else "pcie")


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
