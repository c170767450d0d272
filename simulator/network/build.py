"""From a cluster to its fabric: links at the rates that NCCL reaches on them, hops at the latencies that it sees.

``cluster.topology`` says what stands beyond the NICs: ``shape`` is one of :data:`SHAPES`, with its own settings, or
``file`` names a fabric of the user's; ``routing`` is a policy of :class:`.routing.Router` (InfiniBand routes
adaptively, Ethernet by ECMP, unless told otherwise); ``reduces: true`` says that the fabric's switches reduce (SHARP).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...datasets.clusters import Cluster
from ...datasets.devices import Device
from ...datasets.near import meant
from ...datasets.reading import read_yaml
from .astra import FormatError, astra_network
from .fabric import Fabric
from .faults import Fault
from .nccl import BASE_US, HOP_US, TABLE_NIC_US
from .routing import POLICIES
from .shapes import MAX_RANKS, Dimension, Port, Servers, dragonfly, dual_plane, dual_tor, fat_tree, product
from .study import with_faults
from .topology import GBPS, Topology, TopologyError, check_keys, check_list, read_fabric, read_number, read_word
from .tunings import tuning

LL128 = 1  # the protocol whose latencies explicit links have: between LL's and Simple's
NIC_LANE_KIND = "nic"  # PCIe from a GPU to its NIC; its latency counts as the NIC's
MAX_SIMULATED_DEVICES = 2**16  # whose links are laid one by one: about a minute and some gigabytes
HOPS_IN_TABLE_LATENCY = 3.0  # hops over a switch fabric that the table's network latency stands for


def build_fabric(cluster: Cluster, device: Device, faults: Iterable[Fault] = ()) -> Fabric:
    """The fabric of a cluster, as far as it still stands. TopologyError for a setting, link or rank that is missing."""
    check_settings(cluster.topology)
    if cluster.devices > MAX_SIMULATED_DEVICES:
        raise TopologyError(
            f"cluster.nodes={cluster.nodes} of {cluster.devices_per_node} devices are more than the "
            f"{MAX_SIMULATED_DEVICES:,} whose links are simulated; take network=analytical"
        )
    settings = dict(cluster.topology)
    routing = settings.pop("routing", "adaptive" if cluster.fabric == "ib" else "ecmp")
    reduces = bool(settings.pop("reduces", False))
    topology = build_topology(cluster, device, settings)
    if topology.ranks < cluster.devices:
        raise TopologyError(
            f"{topology.name} has {topology.ranks} ranks, {cluster.id} needs {cluster.devices}: add ranks, or take "
            f"cluster.nodes={topology.ranks // cluster.devices_per_node or 1} of cluster.devices_per_node="
            f"{min(topology.ranks, cluster.devices_per_node)}"
        )
    constants = tuning(device, cluster.link, cluster.peers)
    start_us = BASE_US["ring"][0] * constants.base
    nvls = constants.nvls / constants.ring if any(name.startswith("nvswitch") for name in topology.nodes) else 0.0
    per_node = cluster.devices_per_node
    return with_faults(Fabric(topology, routing, per_node, 0, start_us, nvls, reduces, per_node), list(faults))


def build_nonblocking_fabric(cluster: Cluster, device: Device) -> Fabric:
    """The cluster's nodes on one switch that never blocks."""
    return build_fabric(dataclasses.replace(cluster, topology={"shape": "switch", "routing": "adaptive"}), device)


def build_topology(cluster: Cluster, device: Device, settings: Mapping[str, Any]) -> Topology:
    """Links of a cluster by the settings of its shape, or as its file has them."""
    if "file" in settings:
        return read_topology(Path(settings["file"]).expanduser())
    chosen = {"shape": DEFAULT_SHAPE, **settings}
    shape = SHAPES[chosen.pop("shape")]
    return shape.build(cluster_servers(cluster, device), **chosen)


def check_settings(settings: Mapping[str, Any]) -> None:
    """TopologyError for what ``cluster.topology`` cannot be: a shape, routing, file or figure. Builds nothing."""
    shape_settings = {name: value for name, value in settings.items() if name not in ("shape", "routing", "reduces")}
    routing, shape = settings.get("routing", "ecmp"), settings.get("shape", DEFAULT_SHAPE)
    if routing not in tuple(POLICIES):
        raise TopologyError(
            f"cluster.topology.routing={routing!r} is not one of {', '.join(POLICIES)}{meant(routing, POLICIES)}"
        )
    if not isinstance(settings.get("reduces", False), bool):
        raise TopologyError(f"cluster.topology.reduces={settings['reduces']!r} must be true or false")
    if "file" in shape_settings:
        return _check_file(shape_settings)
    if shape not in tuple(SHAPES):
        near = meant(shape, SHAPES)
        raise TopologyError(f"cluster.topology.shape={shape!r} is not one of {', '.join(SHAPES)}; or name a file{near}")
    needed, allowed = SHAPES[shape].needed, (*SHAPES[shape].needed, *SHAPES[shape].optional)
    unknown = sorted(set(shape_settings) - set(allowed))
    if unknown:
        has = f"it has {', '.join(allowed)}" if allowed else "it has none"
        raise TopologyError(f"cluster.topology of shape {shape} has no setting {unknown[0]!r}; {has}")
    missing = [name for name in needed if name not in shape_settings]
    if missing:
        missing_text = " ".join(f"cluster.topology.{name}=…" for name in missing)
        raise TopologyError(f"cluster.topology of shape {shape} needs {missing_text}")
    if not isinstance(shape_settings.pop("rails", False), bool):
        raise TopologyError(f"cluster.topology.rails={settings['rails']!r} must be true or false")
    for name, value in shape_settings.items():
        FIGURES[name].check(f"cluster.topology.{name}", value)


def simulated_setting(settings: Mapping[str, Any]) -> str:
    """The setting of ``cluster.topology`` that only simulated links can answer; empty when it names a shape at most."""
    link_settings = [name for name in settings if name not in ("shape", "routing", "reduces")]
    return f"cluster.topology.{link_settings[0]}" if link_settings else ""


def _check_file(settings: Mapping[str, Any]) -> None:
    if not isinstance(settings["file"], str) or not settings["file"]:
        raise TopologyError(f"cluster.topology.file={settings['file']!r} must name a YAML file of nodes and links")
    if len(settings) > 1:
        extra = sorted(set(settings) - {"file"})[0]
        raise TopologyError(f"cluster.topology.file brings its own links: leave out cluster.topology.{extra}")
    if not Path(settings["file"]).expanduser().is_file():
        raise TopologyError(f"cluster.topology.file={settings['file']} is no file")


def cluster_servers(cluster: Cluster, device: Device) -> Servers:
    """Nodes of the cluster, their links at the rates and latencies of :mod:`.tunings`."""
    constants = tuning(device, cluster.link, cluster.peers)
    nvlink = cluster.link == "nvlink" and device.link_gbps > 0
    kind = "nvlink" if nvlink else "pcie"
    pair_rate_share = 1.0 if nvlink else float(constants.alone(np.array(cluster.devices_per_node)))
    inside_gbps = (device.link_gbps if nvlink else device.pcie_gbps * pair_rate_share) * constants.ring
    inside = Port(inside_gbps, HOP_US[kind]["ring"][LL128] * constants.hop / 2.0, kind)
    hop_us = HOP_US["network"]["ring"][LL128] * constants.far_hop + cluster.nic_latency_us - TABLE_NIC_US
    lane_gbps = device.pcie_gbps or cluster.nic_gbps
    nics_per_device = max(cluster.nics_per_node / cluster.devices_per_node, 1.0)  # NICs of one GPU count as one
    nic_gbps = min(cluster.nic_gbps, lane_gbps) * constants.network
    nic_port = Port(nic_gbps * nics_per_device, hop_us / HOPS_IN_TABLE_LATENCY, cluster.fabric)
    shared_nics = cluster.nics_per_node if cluster.nics_per_node < cluster.devices_per_node else 0
    to_nic = Port(max(lane_gbps, nic_gbps * nics_per_device), 0.0, NIC_LANE_KIND)
    return Servers(cluster.nodes, cluster.devices_per_node, inside, nic_port, "switch", shared_nics, to_nic)


def read_topology(file: Path) -> Topology:
    """A user's fabric: YAML with ``nodes`` and ``links``, with ``dimensions`` of a product, or ASTRA-sim's network.

    TopologyError, with the file's name, for what none of them can be.
    """
    values = read_yaml(file, TopologyError, f"the topology {file}")
    try:
        return topology_from_values(values, file.stem)
    except (TopologyError, FormatError) as error:
        raise TopologyError(f"{file}: {error}") from None


def topology_from_values(values: Any, name: str) -> Topology:
    """The fabric that a YAML's values describe; TopologyError or FormatError otherwise."""
    if isinstance(values, Mapping) and "npus_count" in values:
        return astra_network(values, name)
    if not isinstance(values, Mapping) or not {"nodes", "links", "dimensions"} & set(values):
        raise TopologyError("it must hold nodes and links, or dimensions, or ASTRA-sim's topology and npus_count")
    if "dimensions" not in values:
        return read_fabric({"name": name, **values})
    unknown = sorted(map(str, set(values) - {"dimensions", "name"}))
    if unknown:
        raise TopologyError(f"dimensions leave no room for {unknown[0]}; take it out")
    return topology_from_dimensions(values["dimensions"], str(values.get("name", name)))


def topology_from_dimensions(dimensions: Sequence[Mapping[str, Any]], name: str = "") -> Topology:
    """A product of dimensions, each ``{shape, size, bandwidth_gbps, latency_us, kind}``; TopologyError if bad."""
    allowed = set(Dimension.__dataclass_fields__)
    parsed = []
    for i, value in enumerate(check_list("dimensions", dimensions)):
        what = f"dimension {i}"
        settings = check_keys(what, value, {"shape", "size", "bandwidth_gbps"}, allowed)
        FIGURES["size"].check(f"{what}: size", settings["size"])
        shape, kind = read_word(what, settings, "shape", str, ""), read_word(what, settings, "kind", str, "fabric")
        rate, latency = read_number(what, settings, "bandwidth_gbps"), read_number(what, settings, "latency_us", 0.5)
        parsed.append(Dimension(shape, int(settings["size"]), rate, latency, kind))
    return product(parsed, name)


class FigureRule(NamedTuple):
    """What a setting must be."""

    minimum: float
    maximum: float
    integer: bool = False

    def check(self, name: str, value: Any) -> None:
        """TopologyError for a value that is out of bounds or of another kind."""
        kind = int if self.integer else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not self.minimum <= value <= self.maximum:
            what = "a whole number" if self.integer else "a number"
            raise TopologyError(f"{name}={value!r} must be {what} from {self.minimum:.9g} to {self.maximum:.9g}")


FIGURES = {
    "radix": FigureRule(4, 65_536, True),
    "oversubscription": FigureRule(1, 1_000),
    "groups": FigureRule(1, 100_000, True),
    "routers": FigureRule(1, 100_000, True),
    "global_gbps": FigureRule(*GBPS),
    "local_gbps": FigureRule(*GBPS),
    "size": FigureRule(1, MAX_RANKS, True),
}


def _rails(servers: Servers, radix: int = 64, oversubscription: float = 1.0) -> Topology:
    return fat_tree(servers, radix, oversubscription, rails=True)


def _one_switch(servers: Servers) -> Topology:
    return fat_tree(servers, 2 * max(servers.count * servers.ports, 4))


class Shape(NamedTuple):
    """A builder and the names of its settings."""

    build: Callable[..., Topology]
    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


DEFAULT_SHAPE = "fat_tree"
TREE_SETTINGS = ("radix", "oversubscription")
SHAPES = {
    "fat_tree": Shape(fat_tree, (), TREE_SETTINGS),
    "rails": Shape(_rails, (), TREE_SETTINGS),
    "dual_tor": Shape(dual_tor, (), (*TREE_SETTINGS, "rails")),
    "dual_plane": Shape(dual_plane, (), (*TREE_SETTINGS, "rails")),
    "dragonfly": Shape(dragonfly, ("groups", "routers", "global_gbps", "local_gbps")),
    "switch": Shape(_one_switch),
}
