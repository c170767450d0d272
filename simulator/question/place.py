"""Where a question is about: a device, a cluster of such devices and a framework, by name or by figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...datasets.clusters import load_cluster
from ...datasets.devices import AT_HAND, DEVICE_DIRECTORY, Device, load_device

THIS_MACHINE = "cpu"
LOCAL = "local"  # what this machine was last measured on: its GPU or its CPU


def shipped(device: Device | str) -> Device | str:
    """The figures of a device that ships with opcast; the name itself of one that a store may know."""
    if isinstance(device, str) and device not in AT_HAND and (DEVICE_DIRECTORY / f"{device}.yaml").is_file():
        return load_device(device)
    return device


def looked_up(values: Mapping[str, Any], names: Sequence[str] = ("cluster", "stack", "network")) -> dict[str, Any]:
    """The values of a request with shipped clusters and frameworks in place of their names, and faults written out."""
    from .network import NetworkChoice
    from .stack import load_stack, stack_from_dict

    result = dict(values)
    if "cluster" in names and isinstance(result.get("cluster"), str):
        result["cluster"] = load_cluster(result["cluster"])
    if "stack" in names and isinstance(result.get("stack"), str):
        result["stack"] = load_stack(result["stack"])
    elif "stack" in names and isinstance(result.get("stack"), Mapping):
        result["stack"] = stack_from_dict(result["stack"])
    if "network" in names and isinstance(result.get("network"), (Mapping, str)):
        network = result["network"]
        result["network"] = NetworkChoice.from_plain({"fidelity": network} if isinstance(network, str) else network)
    return result
