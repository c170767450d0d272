"""What a report says of the links of a cluster: how they were simulated, how full they are and when, what faults do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from ..engines import FusedEngine
from ..engines.flow import flow_engine
from ..network.load import BINS, described, sorts
from ..network.together import Shared
from ..network.topology import Topology
from .answer import InferenceReport, StepReport


def network_report(
    report: StepReport | InferenceReport, engine: FusedEngine, faults_study: Mapping[str, Any]
) -> dict[str, Any]:
    """What a report says of links: how they were simulated, faults, their load, of a training step the study.

    ``busy`` are shares of capacity over the step, ``over_time`` over equal spans of it; ``apart_s`` is the step if
    every communication had links of its own.
    """
    flows = flow_engine(engine)
    if flows is None:
        return {}
    found: dict[str, Any] = {"fidelity": flows.fidelity, "topology": flows.topology.name, "links": flows.topology.links}
    if flows.faults:
        found["faults"] = [asdict(fault) for fault in flows.faults]
    if report.shared is not None:
        found |= loads(flows.topology, report.shared)
    if faults_study and isinstance(report, StepReport):
        from ..contention.fault_study import study

        found["faults_study"] = study(report.placed, engine, faults_study).to_dict()
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
