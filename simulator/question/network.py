"""What is asked of the links of a cluster: how they are simulated, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...datasets.clusters import Cluster
from ...datasets.loading import choice, load
from ..network.faults import Drawing, Fault, draw_faults, faults_from_dicts, read_drawing
from ..network.topology import Topology, TopologyError
from .canonical import RequestError, plain
from .declaration import setting

FIDELITIES = ("auto", "analytical", "flow", "packet")
LINK_FAULTS = ("faults", "fault_draw", "faults_study")


@dataclass(frozen=True)
class NetworkChoice:
    """How links are simulated, with which faults: those named, those drawn at random, and those studied.

    ``auto`` is analytical, or flow where links have faults or figures of their own. ``faults_study`` asks what faults
    at random places, beside the others, do to the answer.
    """

    fidelity: str = setting(
        "auto",
        "links of a cluster: analytical | flow (the whole step on them: RAPID-LLM's flattened mode) | packet; "
        "auto is flow where asked for",
        name="network",
        path="network",
    )
    faults: tuple[Fault, ...] = setting(
        (), "of links: [{link: nic0-leaf0, bandwidth: 0.5}, {node: spine1, gone: true}]"
    )
    fault_draw: Drawing | None = setting(None, "or at random: {count: 2, seed: 0, bandwidth: 0.5}")
    faults_study: Drawing | None = setting(
        None, "how much random faults slow the step: {samples: 64, count: 1, seed: 0, bandwidth: 0.5}"
    )

    def __post_init__(self) -> None:
        choice(RequestError, "network", self.fidelity, FIDELITIES)

    @property
    def named(self) -> list[str]:
        """The names of what is wrong with links."""
        return [name for name in LINK_FAULTS if getattr(self, name)]

    @classmethod
    def of(cls, fidelity: Any, faults: Any, fault_draw: Any, faults_study: Any) -> NetworkChoice:
        """From plain values as the command line has them. TopologyError and RequestError for what cannot be."""
        choice(RequestError, "network", fidelity, FIDELITIES)
        ready = [fault for fault in faults if isinstance(fault, Fault)] if isinstance(faults, (list, tuple)) else []
        listed = ready if ready and len(ready) == len(faults) else faults_from_dicts(faults or [])
        draws = [drawn(name, values) for name, values in (("fault_draw", fault_draw), ("faults_study", faults_study))]
        return cls(fidelity, tuple(listed), *draws)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> NetworkChoice:
        """From JSON: as the command line has it, or as :meth:`.canonical.Request.to_json` wrote it."""
        for name in values:
            choice(RequestError, "network", name, FIELDS)
        return cls.of(values.get("fidelity", "auto"), *(values.get(name) for name in LINK_FAULTS))

    def on_cluster(self, cluster: Cluster | None) -> str:
        """``auto`` decided: analytical, or flow where links have faults or figures of their own."""
        if self.fidelity != "auto":
            return self.fidelity
        return "flow" if self.named or own_figures(cluster) else "analytical"

    def said(self, cluster: Cluster | None) -> list[str]:
        """What only links can answer, as the command line has it."""
        settings = [f"{name}={shown(getattr(self, name))}" for name in self.named]
        figure = own_figures(cluster) if self.fidelity == "auto" else ""
        if figure and cluster is not None:
            settings.append(f"{figure}={cluster.topology[figure.rpartition('.')[2]]}")
        return settings + ([f"network={self.fidelity}"] if self.fidelity in ("flow", "packet") else [])

    def on(self, topology: Topology) -> tuple[Fault, ...]:
        """The faults, those drawn among the links of a fabric included. TopologyError for too few places."""
        drawing = self.fault_draw
        if drawing is None:
            return self.faults
        return (*self.faults, *draw_faults(topology, drawing.at_once, drawing.like, drawing.seed, drawing.kinds))


def own_figures(cluster: Cluster | None) -> str:
    """The setting of a cluster's topology that only simulated links can answer; empty without one."""
    if cluster is None or not cluster.topology:
        return ""
    from ..network.build import simulated_setting

    return simulated_setting(cluster.topology)


def needs_cluster(setting_text: str) -> RequestError:
    """The error of what was asked without a cluster."""
    return RequestError(f"{setting_text} needs a cluster: name one with cluster=… (`opcast list clusters`)")


def shown(value: Any) -> str:
    """A part of a request in a few words, as a message quotes it."""
    text = json.dumps(plain(value), ensure_ascii=False).encode(errors="backslashreplace").decode()  # half a character
    return text if len(text) <= 60 else f"{text[:60]}…"


FIELDS = ("fidelity", *LINK_FAULTS)
EXAMPLES = {"fault_draw": "{count: 2, seed: 0}", "faults_study": "{samples: 64, count: 1}"}


def drawn(name: str, values: Any) -> Drawing | None:
    """What ``fault_draw`` or ``faults_study`` draws; None where nothing was asked. TopologyError for what cannot be."""
    if not values:
        return None
    if isinstance(values, Drawing):
        return values
    if not isinstance(values, Mapping):
        raise RequestError(f"{name}={values!r} must be a mapping, such as {EXAMPLES[name]}")
    if "like" in values:
        return load(Drawing, values, TopologyError, name)
    return read_drawing(values, name)
