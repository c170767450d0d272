"""From a cluster to its fabric: links at the rates that NCCL reaches on them, hops at the latencies that it sees.

``cluster.topology`` says what stands beyond the NICs: ``shape`` is one of :data:`SHAPES`, with its own settings, or
``file`` names a fabric of the user's; ``routing`` is a policy of :class:`.routing.Router` (InfiniBand routes
adaptively, Ethernet by ECMP, unless told otherwise); ``reduces: true`` says that the fabric's switches reduce (SHARP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...datasets.clusters import Cluster
from ...datasets.devices import Device
from .fabric import Fabric
from .faults import Fault, apply
from .law import BASE_US, HOP_US, TABLE_NIC_US
from .routing import POLICIES
from .shapes import Dimension, Port, Servers, dragonfly, dual_plane, fat_tree, product
from .topology import Topology, TopologyError, from_dict
from .tunings import tuning

LL128 = 1  # the protocol whose latencies explicit links have: between LL's and Simple's
SWITCHES = 3.0  # hops over a switch fabric that the table's network latency stands for


def fabric(cluster: Cluster, device: Device, faults: Iterable[Fault] = (), seed: int = 0) -> Fabric:
    """The fabric of a cluster, as far as it still stands. TopologyError for a setting, link or rank that is missing."""
    settings = dict(cluster.topology)
    routing = settings.pop("routing", "adaptive" if cluster.fabric == "ib" else "ecmp")
    reduces = bool(settings.pop("reduces", False))
    made = apply(topology(cluster, device, settings), faults)
    if made.ranks < cluster.devices:
        raise TopologyError(f"{made.name} has {made.ranks} ranks, {cluster.id} needs {cluster.devices}")
    constants = tuning(device, cluster.link)
    start = BASE_US["ring"][0] * constants.base
    nvls = constants.nvls / constants.ring if any(name.startswith("nvswitch") for name in made.nodes) else 0.0
    return Fabric(made, routing, cluster.devices_per_node, seed, start, nvls, reduces)


def topology(cluster: Cluster, device: Device, settings: Mapping[str, Any]) -> Topology:
    """Links of a cluster by the settings of its shape, or as its file has them."""
    check_settings(settings)
    if "file" in settings:
        return read(Path(str(settings["file"])))
    chosen = {"shape": USUAL_SHAPE, **settings}
    builder, _ = SHAPES[chosen.pop("shape")]
    return builder(servers(cluster, device), **chosen)


def check_settings(settings: Mapping[str, Any]) -> None:
    """TopologyError for a shape, routing or setting of ``cluster.topology`` that does not exist. Builds nothing."""
    own = {name: value for name, value in settings.items() if name not in ("shape", "routing", "reduces")}
    routing, shape = settings.get("routing", "ecmp"), settings.get("shape", USUAL_SHAPE)
    if routing not in tuple(POLICIES):
        raise TopologyError(f"cluster.topology.routing={routing!r} is not one of {', '.join(POLICIES)}")
    if "file" in own:
        return
    if shape not in tuple(SHAPES):
        raise TopologyError(f"cluster.topology.shape={shape!r} is not one of {', '.join(SHAPES)}; or name a file")
    known = SHAPES[shape][1]
    unknown = sorted(set(own) - set(known))
    if unknown:
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise TopologyError(f"cluster.topology of shape {shape} has no setting {unknown[0]!r}; {has}")


def servers(cluster: Cluster, device: Device) -> Servers:
    """Nodes of the cluster, their links at the rates and latencies of :mod:`.tunings`."""
    constants = tuning(device, cluster.link)
    nvlink = cluster.link == "nvlink" and device.link_gbps > 0
    kind = "nvlink" if nvlink else "pcie"
    rate = (device.link_gbps if nvlink else device.pcie_gbps) * constants.ring
    inside = Port(rate, HOP_US[kind]["ring"][LL128] * constants.hop / 2.0, kind)
    hop = HOP_US["network"]["ring"][LL128] * constants.far_hop + cluster.nic_latency_us - TABLE_NIC_US
    nic = min(cluster.nic_gbps, device.pcie_gbps or cluster.nic_gbps) * constants.network
    out = Port(nic, hop / SWITCHES, cluster.fabric)
    shared = cluster.nics_per_node if cluster.nics_per_node < cluster.devices_per_node else 0
    return Servers(cluster.nodes, cluster.devices_per_node, inside, out, "switch", shared)


def read(file: Path) -> Topology:
    """A user's fabric: YAML with ``nodes`` and ``links``, or ``dimensions`` of a product. TopologyError if bad."""
    import yaml

    try:
        values = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise TopologyError(f"cannot read the topology {file}: {' '.join(str(error).split())}") from None
    if isinstance(values, Mapping) and "dimensions" in values:
        return from_dimensions(values["dimensions"], str(values.get("name", file.stem)))
    if not isinstance(values, Mapping):
        raise TopologyError(f"{file} must hold nodes and links, or dimensions")
    return from_dict({"name": file.stem, **values})


def from_dimensions(dimensions: Iterable[Mapping[str, Any]], name: str = "") -> Topology:
    """A product of dimensions, each ``{shape, size, bandwidth_gbps, latency_us, kind}``."""
    known = set(Dimension.__dataclass_fields__)
    made = []
    for i, each in enumerate(dimensions):
        wrong = sorted(set(each) - known) or sorted({"shape", "size", "bandwidth_gbps"} - set(each))
        if wrong:
            raise TopologyError(f"dimension {i} has or lacks {wrong[0]!r}; it has {', '.join(sorted(known))}")
        made.append(Dimension(**each))
    return product(made, name)


def _rails(each: Servers, radix: int = 64, oversubscription: float = 1.0) -> Topology:
    return fat_tree(each, radix, oversubscription, rails=True)


def _one_switch(each: Servers) -> Topology:
    return fat_tree(each, 2 * max(each.count * each.ports, 4))


USUAL_SHAPE = "fat_tree"
TREE = ("radix", "oversubscription")
SHAPES: dict[str, tuple[Callable[..., Topology], tuple[str, ...]]] = {
    "fat_tree": (fat_tree, TREE),
    "rails": (_rails, TREE),
    "dual_plane": (dual_plane, TREE),
    "dragonfly": (dragonfly, ("groups", "routers", "global_gbps", "local_gbps")),
    "switch": (_one_switch, ()),
}
