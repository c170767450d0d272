"""What each node takes: the engines' answers between warm and cold, what the host adds, and how sure that is.

A *synchronous* device (a CPU) computes in the host's own thread: kernel times and host times add. Any other device runs
behind the host, which launches ahead.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...datasets.devices import Device
from ...datasets.ops import KINDS, Op, make_op
from ...models.intervals import UNCALIBRATED_FACTOR
from ..engines import Answers, Engine, Witness, ask
from ..graph import REST_SUFFIX, Node
from .cold_products import bound_cold_products, weight_bytes
from .coldness import Coldness

BY_BYTES = Witness("bytes", "bytes", "bytes")
# What a step may be off by, as a share of the time of each family of its ops, however well each is known: kernels run
# beside others, on operands of other values and places. 90 % of a normal error whose root mean square is an H200's
# (tests/benchmarks/in_step.py: kernels in traces of four steps against rows of the same shapes): 1.0 % of products, 5 %
# of attention, 3.5 % of AdamW and softmax, which stand for all others. Nobody measured collectives so.
IN_STEP_PRODUCTS, IN_STEP_ATTENTION, IN_STEP = 0.016, 0.08, 0.058
IN_STEP_OF = {"gemm": IN_STEP_PRODUCTS, "moe": IN_STEP_PRODUCTS, "attention": IN_STEP_ATTENTION}
# The same of a whole step on a CPU: steps of eight small models whose ops were measured are off by 3.0 to 9.9 % in the
# median (docs/evidence.md, `opcast quickstart models=all`). A judgement, not a fit.
IN_STEP_CPU = 0.03
# Of the variance of a predictor's errors, what ops of one kind in a step share, by rows that were left out: 0.02 of
# products on an H200, -0.04 to 0.24 (median 0.00) of ten tables of L40S. Read off TABLE by
# tests/benchmarks/shared_errors.py; this is above most.
SHARED = 0.1
# The host_overhead ops that per-call costs are read off: as campaigns measure them.
PARTS = ("dispatch", "launch", "view", "module", "autograd")
HOST_BATCH, HOST_OPERATORS, HOST_DTYPE = 128, 160, "fp32"
# How far a model's operators are from those that were measured on the same host: the small decoder is 4 % above to 30 %
# below real ones of transformers on one CPU, and one virtual host took 28 to 40 ms for the same step within a minute.
MODELS_APART = 1.5
# Hosts of which nothing was measured: clocks, Python and the layers under a virtual one differ so much. A judgement.
HOSTS_APART = 2.0


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
    warm = ask(engine, ops, "warm")
    warm, chilled = bound_cold_products(engine, ops, warm, ask(engine, ops, "cold"), device)
    chilled = streamed(chilled, ops, device)
    linked = np.array([op.cost.unit == "network" for op in ops], dtype=bool)
    by_bytes = np.array([device.launch_us + n.bytes_moved / device.memory_gbps * 1e-3 for n in nodes])

    if not ops:
        far, nobody = np.full(len(nodes), UNCALIBRATED_FACTOR), np.zeros(len(nodes), dtype=bool)
        nameless = np.full(len(nodes), "bytes", dtype=object)
        return by_bytes, 1.0 / far, far, nameless, nobody, _each(BY_BYTES, len(nodes))
    timed = where >= 0
    fast = warm.latency_us[where]
    extra = np.maximum(chilled.latency_us[where] - fast, 0.0)
    code_us = np.minimum(cold.code_us, extra)
    slower = code_us * cold.code + (extra - code_us) * cold.data
    share = np.where(code_us > 0, slower / np.where(extra > 0, extra, 1.0), cold.data)
    share = np.where(linked[where], 0.0, share)

    later = chilled.latency_us >= warm.latency_us  # a cold call is never the faster one: else the warm answer counts

    def mixed(when_warm: np.ndarray, when_cold: np.ndarray) -> np.ndarray:
        return when_warm[where] * (1 - share) + np.where(later, when_cold, when_warm)[where] * share

    latency = np.where(timed, mixed(warm.latency_us, chilled.latency_us), by_bytes)
    low = np.where(timed, mixed(*_relative(warm, chilled, "low_us")), 1.0 / UNCALIBRATED_FACTOR)
    high = np.where(timed, mixed(*_relative(warm, chilled, "high_us")), UNCALIBRATED_FACTOR)
    names = np.where(timed, warm.engine[where], "bytes")
    witnesses = np.where(timed, warm.witnesses()[where], _each(BY_BYTES, len(nodes)))
    return latency, low, high, names, np.where(timed, warm.in_envelope[where], False), witnesses


def streamed(answers: Answers, ops: Sequence[Op], device: Device) -> Answers:
    """Cold answers of a CPU, none faster than its measured bandwidth allows for the weights of a product.

    A campaign empties the cache that it was told of; another one behind it may keep the weights.
    """
    if not device.synchronous:
        return answers
    least = np.array([weight_bytes(op) / device.memory_gbps * 1e-3 for op in ops])
    slower = np.where(np.isfinite(answers.latency_us), np.maximum(least / answers.latency_us, 1.0), 1.0)
    times = {name: getattr(answers, name) * slower for name in ("latency_us", "low_us", "high_us")}
    return replace(answers, **times)


def _each(witness: Witness, count: int) -> np.ndarray:
    """The same witness for so many nodes."""
    return np.full(count, witness, dtype=object)


def _relative(warm: Answers, chilled: Answers, bound: str) -> tuple[np.ndarray, np.ndarray]:
    return getattr(warm, bound) / warm.latency_us, getattr(chilled, bound) / chilled.latency_us


@dataclass(frozen=True)
class HostTimes:
    """Microseconds the host spends before each node [nodes], and factors between which that is."""

    us: np.ndarray
    low: float = 1.0
    high: float = 1.0


def host_times(nodes: Sequence[Node], device: Device, engine: Engine, eager: bool = False) -> HostTimes:
    """What the host spends before each node.

    On a synchronous device an op's own dispatch is inside its measured latency; elsewhere the host also issues it. Of
    an ``eager`` framework one operator takes what it takes inside a model (``operator``): views, modules and the
    Python of modelling code are in it. A backward node adds what autograd takes beyond an operator's dispatch. Of any
    other framework it is the sum of parts: what is done for any call (``dispatch``, timed on empty tensors), the
    launch of a kernel (``launch``), views, modules, autograd nodes.
    """
    if eager and not device.synchronous:
        operator_us, measured = _per_call(
            engine, {"operator": HOST_OPERATORS, "dispatch": HOST_BATCH, "autograd": HOST_BATCH}
        )
        operator_us[2] = max(operator_us[2] - operator_us[1], 0.0)
        counts = [(not node.source.endswith(REST_SUFFIX), node.host.dispatch, node.host.autograd) for node in nodes]
        apart = MODELS_APART if measured[0] else HOSTS_APART
        return HostTimes(np.array(counts, dtype=float).reshape(-1, 3) @ operator_us, 1.0 / apart, apart)
    asynchronous = 0 if device.synchronous else 1
    parts = [
        (n.host.dispatch + asynchronous, asynchronous, n.host.views, n.host.modules, n.host.autograd) for n in nodes
    ]
    operator_us, _ = _per_call(engine, dict.fromkeys(PARTS, HOST_BATCH))
    return HostTimes(np.array(parts).reshape(-1, len(PARTS)) @ operator_us)


def _per_call(engine: Engine, calls: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds of one call of each choice of ``host_overhead``, read off so many, and whether it was measured."""
    ops = [make_op("host_overhead", dtype=HOST_DTYPE, what=what, calls=count) for what, count in calls.items()]
    answers = ask(engine, ops)
    us: np.ndarray = answers.latency_us / np.array(list(calls.values()))
    return us, answers.engine == "measured"


def python_us(nodes: Sequence[Node], cold: Coldness) -> np.ndarray:
    """Microseconds of modelling code's Python around each node: in the forward pass, whose operators it calls.

    Operator calls without work of their own stand in it like others.
    """
    calls = [n.host.dispatch + (not n.source.endswith(REST_SUFFIX)) if n.phase == "forward" else 0 for n in nodes]
    return cold.python_us * np.array(calls, dtype=float)


def step_interval(
    kinds: Sequence[str],
    ops: Sequence[Hashable],
    kernel_us: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    total_us: float,
    shared: np.ndarray | float = 1.0,
    on_cpu: bool = False,
) -> tuple[float, float]:
    """An interval of the step from those of its ops, ``low`` and ``high`` as factors [ops], by their kinds.

    An error has a part that all ops of a kind share, ``shared`` of its variance [ops], and one of its own. Half-widths
    of the first add within a kind, those of the second for the same op alone; all else adds in quadrature, also
    between kinds. To them comes what a step adds to its ops (:func:`in_step_us`).
    """
    common, alone = np.sqrt(shared), np.sqrt(1.0 - np.asarray(shared))
    step_us = IN_STEP_CPU * float(kernel_us.sum()) if on_cpu else in_step_us(kinds, kernel_us)

    def half_us(widths_us: np.ndarray) -> float:
        by_kind, by_op = _sums(kinds, common * widths_us), _sums(ops, alone * widths_us)
        return float(np.sqrt(step_us**2 + (by_kind**2).sum() + (by_op**2).sum()))

    down, up = half_us(kernel_us * (1.0 - low)), half_us(kernel_us * (high - 1.0))
    return max(total_us - down, 0.0), total_us + up


def in_step_us(kinds: Sequence[str], kernel_us: np.ndarray) -> float:
    """What a step on a GPU may add to its ops or take from them, in us: alike within a family, apart between them."""
    families = [KINDS[kind].family if kind in KINDS else "" for kind in kinds]
    spreads = np.array([IN_STEP_OF.get(family, IN_STEP) for family in families])
    return float(np.sqrt((_sums(families, spreads * kernel_us) ** 2).sum()))


def _sums(names: Sequence[Hashable], values: np.ndarray) -> np.ndarray:
    """Sums of values [n] by name."""
    place: dict[Hashable, int] = {}
    codes = np.array([place.setdefault(name, len(place)) for name in names], dtype=np.int64)
    return np.bincount(codes, weights=np.broadcast_to(values, codes.shape), minlength=1)
