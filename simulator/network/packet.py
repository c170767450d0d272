"""The same transfers packet by packet, in ns-3: what checks the flow model on small cases.

Needs the PyPI package ``ns3`` (``pip install 'opcast[packet]'``) and a C++ compiler. Every pair of a collective is a
TCP connection over point-to-point links with fair queueing, jumbo frames and a window that covers the fabric, so that
what is compared is how links are shared and not how TCP recovers: stock ns-3 has no RDMA. The program (``ns3_job.cc``)
is compiled once against the package's headers and libraries and kept; its Python bindings, which take seconds to load,
are not needed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...datasets.installing import install_command
from .collectives import Phase
from .fabric import Fabric, Transfer
from .reduction import SWITCH_ALGORITHMS as IN_SWITCH
from .topology import Topology, TopologyError

PROGRAM_SOURCE = Path(__file__).with_name("ns3_job.cc")
MODULES = ("core", "network", "traffic-control", "internet", "point-to-point", "applications")
FRAME_BYTES, WINDOW_BYTES = 4148, 2_000_000  # 4 KiB of payload, as InfiniBand has
MAX_CONNECTIONS = 64_000  # one a connection
MAX_DEVICES = 64  # up to which every packet can be moved
TIMEOUT_S = 900.0  # of one question to ns-3
FIND_NS3 = "import importlib.util as u; at = u.find_spec('ns3'); print(at.submodule_search_locations[0] if at else '')"


class Message(NamedTuple):
    """Bytes from one rank to another, once the messages ``after`` have arrived; those of a ``lane`` go in order."""

    source: int
    target: int
    size_bytes: float
    after: tuple[int, ...] = ()
    lane: int = 0


def check_devices(count: int) -> None:
    """TopologyError for more devices than packets are moved for."""
    if count > MAX_DEVICES:
        raise TopologyError(
            f"network=packet moves every packet: {count} devices are too many (up to {MAX_DEVICES}); take network=flow"
        )


def with_algorithm(fabric: Fabric, transfer: Transfer) -> Transfer:
    """The transfer with an algorithm: the fastest whose bytes go from rank to rank, as packets do.

    TopologyError for a reduction in switches.
    """
    if transfer.algorithm in IN_SWITCH:
        raise TopologyError(
            f"network=packet sends from rank to rank: {transfer.algorithm} reduces in switches; name ring"
        )
    if transfer.algorithm or transfer.collective == "send":
        return transfer
    names = [name for name in fabric.algorithms(transfer.collective, transfer.group) if name not in IN_SWITCH]
    return transfer._replace(algorithm=fabric.fastest(transfer.collective, transfer.group, transfer.size_bytes, names))


def simulate(fabric: Fabric, transfers: Sequence[Transfer], python: str = sys.executable) -> np.ndarray:
    """End of each transfer in us [n], as an interpreter that has ns-3 finds it.

    TopologyError without ns-3, or for what only the flow model can do.
    """
    messages: list[Message] = []
    last: list[tuple[int, ...]] = []
    for transfer in (with_algorithm(fabric, transfer) for transfer in transfers):
        if transfer.release_us:
            raise TopologyError("packet simulation starts transfers after others, not at a time: leave out release_us")
        before = tuple(message for other in transfer.after for message in last[other])
        phases = fabric.plan(transfer.collective, fabric.algorithm(transfer), tuple(transfer.group))
        for phase in phases:
            before = _expand(messages, phase, transfer.size_bytes, before)
        last.append(before)
    ends = np.array([0.0, *arrivals(fabric.topology, messages, python)])
    return np.array([ends[1 + np.array(last_messages, dtype=np.int64)].max(initial=0.0) for last_messages in last])


def _expand(messages: list[Message], phase: Phase, size_bytes: float, before: tuple[int, ...]) -> tuple[int, ...]:
    """Append the messages of one phase; returns those that end it.

    What goes round goes step by step: a rank sends on what has arrived, after what it sends already.
    """
    ends: list[int] = []
    for move in phase:
        steps = round(move.steps) if move.round else 1
        first = messages[-1].lane + 1 if messages else 0
        size = move.size_bytes * size_bytes / max(steps, 1)
        previous: dict[int, int] = {}
        for _ in range(max(steps, 1)):
            arrived = {}
            for lane, (source, target) in enumerate(
                zip(move.source.tolist(), move.target.tolist(), strict=True), first
            ):
                wait = (previous[source],) if source in previous else before
                arrived[target] = len(messages)
                messages.append(Message(source, target, size, wait, lane))
                ends.append(len(messages) - 1)
            previous = arrived
    return tuple(ends)


def arrivals(topology: Topology, messages: Sequence[Message], python: str = sys.executable) -> list[float]:
    """When each message has arrived in whole, us."""
    if not messages:
        return []
    if messages[-1].lane >= MAX_CONNECTIONS:
        raise TopologyError(
            f"packet simulation takes {MAX_CONNECTIONS:,} connections at most, not {messages[-1].lane + 1:,}: "
            "use network=flow"
        )
    cables = _cables(topology)
    lines = [f"{FRAME_BYTES} {WINDOW_BYTES}", f"{len(topology.nodes)} {len(cables)} {len(messages)}"]
    lines += [f"{a} {b} {gbps!r} {us!r}" for a, b, gbps, us in cables]
    for message in messages:
        size = max(int(np.ceil(message.size_bytes)), 1)
        lines.append(" ".join(map(str, (*message[:2], size, message.lane, len(message.after), *message.after))))
    try:
        job = "\n".join(lines)
        done = subprocess.run(
            [compile_program(python)], input=job, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise TopologyError(f"ns-3 gave no answer in {TIMEOUT_S:.0f} s: take fewer or smaller transfers") from None
    arrival_us = [float(word) for word in done.stdout.split()]
    if done.returncode or len(arrival_us) != len(messages) or min(arrival_us, default=0.0) < 0.0:
        raise TopologyError(f"ns-3 gave no answer: {_last_line(done.stderr)}")
    return arrival_us


@lru_cache
def compile_program(python: str = sys.executable) -> Path:
    """ns-3's side, compiled for the package ``ns3`` of an interpreter. TopologyError without that or a compiler."""
    ns3, compiler = _find_ns3(python), shutil.which("c++") or shutil.which("g++")
    if ns3 is None:
        raise TopologyError(f"network=packet needs ns-3: {install_command('packet')}")
    if compiler is None:
        raise TopologyError("network=packet needs a C++ compiler: install g++ (Debian, Ubuntu: apt install g++)")
    libraries = [str(next(ns3.glob(f"lib*/libns3*-{name}.so"), "")) for name in MODULES]
    if "" in libraries:
        raise TopologyError(f"ns-3 in {ns3} has no module {MODULES[libraries.index('')]}: install ns3 anew")
    mark = hashlib.sha256(PROGRAM_SOURCE.read_bytes() + " ".join([compiler, *libraries]).encode()).hexdigest()
    folder = (
        PROGRAM_SOURCE.parent / "__pycache__"
        if os.access(PROGRAM_SOURCE.parent, os.W_OK)
        else Path.home() / ".cache" / "opcast"
    )
    binary = folder / f"{PROGRAM_SOURCE.stem}-{mark[:16]}"
    if not binary.exists():
        _compile([compiler, "-std=c++20", "-O1", f"-I{ns3 / 'include'}", str(PROGRAM_SOURCE)], libraries, binary)
    return binary


def _find_ns3(python: str) -> Path | None:
    """Where an interpreter has the package ns3."""
    if python == sys.executable:
        spec = importlib.util.find_spec("ns3")
        folders = list(spec.submodule_search_locations or ()) if spec else []
    else:
        folders = subprocess.run([python, "-c", FIND_NS3], capture_output=True, text=True, check=False).stdout.split()
    return Path(folders[0]) if folders else None


def _compile(command: Sequence[str], libraries: Sequence[str], binary: Path) -> None:
    binary.parent.mkdir(parents=True, exist_ok=True)
    temporary = binary.with_name(f"{binary.name}.{os.getpid()}")
    paths = [f"-Wl,-rpath,{folder}" for folder in dict.fromkeys(str(Path(library).parent) for library in libraries)]
    done = subprocess.run(
        [*command, *libraries, *paths, "-o", str(temporary)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        error = next((line for line in done.stderr.splitlines() if "error" in line), _last_line(done.stderr))
        raise TopologyError(f"the program for ns-3 does not compile: {error.strip()}")
    temporary.replace(binary)


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")


def _cables(topology: Topology) -> list[tuple[int, int, float, float]]:
    """Both directions of each cable as one: ns-3's links are full duplex, of one rate. TopologyError otherwise."""
    cables: dict[tuple[int, int], tuple[float, float]] = {}
    for link in range(topology.links):
        ends = int(topology.source[link]), int(topology.target[link])
        figures = float(topology.bandwidth_gbps[link]), float(topology.latency_us[link])
        reverse = cables.pop(ends[::-1], None)
        if reverse is not None and reverse != figures:
            raise TopologyError(f"packet simulation needs both directions of {topology.link_name(link)} alike")
        cables[ends if reverse is None else ends[::-1]] = figures
    return [(a, b, gbps, us) for (a, b), (gbps, us) in cables.items()]
