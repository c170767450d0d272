"""The same transfers packet by packet, in ns-3: what checks the flow model on small cases.

Needs the PyPI package ``ns3`` (``pip install 'opcast[packet]'``). Every message is a TCP connection over point-to-point
links with fair queueing, jumbo frames and a window that covers the fabric, so that what is compared is how links are
shared and not how TCP recovers: stock ns-3 has no RDMA. ns-3 runs in a process of its own (it takes seconds to load,
and keeps one simulation a process).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .collectives import Phase
from .fabric import Fabric, Transfer
from .topology import Topology, TopologyError

JOB = Path(__file__).with_name("ns3_job.py")
TIMEOUT_S = 900.0


class Message(NamedTuple):
    """Bytes from one rank to another, once the messages ``after`` have arrived."""

    source: int
    target: int
    size_bytes: float
    after: tuple[int, ...] = ()


def simulate(fabric: Fabric, transfers: Sequence[Transfer], python: str = sys.executable) -> np.ndarray:
    """End of each transfer in us [n], as an interpreter that has ns-3 finds it.

    TopologyError without ns-3, or for what only the flow model can do.
    """
    messages: list[Message] = []
    last: list[tuple[int, ...]] = []
    for transfer in transfers:
        if transfer.release_us:
            raise TopologyError("packet simulation starts transfers after others, not at a time: leave out release_us")
        before = tuple(each for other in transfer.after for each in last[other])
        phases = fabric.plan(transfer.collective, fabric.algorithm(transfer), tuple(transfer.group))
        for phase in phases:
            before = _expand(messages, phase, transfer.size_bytes, before)
        last.append(before)
    ends = np.array([0.0, *arrivals(fabric.topology, messages, python)])
    return np.array([ends[1 + np.array(each, dtype=np.int64)].max(initial=0.0) for each in last])


def _expand(messages: list[Message], phase: Phase, size_bytes: float, before: tuple[int, ...]) -> tuple[int, ...]:
    """Append the messages of one phase; returns those that end it. What goes round goes step by step."""
    ends: list[int] = []
    for move in phase:
        steps = round(move.steps) if move.round else 1
        previous: dict[int, int] = {}
        for _ in range(max(steps, 1)):
            arrived = {}
            for source, target in zip(move.source.tolist(), move.target.tolist(), strict=True):
                wait = (previous[source],) if source in previous else before
                arrived[target] = len(messages)
                messages.append(Message(source, target, move.size_bytes * size_bytes / max(steps, 1), wait))
                ends.append(len(messages) - 1)
            previous = arrived
    return tuple(ends)


def arrivals(topology: Topology, messages: Sequence[Message], python: str = sys.executable) -> list[float]:
    """When each message has arrived in whole, us."""
    job = {
        "nodes": len(topology.nodes),
        "links": _cables(topology),
        "messages": [[m.source, m.target, int(np.ceil(m.size_bytes)), list(m.after)] for m in messages],
    }
    command = [python, str(JOB)]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode or not done.stdout.strip():
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        hint = "; pip install 'opcast[packet]'" if "No module named" in reason else ""
        raise TopologyError(f"ns-3 gave no answer: {reason}{hint}")
    answer: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def _cables(topology: Topology) -> list[list[float]]:
    """Both directions of each cable as one: ns-3's links are full duplex, of one rate. TopologyError otherwise."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for link in range(topology.links):
        ends = int(topology.source[link]), int(topology.target[link])
        figures = float(topology.bandwidth_gbps[link]), float(topology.latency_us[link])
        other = found.pop(ends[::-1], None)
        if other is not None and other != figures:
            raise TopologyError(f"packet simulation needs both directions of {topology.link_name(link)} alike")
        found[ends if other is None else ends[::-1]] = figures
    return [[a, b, gbps, us] for (a, b), (gbps, us) in found.items()]
