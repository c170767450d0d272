"""What a report says of the links of a cluster: how they were simulated, how full they are and when, what faults do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from ..engines.flow import FlowEngine
from ..network.link_load import BINS, describe_load, fullest_kinds
from ..network.study import Study
from ..network.timeline_sharing import SharedTimeline
from ..network.topology import Topology


def links_report(flows: FlowEngine, shared: SharedTimeline | None, trials: Study | None = None) -> dict[str, Any]:
    """What a report says of links: how they were simulated, faults, their load, and a study of faults.

    ``shared`` is what links saw of the step that most of the time goes to. ``busy`` are shares of capacity over it,
    ``over_time`` over equal spans of it; ``apart_s`` is the step if every communication had links of its own.
    """
    report: dict[str, Any] = {
        "fidelity": flows.fidelity,
        "topology": flows.topology.name,
        "links": flows.topology.links,
    }
    if flows.faults:
        report["faults"] = [asdict(fault) for fault in flows.faults]
    if shared is not None:
        report |= link_loads(flows.topology, shared)
    if trials is not None:
        report["faults_study"] = trials.to_dict()
    return report


def link_loads(topology: Topology, shared: SharedTimeline) -> dict[str, Any]:
    """How full links are: the fullest, kinds of links, both over time; and what sharing them cost."""
    load = shared.load()
    hottest = fullest_kinds(topology, load)
    load_report = describe_load(topology, load, hottest, shared.over_time(hottest[0], BINS), shared.total_us)
    load_report["over_time"]["kinds"] = {
        kind: shared.mean_over_time(np.flatnonzero(topology.of_kind((kind,))), BINS).round(6).tolist()
        for kind in load_report["busy"]
    }
    return {
        "apart_s": shared.apart_us * 1e-6,
        "contention_s": (shared.total_us - shared.apart_us) * 1e-6,
        "rounds": shared.rounds,
        "residual": shared.residual,
        **load_report,
    }
