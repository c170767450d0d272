"""Links and switches that are slow or gone, and slow GPUs: what a fault does to a fabric, alone or by random draw.

A *soft* fault leaves a link in place with less bandwidth, more latency, or a share of packets sent again (goodput
falls by that share, and each of them waits a round trip). A *hard* one removes a link or a switch; routes go round it,
and a fabric that falls apart is reported as such. A straggler is a rank whose compute takes longer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .topology import Topology, TopologyError


@dataclass(frozen=True)
class Fault:
    """``where``: a link ``a->b``, a cable ``a-b``, or a node. Hard when ``gone``, else soft by the other figures."""

    where: str
    gone: bool = False
    bandwidth_factor: float = 1.0
    extra_latency_us: float = 0.0
    retransmission: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bandwidth_factor", "extra_latency_us", "retransmission"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TopologyError(f"fault at {self.where}: {name}={value!r} must be a number")
        if not isinstance(self.gone, bool):
            raise TopologyError(f"fault at {self.where}: gone={self.gone!r} must be true or false")
        if not 0.0 < self.bandwidth_factor <= 1.0:
            raise TopologyError(f"fault at {self.where}: bandwidth_factor={self.bandwidth_factor:g} must lie in (0, 1]")
        if not self.extra_latency_us >= 0.0:
            raise TopologyError(
                f"fault at {self.where}: extra_latency_us={self.extra_latency_us:g} must not be negative"
            )
        if not 0.0 <= self.retransmission < 1.0:
            raise TopologyError(f"fault at {self.where}: retransmission={self.retransmission:g} must lie in [0, 1)")

    @property
    def soft(self) -> bool:
        """Whether only bandwidth falls: ways and latencies stay as they are."""
        return not (self.gone or self.extra_latency_us or self.retransmission)


DRAWING = ("samples", "count", "seed", "kinds")
SHORT = {"link": "where", "node": "where", "bandwidth": "bandwidth_factor"}


def from_dicts(values: Iterable[Mapping[str, Any]]) -> list[Fault]:
    """Faults as a config has them (``SHORT`` names will do); TopologyError names an unknown key."""
    known = Fault.__dataclass_fields__
    faults = []
    if not isinstance(values, (list, tuple)):
        raise TopologyError(f"faults={values!r} must be a list, such as [{{link: nic0-leaf0, bandwidth: 0.5}}]")
    for each in values:
        if not isinstance(each, Mapping):
            raise TopologyError(f"fault {each!r} must be a mapping, such as {{link: nic0-leaf0, gone: true}}")
        value = {SHORT.get(str(name), str(name)): figure for name, figure in each.items()}
        unknown = sorted(set(value) - set(known))
        if unknown or "where" not in value:
            what = f"has no setting {unknown[0]!r}" if unknown else "lacks 'where'"
            raise TopologyError(f"a fault {what}; it has {', '.join(known)}")
        faults.append(Fault(**value))
    return faults


def apply(topology: Topology, faults: Iterable[Fault]) -> Topology:
    """The fabric with its faults. TopologyError for a link or node that is not there, or when ranks are cut off."""
    latency, health = topology.latency_us.copy(), np.ones(topology.links)
    keep = np.ones(topology.links, dtype=bool)
    for fault in faults:
        links = topology.touching(fault.where) if fault.where in topology.index else topology.find(fault.where)
        if fault.gone:
            keep[links] = False
            continue
        health[links] *= fault.bandwidth_factor * (1.0 - fault.retransmission)
        latency[links] += fault.extra_latency_us + 2.0 * fault.retransmission * latency[links]
    worn = health if topology.health is None else health * topology.health
    figures = {"bandwidth_gbps": topology.bandwidth_gbps * health, "latency_us": latency}
    changed = topology.replace(**figures, health=worn if (worn < 1.0).any() else None).keep(keep)
    parts = changed.parts()
    if len(parts) > 1:
        alone = ", ".join(parts[-1][:4]) + (" ..." if len(parts[-1]) > 4 else "")
        raise TopologyError(f"the faults partition {topology.name}: {alone} cannot reach the other ranks")
    return changed


def cables(topology: Topology, kinds: Sequence[str] = ()) -> list[str]:
    """Every cable as ``a-b``; only of some ``kinds`` of link when given. TopologyError for a kind that is not there."""
    missing = sorted(set(kinds) - set(topology.kind))
    if missing:
        raise TopologyError(f"{topology.name} has no links of kind {missing[0]!r}; it has {sorted(set(topology.kind))}")
    ends = zip(topology.source.tolist(), topology.target.tolist(), topology.kind, strict=True)
    found = dict.fromkeys((min(a, b), max(a, b)) for a, b, kind in ends if not kinds or kind in kinds)
    return [f"{topology.nodes[a]}-{topology.nodes[b]}" for a, b in found]


def draw(topology: Topology, count: int, like: Fault, seed: int, kinds: Sequence[str] = ()) -> list[Fault]:
    """``count`` different cables at random, each with the figures of ``like``; only of some ``kinds`` when given."""
    places = cables(topology, kinds)
    if count > len(places):
        raise TopologyError(f"{count} faults are more than the {len(places)} cables of {topology.name}")
    chosen = np.random.default_rng(seed).choice(len(places), count, replace=False)
    return [dataclasses.replace(like, where=places[each]) for each in sorted(chosen.tolist())]


def drawing(settings: Mapping[str, Any], name: str) -> tuple[int, int, int, Fault, tuple[str, ...]]:
    """(samples, count, seed, fault, kinds of link) of settings. TopologyError for what they cannot be."""
    figures = {key: value for key, value in settings.items() if key not in DRAWING}
    like = from_dicts([{**(figures or {"bandwidth_factor": 0.5}), "where": ""}])[0]
    numbers = []
    for key, usual, least in (("samples", 1, 1), ("count", 1, 1), ("seed", 0, 0)):
        value = settings.get(key, usual)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise TopologyError(f"{name}.{key}={value!r} must be a whole number of at least {least}")
        numbers.append(value)
    kinds = settings.get("kinds") or ()
    if isinstance(kinds, str):
        kinds = (kinds,)
    samples, count, seed = numbers
    return samples, count, seed, like, tuple(kinds)
