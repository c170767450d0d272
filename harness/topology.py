"""What joins the GPUs and NICs of a node (``nvidia-smi topo -m``, sysfs), as a cluster in ``conf/cluster`` format.

The matrix names the worst link between each two: ``NV18`` is a bond of 18 NVLinks, ``PIX`` one PCIe bridge, ``PXB``
several, ``PHB`` a host bridge, ``NODE`` and ``SYS`` lie within and beyond a NUMA node.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .environment import node_name
from .ledger import CampaignError

INFINIBAND = Path("/sys/class/infiniband")
NEAR = ("PIX", "PXB")  # a GPU and a NIC under one switch
LATENCY_US = {"ib": 2.0, "roce": 3.0}  # as the clusters that come with opcast assume
LINK = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|N/A")


@dataclass(frozen=True)
class Nic:
    """A port to the fabric: its name in sysfs, GB/s in one direction, ``ib`` or ``roce``."""

    name: str
    gbps: float
    fabric: str


@dataclass(frozen=True)
class NodeTopology:
    """A node: links between GPUs and NICs by pair of names as the matrix has them, and the NICs' real names."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    links: Mapping[tuple[str, str], str]
    legend: Mapping[str, str]

    @property
    def nvlinks(self) -> int:
        """NVLinks between the two GPUs that have fewest between them; 0 where some pair has none."""
        pairs = [self.links[a, b] for a in self.gpus for b in self.gpus if a != b]
        return min((int(link[2:]) if link.startswith("NV") else 0 for link in pairs), default=0)

    @property
    def rails(self) -> bool:
        """Whether every GPU has a NIC of its own under its switch."""
        near_nics = [{nic for nic in self.nics if self.links.get((gpu, nic)) in NEAR} for gpu in self.gpus]
        return bool(self.nics) and all(near_nics) and len(set().union(*near_nics)) >= len(self.gpus)


def parse(text: str) -> NodeTopology:
    """From what ``nvidia-smi topo -m`` prints. CampaignError for anything else."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line for line in plain.splitlines() if line.strip()]
    head = lines[0].split() if lines else []
    if head[:1] != ["GPU0"]:
        raise CampaignError("this is not what `nvidia-smi topo -m` prints: its first line begins with GPU0")
    names = [name for name in head if re.fullmatch(r"GPU\d+|NIC\d+|mlx\w+", name)]
    body = {line.split()[0]: line.split()[1:] for line in lines[1:] if line.split()[0] in names}
    links = {}
    for name, cells in body.items():
        for other, link in zip(names, cells, strict=False):
            if not LINK.fullmatch(link):
                raise CampaignError(f"nvidia-smi topo -m: {name} to {other} is {link!r}, which is no link")
            links[name, other] = link
    legend = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)", plain, re.MULTILINE))
    gpus = tuple(name for name in names if name.startswith("GPU") and name in body)
    nics = tuple(name for name in names if not name.startswith("GPU"))
    return NodeTopology(gpus, nics, links, legend)


def nics(folder: Path = INFINIBAND) -> list[Nic]:
    """The ports of this machine that are up, from sysfs; none where it has no RDMA."""
    cards = []
    for port in sorted(folder.glob("*/ports/*")):
        state, rate, layer = (_read(port / name) for name in ("state", "rate", "link_layer"))
        speed = re.match(r"([\d.]+) Gb/sec", rate)
        if "ACTIVE" in state and speed:
            cards.append(Nic(port.parent.parent.name, float(speed[1]) / 8, "ib" if layer == "InfiniBand" else "roce"))
    return cards


def read() -> NodeTopology:
    """The topology of this machine. CampaignError without a working nvidia-smi."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        raise CampaignError("there is no nvidia-smi here: run this on a node with NVIDIA GPUs")
    reply = subprocess.run([smi, "topo", "-m"], capture_output=True, text=True, check=False)
    if reply.returncode:
        raise CampaignError(f"nvidia-smi topo -m failed: {(reply.stderr or reply.stdout).strip()[:200]}")
    return parse(reply.stdout)


def uuids() -> dict[str, str]:
    """The UUID of each GPU of this machine by its name in the matrix, as torch writes it; none without nvidia-smi."""
    smi = shutil.which("nvidia-smi")
    question = [smi or "", "--query-gpu=index,uuid", "--format=csv,noheader"]
    reply = subprocess.run(question, capture_output=True, text=True, check=False).stdout if smi else ""
    return {f"GPU{index}": uuid for index, uuid in re.findall(r"^(\d+), *GPU-(\S+)", reply, re.MULTILINE)}


def cluster(node: NodeTopology, ports: Sequence[Nic], device_id: str, nodes: int = 1) -> dict[str, Any]:
    """A cluster of such nodes in ``conf/cluster`` format, each figure with its source."""
    used = [port for port in ports if not node.legend or port.name in node.legend.values()] or list(ports)
    fabric = used[0].fabric if used else "roce"
    source = f"nvidia-smi topo -m on {node_name()}"
    values: dict[str, Any] = {
        "id": f"{device_id}_{len(node.gpus)}_{'nvlink' if node.nvlinks else 'pcie'}",
        "name": f"{len(node.gpus)} x {device_id}, as seen on {node_name()}",
        "device": device_id,
        "nodes": nodes,
        "devices_per_node": len(node.gpus),
        "link": "nvlink" if node.nvlinks else "pcie",
        "fabric": fabric,
        "nic_latency_us": LATENCY_US[fabric],
        "topology": {"shape": "rails" if node.rails else "fat_tree"},
    }
    below = "a NIC under the switch of every GPU" if node.rails else "GPUs share NICs"
    sources = {
        "devices_per_node": source,
        "link": f"{source}: {node.nvlinks} NVLinks at least between two GPUs"
        if node.nvlinks
        else f"{source}: no NVLink",
        "topology": f"{source}: {below}; beyond the NICs assumed",
        "nic_latency_us": "assumed, as of the clusters that come with opcast",
    }
    if used:
        slowest = min(port.gbps for port in used)
        values |= {"nics_per_node": len(used), "nic_gbps": slowest}
        sources |= {
            "nics_per_node": f"{INFINIBAND}: {', '.join(port.name for port in used)}",
            "nic_gbps": f"{INFINIBAND}: rate",
        }
        sources["fabric"] = f"{INFINIBAND}: link_layer"
    else:
        values |= {"nics_per_node": 1, "nic_gbps": 12.5}
        sources |= dict.fromkeys(("nics_per_node", "nic_gbps", "fabric"), "assumed: no RDMA port is up")
    return {**values, "sources": sources}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
