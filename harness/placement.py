"""Where the ranks of collectives are: their nodes and GPUs, and what joins these inside a node and to the others.

Inside a node NVIDIA's GPUs are joined as ``nvidia-smi topo -m`` shows it, AMD's as amdsmi says. xGMI counts as NVLink,
for which opcast has a name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..datasets.ops import LINKS
from . import amd, topology
from .environment import node_name, nvlink_domain
from .ledger import CampaignError
from .plan import Settings
from .provenance import uuid_hash
from .rank_map import FABRICS, RankMap, islands, number_names

Told = tuple[dict[str, Any], dict[str, Any]]  # of a rank: its place; and its node, where it is the first one there


def here(device: str) -> dict[str, Any]:
    """This rank's node and GPU: a name and a hash, which tell them from others without publishing them."""
    facts: dict[str, Any] = {"node": node_name()}
    if device == "cuda":
        import torch

        index = torch.cuda.current_device()
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        facts |= {"device": index, "gpu": uuid_hash(uuid)}
        if domain := nvlink_domain(index):
            facts["domain"] = domain
    return facts


def node_facts(device: str) -> dict[str, Any]:
    """What joins the GPUs and NICs of this node, as far as it tells: rows of ``nvidia-smi topo -m``, ports in sysfs."""
    facts: dict[str, Any] = {"nics": [asdict(nic) for nic in topology.nics()]}
    if device == "cuda":
        with contextlib.suppress(CampaignError):
            nodes_topology = topology.read()
            links: dict[str, dict[str, str]] = {first: {} for first in (*nodes_topology.gpus, *nodes_topology.nics)}
            for (first, second), link in nodes_topology.links.items():
                links[first][second] = link
            facts |= {
                "links": links,
                "nic_names": dict(nodes_topology.legend),
                "nvlinks": nodes_topology.nvlinks,
                "rails": nodes_topology.rails,
            }
            facts["gpus"] = {name: uuid_hash(uuid) for name, uuid in topology.uuids().items()}
        if (xgmi := amd.has_xgmi()) is not None:
            facts["xgmi"] = xgmi
    return facts


def placement(answers: Sequence[Told]) -> dict[str, Any]:
    """Of what every rank tells, in order (:func:`here`, :func:`node_facts`): ranks, and facts once for each node."""
    nodes: dict[str, Any] = {}
    for rank_facts, facts in answers:
        nodes.setdefault(rank_facts["node"], facts)
    return {"ranks": [rank_facts for rank_facts, _ in answers], "nodes": nodes}


def rank_map(machines: Sequence[str], answers: Sequence[Told], settings: Settings) -> RankMap:
    """Node and island of every rank by the machines that they are on and what they tell, as :func:`placement` has it.

    ``settings.link`` names what joins the ranks of a node, or nodes where there are several and it is a fabric.
    CampaignError where neither the machine nor the settings say what joins GPUs.
    """
    nodes = number_names(
        [rank_facts.get("domain") or machine for machine, (rank_facts, _) in zip(machines, answers, strict=True)]
    )
    several, stated = len(set(nodes)) > 1, settings.link if settings.link in LINKS else ""
    apart = several and stated in FABRICS
    inside = "loopback" if settings.device == "cpu" else ""
    if stated and not apart:
        inside = stated
    between = stated if apart else fabric()
    if inside:
        return RankMap(nodes, nodes, inside, between)
    joined = [pair for machine in dict.fromkeys(machines) for pair in _joined(machine, machines, answers)]
    ours = range(len(answers))
    joined += [(a, b) for a in ours for b in ours if a < b and answers[a][0].get("domain") and nodes[a] == nodes[b]]
    return RankMap(nodes, islands(len(answers), joined), inside, between)


def fabric() -> str:
    """What joins this machine to others. LINKS has no name for plain Ethernet, which is ``roce`` here."""
    return "ib" if any(port.fabric == "ib" for port in topology.nics()) else "roce"


def _joined(machine: str, machines: Sequence[str], answers: Sequence[Told]) -> list[tuple[int, int]]:
    """Pairs of a machine's ranks whose GPUs have links of their own between them."""
    ranks = [rank for rank, other in enumerate(machines) if other == machine]
    facts = next((answers[rank][1] for rank in ranks if answers[rank][1]), {})
    pairs = [(first, second) for first in ranks for second in ranks if first < second]
    if "xgmi" in facts:
        return pairs if facts["xgmi"] else []
    names = {gpu: name for name, gpu in facts.get("gpus", {}).items()}
    gpus = {rank: names.get(answers[rank][0].get("gpu")) for rank in ranks}
    if pairs and not all(gpus.values()):
        raise CampaignError(
            "neither nvidia-smi nor amdsmi says what joins the GPUs: settings.link=nvlink (xGMI too) or pcie says it"
        )
    return [(a, b) for a, b in pairs if facts["links"][gpus[a]][gpus[b]].startswith("NV")]
