"""Which of the nodes that are ready for a lane goes first: a number for each node, the lowest first.

A policy is a function of a run and its joint graph; ``module:function`` names one of the user's own. Of equal numbers
the node that was ready first goes first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...datasets.counts import counted
from ...datasets.loading import nearest
from ...datasets.traces.groups import JoinedRun, RankedTraces
from ...datasets.traces.schema import COMMUNICATION, TraceFileError
from ..passes.custom import called, load

Policy = Callable[[RankedTraces, JoinedRun], np.ndarray]


def fifo(run: RankedTraces, joint: JoinedRun) -> np.ndarray:
    """Who is ready first."""
    return np.zeros(joint.edges.nodes, np.int32)


def communication_first(run: RankedTraces, joint: JoinedRun) -> np.ndarray:
    """Communication before all else."""
    return (~is_communication(run, joint)).astype(np.int32)


def start_time(run: RankedTraces, joint: JoinedRun) -> np.ndarray:
    """Who began first as recorded."""
    recorded = np.zeros(joint.edges.nodes)
    for rank, trace in run.traces.items():
        recorded[joint.node[rank]] = trace.exact_start_us
    keys = np.empty(joint.edges.nodes, np.int32)
    keys[np.argsort(recorded, kind="stable")] = np.arange(joint.edges.nodes, dtype=np.int32)
    return keys


POLICIES: dict[str, Policy] = {"fifo": fifo, "start_time": start_time, "communication_first": communication_first}


def policy_of(name: str) -> Policy:
    """The policy of a name. TraceFileError where there is none such, or it gives no number for each node."""
    if name in POLICIES:
        return POLICIES[name]
    if ":" not in name:
        hint = nearest(name, POLICIES, "one of")
        raise TraceFileError(f"policy={name!r} is none, nor module:function of your own; {hint}")
    function = load(name, "policy")

    def checked_keys(run: RankedTraces, joint: JoinedRun) -> np.ndarray:
        numbers = called(lambda: np.asarray(function(run, joint), np.float64), f"policy {name!r}")
        if numbers.shape != (joint.edges.nodes,) or np.isnan(numbers).any():
            raise TraceFileError(
                f"policy {name!r} must return a number for each of the {counted(joint.edges.nodes, 'node')}"
            )
        return np.unique(numbers, return_inverse=True)[1].astype(np.int32)

    return checked_keys


def is_communication(run: RankedTraces, joint: JoinedRun) -> np.ndarray:
    """Whether each node of a joined run communicates [nodes]."""
    communicates = np.zeros(joint.edges.nodes, bool)
    for rank, trace in run.traces.items():
        communicates[joint.node[rank]] = np.isin(trace.kind, COMMUNICATION)
    return communicates
