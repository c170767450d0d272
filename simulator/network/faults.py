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

from ...datasets.loading import load
from .topology import Topology, TopologyError


class PartitionError(TopologyError):
    """Faults that cut ranks off from the others."""


@dataclass(frozen=True)
class Fault:
    """``where``: a link ``a->b``, a cable ``a-b``, or a node. Hard when ``gone``, else soft by the other figures."""

    where: str = ""
    gone: bool = False
    bandwidth_factor: float = 1.0
    extra_latency_us: float = 0.0
    retransmission: float = 0.0

    def __post_init__(self) -> None:
        label = f"fault at {self.where}" if self.where else "a fault"
        if not isinstance(self.where, str):
            raise TopologyError(f"a fault is at {self.where!r}; it must name a link, such as nic0-leaf0, or a node")
        if not isinstance(self.gone, bool):
            raise TopologyError(f"{label}: gone={self.gone!r} must be true or false")
        for name, setting, minimum, maximum in FIGURES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TopologyError(f"{label}: {setting}={value!r} must be a number")
            if not minimum <= value <= maximum:
                raise TopologyError(f"{label}: {setting}={value:g} must {_range_text(minimum, maximum)}")
        if self.gone and (self.bandwidth_factor < 1.0 or self.extra_latency_us or self.retransmission):
            raise TopologyError(f"{label}: what is gone has no other figures; leave them out, or gone")

    @property
    def soft(self) -> bool:
        """Whether only bandwidth falls: ways and latencies stay as they are."""
        return not (self.gone or self.extra_latency_us or self.retransmission)

    def links(self, topology: Topology) -> np.ndarray:
        """The links that it touches. TopologyError for a link or node that is not there."""
        return topology.links_of_node(self.where) if self.where in topology.index else topology.find(self.where)


MIN_SHARE = 1e-3  # of a link's bandwidth that a fault can leave: less is gone
FIGURES = (  # of a soft fault: name, as a config has it, least, most
    ("bandwidth_factor", "bandwidth", MIN_SHARE, 1.0),
    ("extra_latency_us", "extra_latency_us", 0.0, 1e6),
    ("retransmission", "retransmission", 0.0, 1.0 - MIN_SHARE),
)
DRAWING_SETTINGS = ("count", "seed", "kinds")
SWITCH_KIND = "switch"  # a kind of place beside the kinds of links: every node that is neither a GPU nor a NIC
ALIASES = {"link": "where", "node": "where", "bandwidth": "bandwidth_factor"}
EFFECT_EXAMPLES = ("bandwidth: 0.5", "extra_latency_us: 5", "retransmission: 0.01", "gone: true")
EXAMPLE = "such as {link: nic0-leaf0, bandwidth: 0.5}"


def faults_from_dicts(values: Iterable[Mapping[str, Any]]) -> list[Fault]:
    """Faults as a config has them (``ALIASES`` names will do); TopologyError for what says nothing or too much."""
    if not isinstance(values, (list, tuple)):
        raise TopologyError(f"faults={values!r} must be a list, such as [{{link: nic0-leaf0, bandwidth: 0.5}}]")
    faults = []
    for value in values:
        if not isinstance(value, Mapping):
            raise TopologyError(f"fault {value!r} must be a mapping, {EXAMPLE}")
        if not {"where", "link", "node"} & set(map(str, value)):
            raise TopologyError(f"a fault lacks its link or node, {EXAMPLE}")
        faults.append(_fault(value))
    return faults


def _fault(values: Mapping[str, Any]) -> Fault:
    """A fault that does something; TopologyError for an unknown name, two places or no effect."""
    value = {ALIASES.get(str(name), str(name)): figure for name, figure in values.items()}
    unknown = sorted(set(value) - set(Fault.__dataclass_fields__))
    if unknown:
        raise TopologyError(f"a fault has no setting {unknown[0]!r}; it has link or node, {', '.join(EFFECT_EXAMPLES)}")
    if len(value) < len(values):
        raise TopologyError(f"fault {dict(values)} says one thing twice: name a link or a node")
    fault = load(Fault, value, TopologyError, "a fault", "setting")
    if fault == Fault(fault.where):
        label = f"fault at {fault.where}" if fault.where else "a fault"
        raise TopologyError(f"{label} does nothing: give {', '.join(EFFECT_EXAMPLES[:-1])} or {EFFECT_EXAMPLES[-1]}")
    return fault


def apply_faults(topology: Topology, faults: Iterable[Fault]) -> Topology:
    """The fabric with its faults.

    TopologyError for a link or node that is not there, PartitionError when ranks are cut off.
    """
    latency, health = topology.latency_us.copy(), np.ones(topology.links)
    keep = np.ones(topology.links, dtype=bool)
    for fault in faults:
        links = fault.links(topology)
        if fault.gone:
            keep[links] = False
            continue
        health[links] *= fault.bandwidth_factor * (1.0 - fault.retransmission)
        latency[links] += fault.extra_latency_us + 2.0 * fault.retransmission * latency[links]
    worn = health if topology.health is None else health * topology.health
    worn_links = worn if (worn < 1.0).any() else None
    changed = dataclasses.replace(
        topology, bandwidth_gbps=topology.bandwidth_gbps * health, latency_us=latency, health=worn_links
    ).keep(keep)
    parts = changed.parts()
    if len(parts) > 1:
        isolated = ", ".join(parts[-1][:4]) + (" ..." if len(parts[-1]) > 4 else "")
        raise PartitionError(f"the faults partition {topology.name}: {isolated} cannot reach the other ranks")
    return changed


def fault_sites(topology: Topology, kinds: Sequence[str] = ()) -> list[str]:
    """Every cable as ``a-b``; only of some ``kinds`` of link when given, of which ``switch`` are the switches.

    TopologyError for a kind that is not there.
    """
    link_kinds = sorted(set(topology.kind))
    missing = sorted(set(kinds) - {*link_kinds, SWITCH_KIND})
    if missing:
        raise TopologyError(f"{topology.name} has no links of kind {missing[0]!r}; it has {', '.join(link_kinds)}")
    ends = zip(topology.source.tolist(), topology.target.tolist(), topology.kind, strict=True)
    cables = dict.fromkeys((min(a, b), max(a, b)) for a, b, kind in ends if not kinds or kind in kinds)
    switches = [name for name in topology.nodes[topology.ranks :] if not name.startswith("nic")]
    return [f"{topology.nodes[a]}-{topology.nodes[b]}" for a, b in cables] + (switches if SWITCH_KIND in kinds else [])


def draw_faults(topology: Topology, count: int, like: Fault, seed: int, kinds: Sequence[str] = ()) -> list[Fault]:
    """``count`` different places at random, each with the figures of ``like``; only of some ``kinds`` when given."""
    sites = fault_sites(topology, kinds)
    if count > len(sites):
        raise TopologyError(f"{count} faults are more than the {len(sites)} places of {topology.name} that may fail")
    return [dataclasses.replace(like, where=site) for site in _sample_sites(sites, count, seed)]


def _sample_sites(sites: Sequence[str], count: int, seed: int) -> list[str]:
    indices = np.random.default_rng(seed).choice(len(sites), count, replace=False)
    return [sites[index] for index in sorted(indices.tolist())]


@dataclass(frozen=True)
class Drawing:
    """Faults like ``like`` at ``at_once`` places of some ``kinds``, ``samples`` times; or ``everywhere``: each in turn.

    With ``straggler`` no link fails, but devices or nodes compute so many times longer.
    """

    samples: int
    at_once: int
    seed: int
    like: Fault
    kinds: tuple[str, ...]
    everywhere: bool = False
    straggler: float | None = None

    def among(self, sites: Sequence[str]) -> list[list[str]]:
        """Which of the known places each sample has; the same seed draws the same. TopologyError for too few."""
        if self.at_once > len(sites):
            raise TopologyError(
                f"faults_study.count={self.at_once} is more than the {len(sites)} places that there are"
            )
        if self.everywhere:
            return [[site] for site in sites]
        seeds = np.random.SeedSequence(self.seed).generate_state(self.samples)
        return [_sample_sites(sites, self.at_once, int(seed)) for seed in seeds]

    def faults(self, topology: Topology) -> list[list[Fault]]:
        """The faults of each sample on a fabric. TopologyError for a kind that is not there, or too few places."""
        samples = self.among(fault_sites(topology, self.kinds))
        return [[dataclasses.replace(self.like, where=site) for site in sample] for sample in samples]


def read_drawing(settings: Mapping[str, Any] | Drawing, name: str) -> Drawing:
    """What settings draw; a drawing is itself. Only a study has samples, ``everywhere`` and stragglers.

    TopologyError for what cannot be.
    """
    if isinstance(settings, Drawing):
        return settings
    drawing_settings = (
        ("samples", "straggler", "everywhere", *DRAWING_SETTINGS) if name == "faults_study" else DRAWING_SETTINGS
    )
    figures = {key: value for key, value in settings.items() if key not in drawing_settings}
    misplaced = [
        key
        for key in figures
        if ALIASES.get(key, key) == "where" or (key, drawing_settings) == ("samples", DRAWING_SETTINGS)
    ]
    if misplaced:
        hint = "faults=[{link: nic0-leaf0, gone: true}]" if misplaced != ["samples"] else "faults_study.samples"
        raise TopologyError(f"{name} draws its places and has no {misplaced[0]!r}: use {hint}")
    try:
        like = Fault() if _is_straggler_study(settings, figures) else _fault(figures or {"bandwidth": 0.5})
    except TopologyError as error:
        raise TopologyError(f"{name}: {error}") from None
    numbers = []
    for key, default, minimum in (("samples", 1, 1), ("count", 1, 1), ("seed", 0, 0)):
        value = settings.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise TopologyError(f"{name}.{key}={value!r} must be a whole number of at least {minimum}")
        numbers.append(value)
    everywhere = settings.get("everywhere", False)
    if not isinstance(everywhere, bool):
        raise TopologyError(f"{name}.everywhere={everywhere!r} must be true or false")
    kinds = settings.get("kinds") or ()
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if not isinstance(kinds, (list, tuple)) or not all(isinstance(kind, str) for kind in kinds):
        raise TopologyError(f"{name}.kinds={kinds!r} must be kinds of links, such as [ib, nvlink], or [switch]")
    unfit = sorted(set(kinds) - {"device", "node"}) if "straggler" in settings else []
    if unfit:
        raise TopologyError(f"{name}.kinds={unfit[0]} cannot be slow; with straggler they are device or node")
    samples, count, seed = numbers
    return Drawing(samples, count, seed, like, tuple(kinds), everywhere, settings.get("straggler"))


def _is_straggler_study(settings: Mapping[str, Any], figures: Mapping[str, Any]) -> bool:
    """Whether a study is one of slow devices, not of links. TopologyError for both, or what makes nothing slower."""
    if "straggler" not in settings:
        return False
    slowdown = settings["straggler"]
    if isinstance(slowdown, bool) or not isinstance(slowdown, (int, float)) or not 1.0 < slowdown < float("inf"):
        raise TopologyError(f"straggler={slowdown!r} must be a number above 1, such as 1.2")
    if figures:
        raise TopologyError(
            f"straggler slows a device down and {next(iter(figures))} a link: study one after the other"
        )
    return True


def _range_text(minimum: float, maximum: float) -> str:
    return f"lie between {minimum:g} and {maximum:g}" if maximum < 1e6 else "not be negative"
