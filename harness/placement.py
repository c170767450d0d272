"""Where the ranks of collectives are: their nodes and GPUs, and what joins these inside a node and to the others."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from . import topology
from .environment import node_name
from .ledger import CampaignError
from .provenance import uuid_hash


def here(device: str) -> dict[str, Any]:
    """This rank's node and GPU: a name and a hash, which tell them from others without publishing them."""
    place: dict[str, Any] = {"node": node_name()}
    if device == "cuda":
        import torch

        index = torch.cuda.current_device()
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        place |= {"device": index, "gpu": uuid_hash(uuid)}
    return place


def node_facts(device: str) -> dict[str, Any]:
    """What joins the GPUs and NICs of this node, as far as it tells: rows of ``nvidia-smi topo -m``, ports in sysfs."""
    facts: dict[str, Any] = {"nics": [asdict(nic) for nic in topology.nics()]}
    if device == "cuda":
        with contextlib.suppress(CampaignError):
            found = topology.read()
            links: dict[str, dict[str, str]] = {first: {} for first in (*found.gpus, *found.nics)}
            for (first, second), link in found.links.items():
                links[first][second] = link
            facts |= {"links": links, "nic_names": dict(found.legend), "nvlinks": found.nvlinks, "rails": found.rails}
    return facts


def placement(told: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Of what every rank tells, in order (:func:`here`, :func:`node_facts`): ranks, and facts once for each node."""
    nodes: dict[str, Any] = {}
    for place, facts in told:
        nodes.setdefault(place["node"], facts)
    return {"ranks": [place for place, _ in told], "nodes": nodes}
