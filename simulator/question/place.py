"""Where a question is about: a device, a cluster of such devices and a framework, by name or by figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ...datasets.clusters import load_cluster
from ...datasets.devices import AT_HAND, DEVICE_DIRECTORY, Device, load_device
from ...datasets.loading import nearest
from ...datasets.reading import read_yaml
from .canonical import RequestError

THIS_MACHINE = "cpu"
LOCAL = "local"  # what this machine was last measured on: its GPU or its CPU
PRECISION_DIRECTORY = DEVICE_DIRECTORY.parent / "precision"


def shipped(device: Device | str) -> Device | str:
    """The figures of a device that ships with opcast; the name itself of one that a store may know."""
    if isinstance(device, str) and device not in AT_HAND and (DEVICE_DIRECTORY / f"{device}.yaml").is_file():
        return load_device(device)
    return device


def looked_up(values: Mapping[str, Any], names: Sequence[str] = ("cluster", "stack", "network")) -> dict[str, Any]:
    """The values of a request with shipped clusters and frameworks in place of their names, and faults written out."""
    from .network import NetworkChoice
    from .plan import load_stack

    made = dict(values)
    if "cluster" in names and isinstance(made.get("cluster"), str):
        made["cluster"] = load_cluster(made["cluster"])
    if "stack" in names and isinstance(made.get("stack"), str):
        made["stack"] = load_stack(made["stack"])
    if "network" in names and isinstance(made.get("network"), (Mapping, str)):
        given = made["network"]
        made["network"] = NetworkChoice.from_plain({"fidelity": given} if isinstance(given, str) else given)
    return made


def known_precisions() -> list[str]:
    """Names in ``conf/precision``."""
    return sorted(path.stem for path in PRECISION_DIRECTORY.glob("*.yaml"))


@lru_cache
def precision_of(name: str) -> tuple[str, str]:
    """The dtype and the format of linear layers that a precision in ``conf/precision`` stands for."""
    known = known_precisions()
    if name not in known:
        raise RequestError(
            f"precision={name!r} does not exist; {nearest(name, known).replace('it has', 'choose from')}"
        )
    values = read_yaml(PRECISION_DIRECTORY / f"{name}.yaml", RequestError, f"precision={name}")
    return str(values["dtype"]), str(values.get("quantization") or "")
