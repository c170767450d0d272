"""One step on one device: what each node costs, when it runs, and how sure that is.

A *synchronous* device (a CPU) computes in the host's own thread: kernel times and host times add. Any other
device runs behind the host, which launches ahead: a kernel starts when the one before it has ended and the host
has issued it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...datasets.devices import Device
from ...datasets.ops import Op, make_op
from ..engines import Answers, Engine, ask
from ..graph import Graph, Node
from .residency import CODE_BYTES, cold_fractions

HOST_BATCH = 128  # calls in the host_overhead op that a per-call cost is read off; campaigns measure as many


@dataclass(frozen=True)
class Timed:
    """The nodes of a step with their times; arrays have one entry per node, in execution order.

    ``kernel_us`` is the work, ``host_us`` what the host adds before it, ``start_us`` when the work starts;
    ``relative_low`` and ``relative_high`` bound each node's work as factors. ``total_us`` is the whole step.
    """

    nodes: Sequence[Node]
    kernel_us: np.ndarray
    host_us: np.ndarray
    start_us: np.ndarray
    relative_low: np.ndarray
    relative_high: np.ndarray
    engine: np.ndarray
    in_envelope: np.ndarray
    total_us: float
    low_us: float
    high_us: float


def time_graph(graph: Graph, device: Device, engine: Engine) -> Timed:
    """Time every node of a graph and schedule it on one device."""
    nodes = list(graph.nodes())
    code_bytes = CODE_BYTES if device.synchronous else 0
    cold = cold_fractions(nodes, graph.tensor_bytes, device.l2_mib * 2**20, code_bytes)
    kernel, low, high, names, inside = node_latencies(nodes, cold, device, engine)
    host = host_times(nodes, device, engine)
    start, total = schedule(kernel, host, device.synchronous)
    low_us, high_us = step_interval(nodes, kernel, low, high, total)
    return Timed(
        nodes,
        kernel,
        host,
        start,
        low,
        high,
        names,
        inside,
        total,
        low_us,
        high_us,
    )


def node_latencies(
    nodes: Sequence[Node], cold: np.ndarray, device: Device, engine: Engine
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(latency_us, low factor, high factor, engine, in_envelope) per node.

    Each distinct op is asked once warm and once cold; a node lies between the two by how cold its inputs are.
    An operator without a kind is costed by its bytes at memory bandwidth (``bytes``).
    """
    distinct: dict[Op, int] = {}
    where = np.array([-1 if n.op is None else distinct.setdefault(n.op, len(distinct)) for n in nodes], dtype=np.int64)
    ops = list(distinct)
    warm, chilled = ask(engine, ops, "warm"), ask(engine, ops, "cold")
    by_bytes = np.array([device.launch_us + n.bytes_moved / device.memory_gbps * 1e-3 for n in nodes])

    def mixed(values_warm: np.ndarray, values_cold: np.ndarray) -> np.ndarray:
        return values_warm[where] * (1 - cold) + np.maximum(values_cold, values_warm)[where] * cold

    if not ops:
        plain = np.ones(len(nodes))
        return by_bytes, plain * 0.5, plain * 2.0, np.full(len(nodes), "bytes", dtype=object), plain < 0
    known = where >= 0
    latency = np.where(known, mixed(warm.latency_us, chilled.latency_us), by_bytes)
    low = np.where(known, mixed(*_relative(warm, chilled, "low_us")), 0.5)
    high = np.where(known, mixed(*_relative(warm, chilled, "high_us")), 2.0)
    names = np.where(known, warm.engine[where], "bytes")
    return latency, low, high, names, np.where(known, warm.in_envelope[where], False)


def _relative(warm: Answers, chilled: Answers, bound: str) -> tuple[np.ndarray, np.ndarray]:
    return getattr(warm, bound) / warm.latency_us, getattr(chilled, bound) / chilled.latency_us


def host_times(nodes: Sequence[Node], device: Device, engine: Engine) -> np.ndarray:
    """Microseconds the host spends before each node.

    On a synchronous device an op's own dispatch is inside its measured latency; elsewhere the host also issues it.
    """
    kinds = ("dispatch", "view", "module", "autograd")
    per_call = ask(engine, [make_op("host_overhead", what=what, calls=HOST_BATCH) for what in kinds]).latency_us
    per_call = per_call / HOST_BATCH
    own = 0 if device.synchronous else 1
    calls = np.array([(n.host.dispatch + own, n.host.views, n.host.modules, n.host.autograd) for n in nodes])
    return calls.reshape(-1, len(kinds)) @ per_call


def schedule(kernel_us: np.ndarray, host_us: np.ndarray, synchronous: bool) -> tuple[np.ndarray, float]:
    """Start of every kernel and the end of the step, in microseconds.

    Launching ahead: ``end[i] = max(end[i-1], issued[i]) + kernel[i]``, which over prefix sums K of the kernels
    is ``K[i] + max over j <= i of (issued[j] - K[j-1])``.
    """
    if not len(kernel_us):
        return kernel_us, 0.0
    if synchronous:
        ends = np.cumsum(host_us + kernel_us)
        return ends - kernel_us, float(ends[-1])
    before = np.concatenate([[0.0], np.cumsum(kernel_us)[:-1]])
    start = before + np.maximum.accumulate(np.cumsum(host_us) - before)
    return start, float(start[-1] + kernel_us[-1])


def step_interval(
    nodes: Sequence[Node], kernel_us: np.ndarray, low: np.ndarray, high: np.ndarray, total_us: float
) -> tuple[float, float]:
    """An interval of the step from those of its ops.

    Errors of one predictor go together, those of different predictors do not: half-widths add within a kind and
    in quadrature between kinds.
    """
    below: dict[str, float] = {}
    above: dict[str, float] = {}
    for node, us, least, most in zip(nodes, kernel_us.tolist(), low.tolist(), high.tolist(), strict=True):
        name = node.op.kind if node.op else node.source
        below[name] = below.get(name, 0.0) + us * (1 - least)
        above[name] = above.get(name, 0.0) + us * (most - 1)
    down = float(np.sqrt(sum(v * v for v in below.values())))
    up = float(np.sqrt(sum(v * v for v in above.values())))
    return max(total_us - down, 0.0), total_us + up
