"""What each node takes: the engines' answers between warm and cold, what the host adds, and how sure that is.

A *synchronous* device (a CPU) computes in the host's own thread: kernel times and host times add. Any other device runs
behind the host, which launches ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...datasets.devices import Device
from ...datasets.ops import Op, make_op
from ...models.intervals import UNCALIBRATED_FACTOR
from ..engines import Answers, Engine, Witness, ask
from ..graph import REST, Node
from .coldness import Coldness

BY_BYTES = Witness("bytes", "bytes", "bytes")
# What a step may be off by, as a share of its time, however well each op is known: kernels run beside others, on
# operands of other values and places, by another build. Steps of eight small models on a CPU whose ops were measured
# are off by 3.0 to 9.9 % in the median (docs/evidence.md, `opcast quickstart models=all`). A judgement, not a fit.
IN_STEP = 0.03
HOST_BATCH = 128  # calls in the host_overhead op that a per-call cost is read off; campaigns measure as many


def node_latencies(
    nodes: Sequence[Node], cold: Coldness, device: Device, engine: Engine
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(latency_us, low factor, high factor, engine, in_envelope, witness) per node.

    Each distinct op is asked once warm and once cold; a node lies between the two by how cold its inputs are, and by
    how cold its code is as far as that explains the difference. Communication counts as warm, as it is measured: who
    answers for it cold is somebody else. An operator without a kind is costed by its bytes at memory bandwidth
    (``bytes``).
    """
    distinct: dict[Op, int] = {}
    where = np.array([-1 if n.op is None else distinct.setdefault(n.op, len(distinct)) for n in nodes], dtype=np.int64)
    ops = list(distinct)
    warm, chilled = ask(engine, ops, "warm"), ask(engine, ops, "cold")
    linked = np.array([op.cost.unit == "network" for op in ops], dtype=bool)
    by_bytes = np.array([device.launch_us + n.bytes_moved / device.memory_gbps * 1e-3 for n in nodes])

    if not ops:
        far, nobody = np.full(len(nodes), UNCALIBRATED_FACTOR), np.zeros(len(nodes), dtype=bool)
        nameless = np.full(len(nodes), "bytes", dtype=object)
        return by_bytes, 1.0 / far, far, nameless, nobody, _each(BY_BYTES, len(nodes))
    known = where >= 0
    fast = warm.latency_us[where]
    extra = np.maximum(chilled.latency_us[where] - fast, 0.0)
    code_us = np.minimum(cold.code_us, extra)
    slower = code_us * cold.code + (extra - code_us) * cold.data
    share = np.where(code_us > 0, slower / np.where(extra > 0, extra, 1.0), cold.data)
    share = np.where(linked[where], 0.0, share)

    def mixed(when_warm: np.ndarray, when_cold: np.ndarray) -> np.ndarray:
        return when_warm[where] * (1 - share) + np.maximum(when_cold, when_warm)[where] * share

    latency = np.where(known, mixed(warm.latency_us, chilled.latency_us), by_bytes)
    low = np.where(known, mixed(*_relative(warm, chilled, "low_us")), 1.0 / UNCALIBRATED_FACTOR)
    high = np.where(known, mixed(*_relative(warm, chilled, "high_us")), UNCALIBRATED_FACTOR)
    names = np.where(known, warm.engine[where], "bytes")
    witnesses = np.where(known, warm.witnesses()[where], _each(BY_BYTES, len(nodes)))
    return latency, low, high, names, np.where(known, warm.in_envelope[where], False), witnesses


def _each(witness: Witness, count: int) -> np.ndarray:
    """The same witness for so many nodes."""
    return np.full(count, witness, dtype=object)


def _relative(warm: Answers, chilled: Answers, bound: str) -> tuple[np.ndarray, np.ndarray]:
    return getattr(warm, bound) / warm.latency_us, getattr(chilled, bound) / chilled.latency_us


def host_times(nodes: Sequence[Node], device: Device, engine: Engine) -> np.ndarray:
    """Microseconds the host spends before each node.

    On a synchronous device an op's own dispatch is inside its measured latency; elsewhere the host also issues it: what
    the framework does for any call (``dispatch``, timed on empty tensors), and the launch of a kernel (``launch``).
    """
    kinds = ("dispatch", "launch", "view", "module", "autograd")
    per_call = ask(engine, [make_op("host_overhead", what=what, calls=HOST_BATCH) for what in kinds]).latency_us
    per_call = per_call / HOST_BATCH
    own = 0 if device.synchronous else 1
    calls = np.array([(n.host.dispatch + own, own, n.host.views, n.host.modules, n.host.autograd) for n in nodes])
    return calls.reshape(-1, len(kinds)) @ per_call


def python_us(nodes: Sequence[Node], cold: Coldness) -> np.ndarray:
    """Microseconds of modelling code's Python around each node: in the forward pass, whose operators it calls.

    Operator calls without work of their own stand in it like others.
    """
    calls = [n.host.dispatch + (not n.source.endswith(REST)) if n.phase == "forward" else 0 for n in nodes]
    return cold.python_us * np.array(calls, dtype=float)


def step_interval(
    kinds: Sequence[str], kernel_us: np.ndarray, low: np.ndarray, high: np.ndarray, total_us: float
) -> tuple[float, float]:
    """An interval of the step from those of its ops, ``low`` and ``high`` as factors [ops], by their kinds.

    Errors of one predictor go together, those of different predictors do not: half-widths add within a kind and
    in quadrature between kinds. To them comes what a step adds to its ops (:data:`IN_STEP`).
    """
    below: dict[str, float] = {}
    above: dict[str, float] = {}
    for name, us, least, most in zip(kinds, kernel_us.tolist(), low.tolist(), high.tolist(), strict=True):
        below[name] = below.get(name, 0.0) + us * (1 - least)
        above[name] = above.get(name, 0.0) + us * (most - 1)
    whole = IN_STEP * float(kernel_us.sum())
    down = float(np.sqrt(whole**2 + sum(v * v for v in below.values())))
    up = float(np.sqrt(whole**2 + sum(v * v for v in above.values())))
    return max(total_us - down, 0.0), total_us + up
