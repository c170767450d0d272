"""What no exchange between nodes can beat: the bytes that must leave a node, and how fast they can at best.

Both are bounds for checks, no estimates: the bytes are those of the best algorithm there is (in-network sums
included), the rate that of the fastest node known.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from .clusters import known_clusters, load_cluster
from .devices import Device, load_device
from .ops import LINKS

FABRICS = tuple(LINKS.index(name) for name in ("ib", "roce"))


def between_nodes(link: Any) -> np.ndarray:
    """Bool [n]: whether a group's slowest link is a fabric between nodes."""
    return np.isin(link, FABRICS)


def crossing_bytes(kind_name: str, sent_bytes: Any, dims: dict[str, Any]) -> np.ndarray:
    """Bytes [n] that at least one node of each group must send to others, or receive from them.

    ``sent_bytes`` is what one rank sends to all others. An all-reduce needs its buffer once (switches may add), a
    gathered or scattered buffer is the share of the others, and in an all-to-all every rank of the node sends.
    """
    ranks, here = np.asarray(dims["ranks"], dtype=np.float64), np.asarray(dims["ranks_per_node"], dtype=np.float64)
    far = np.maximum(1.0 - here / np.maximum(ranks, 1.0), 0.0)
    if kind_name in ("ep_dispatch", "ep_combine"):  # a token goes to a node once, and there from rank to rank
        topk, low_latency = np.asarray(dims["topk"], dtype=np.float64), np.asarray(dims["mode"]) > 0
        nodes = np.maximum(ranks / here, 1.0)
        once = _reached(nodes, topk) / _reached(ranks, topk)
        near = np.maximum(1.0 - 1.0 / ranks, 1e-9)
        return np.asarray(sent_bytes * here * np.where(low_latency, 1.0, once) * far / near)
    size = np.asarray(dims["size_bytes"], dtype=np.float64)
    if kind_name == "all_to_all":
        return size * here * far
    return size * (far if kind_name in ("all_gather", "reduce_scatter") else far > 0)


def _reached(places: np.ndarray, topk: np.ndarray) -> np.ndarray:
    """Of so many places, how many hold one of a token's experts."""
    return np.asarray(places * (1.0 - (1.0 - 1.0 / places) ** topk))


def fabric_gbps(device: Device, ranks_per_node: Any) -> np.ndarray:
    """GB/s [n] that the ranks of one node can send to other nodes at most; infinite where the device does not say.

    They send over their own slots, and through the NICs of a node. Those are taken from the fastest known node whose
    devices sit in slots of the same rate: the same device is sold with fewer NICs and with more.
    """
    here = np.asarray(ranks_per_node, dtype=np.float64)
    if not device.pcie_gbps:
        return np.full(here.shape, np.inf)
    gbps_and_count = _nodes_by_slot().get(device.pcie_gbps, (np.inf, 1))
    return np.minimum(here * device.pcie_gbps, gbps_and_count[0] * np.maximum(here / gbps_and_count[1], 1.0))


@lru_cache
def _nodes_by_slot() -> dict[float, tuple[float, int]]:
    """By the rate of a device's slot: GB/s of the NICs of the fastest known node, and its devices."""
    by_slot: dict[float, tuple[float, int]] = {}
    for cluster in map(load_cluster, known_clusters()):
        slot, nics = load_device(cluster.device).pcie_gbps, cluster.nics_per_node * cluster.nic_gbps
        if nics > by_slot.get(slot, (0.0, 0))[0]:
            by_slot[slot] = nics, cluster.devices_per_node
    return by_slot
