"""What a report says of the links of a cluster: how they were simulated, how full they are and when, what faults do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from ..engines.flow import FlowEngine
from ..network.load import BINS, described, sorts
from ..network.study import Study
from ..network.together import Shared
from ..network.topology import Topology


def links_report(flows: FlowEngine, shared: Shared | None, trials: Study | None = None) -> dict[str, Any]:
    """What a report says of links: how they were simulated, faults, their load, and a study of faults.

    ``shared`` is what links saw of the step that most of the time goes to. ``busy`` are shares of capacity over it,
    ``over_time`` over equal spans of it; ``apart_s`` is the step if every communication had links of its own.
    """
    found: dict[str, Any] = {"fidelity": flows.fidelity, "topology": flows.topology.name, "links": flows.topology.links}
    if flows.faults:
        found["faults"] = [asdict(fault) for fault in flows.faults]
    if shared is not None:
        found |= loads(flows.topology, shared)
    if trials is not None:
        found["faults_study"] = trials.to_dict()
    return found


def loads(topology: Topology, shared: Shared) -> dict[str, Any]:
    """How full links are: the fullest, kinds of links, both over time; and what sharing them cost."""
    load = shared.load()
    hot = sorts(topology, load)
    told = described(topology, load, hot, shared.over_time(hot[0], BINS), shared.total_us)
    told["over_time"]["kinds"] = {
        kind: shared.mean_over_time(np.flatnonzero(topology.of_kind((kind,))), BINS).round(6).tolist()
        for kind in told["busy"]
    }
    return {
        "apart_s": shared.apart_us * 1e-6,
        "contention_s": (shared.total_us - shared.apart_us) * 1e-6,
        "rounds": shared.rounds,
        "residual": shared.residual,
        **told,
    }
