"""Who can measure an op on a GPU, and how long that takes: answered on any machine, by the real builders.

No GPU is needed: builders run on tensors without memory (:mod:`.cases.outline`), and what chips lack is a table
(:mod:`..datasets.kernels`). Whose kernels a stack launches is another, by which rows answer, too
(:mod:`..datasets.launches`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..datasets.backends import means
from ..datasets.devices import Device
from ..datasets.kernels import NORM_SUMS, kernels, lacking, package_of
from ..datasets.launches import ANYONE, CUSTOM_SUM, Caller, launches, place, unable
from ..datasets.ops import KINDS, Op
from .plan import Settings

CASE_S = 0.3  # of a case beside its repetitions: allocation, warm-up, bookkeeping
FEWEST_CALLS = 8  # of a case, however long one takes
FILL_GBPS = 200.0  # at which random inputs are made
MOST_OF_LIBRARIES = 3
COLLECTIVE = "nccl"
OWN_SUM_MOST_BYTES = 8 << 20  # CustomAllreduce's max_size; above it engines sum by NCCL
OWN_SUM_RANKS = {"vllm": (2, 4, 6, 8), "flashinfer": (2, 4, 8)}
OWN_SUM_WORDS = "engines leave it to NCCL: this kernel is for up to 8 MiB on {} or {} GPUs of one node"
GRAPH_MOST_BYTES = 16 << 20  # of a sum that is captured: vLLM's graphs hold 512 tokens at the most (cudagraph sizes)
CAPTURED, CAPTURED_KINDS = "nccl:graph", ("all_reduce", "all_gather", "reduce_scatter")
SDPA = "sdpa"  # what torch takes for attention where a stack's own choice is not to be had
EAGER = "operators one by one: this stack runs them as one kernel"


@dataclass(frozen=True)
class MeasuringWay:
    """A backend for an op: the package that it is of (empty: torch), why it cannot run it (empty: it can).

    ``op`` is what it runs: the op that was asked for, or a sum without the norm in place of one with it. ``bytes`` is
    what a case takes on the device, ``kernel`` what the builder says of the kernel, ``kernels`` how many a call
    launches, and ``own`` whether the stack launches it or, where it launches none that can be measured, one alike.
    """

    backend: str
    op: Op
    package: str = ""
    refusal: str = ""
    bytes: int = 0
    kernel: str | None = None
    kernels: int = 1
    own: bool = True

    @property
    def runs(self) -> bool:
        """Whether it can measure the op."""
        return not self.refusal


def ways(op: Op, device: Device, caller: Caller = ANYONE) -> list[MeasuringWay]:
    """Every backend that knows the kind: those that the caller launches first, then torch's, then those of others.

    For nobody in particular operators one by one are an answer too. Where the caller itself has no kernel for the op,
    it is the only way, and says why.
    """
    from .cases import backends

    if KINDS[op.kind].collective:
        return _collectives(op, device, caller)
    names = backends(op, "cpu" if device.synchronous else "cuda")
    if why := unable(caller, op, device):
        return [MeasuringWay(caller.engine or caller.framework, op, refusal=why)]
    places = {name: _place(op, name, caller) for name in names}
    all_ways = [_way(op, name, device, caller, places[name] is not None) for name in names]

    def order(way: MeasuringWay) -> tuple[bool, float, bool]:
        at = places[way.backend]
        return not way.runs, float("inf") if at is None else at, bool(way.package)

    return sorted(all_ways, key=order)


def to_measure(all_ways: Sequence[MeasuringWay]) -> list[MeasuringWay]:
    """The ways that answer for a step: those of packages that go before torch's best, and torch's; else the first.

    torch's is measured in any case, because every machine has it.
    """
    able = [way for way in all_ways if way.runs]
    of_torch = [way for way in able if not way.package]
    before = able[: able.index(of_torch[0])] if of_torch else able
    packages = [way for way in before if way.own][:MOST_OF_LIBRARIES]
    best = [way for way in of_torch if way.backend in (of_torch[0].backend, SDPA)]
    return [*packages, *best] or able[:1]


def _place(op: Op, backend: str, caller: Caller) -> int | None:
    """Where a backend stands among those that a caller launches, and behind them those that are nearest to its own."""
    at = place(caller, op.kind, op.dtype, backend)
    if at is not None or not caller.admits(op.kind, backend):
        return at
    nearest, launched = caller.known.nearest, len(launches(caller, op.kind, op.dtype))
    return next((launched + at for at, name in enumerate(nearest) if means(name, backend)), None)


def _way(op: Op, backend: str, device: Device, caller: Caller, here: bool) -> MeasuringWay:
    from .cases import Unsupported
    from .cases.outline import outline
    from .cases.system import IN_PIECES

    package = package_of(backend)
    count = kernels(op.kind, backend)
    why = lacking(op, backend, device) or ("" if caller.admits(op.kind, backend) else EAGER)
    if why or device.synchronous:
        return MeasuringWay(backend, op, package, why, int(op.cost.bytes), None, count, here)
    major, minor = divmod(round(10 * device.sm), 10)
    try:
        sketch = outline(op, backend, (major, minor))
    except Unsupported as error:
        return MeasuringWay(backend, op, package, str(error), 0, None, count, here)
    if sketch.bytes > device.memory_gib * 2**30 and op.kind not in IN_PIECES:
        why = f"it needs {sketch.bytes / 2**30:.1f} GiB of {device.memory_gib:g} GiB"
    return MeasuringWay(backend, op, package, why, sketch.bytes, sketch.kernel, count, here)


def _collectives(op: Op, device: Device, caller: Caller) -> list[MeasuringWay]:
    """The ways of a collective; as an engine captures it first, where the caller is one. They need all of its ranks.

    An all-reduce with the norm in it is measured without it, too: not all kernels have it.
    """
    if op.kind == "all_reduce" and op.norm:
        normed = [_collective(op, name, device) for name in caller.of_chip(caller.known.norm_sums) or NORM_SUMS]
        return [*normed, *_collectives(op.replace(norm="no"), device, caller)]
    names: tuple[str, ...] = ("gloo",) if device.synchronous else (COLLECTIVE,)
    if caller.engine and not device.synchronous:
        names = (*_served(op, caller), *names)
    return [_collective(op, name, device) for name in names]


def _served(op: Op, caller: Caller) -> tuple[str, ...]:
    """How an engine runs a collective that its graphs hold."""
    if op.kind not in CAPTURED_KINDS or op.size_bytes > GRAPH_MOST_BYTES:
        return ()
    sums = [name for name in caller.of_chip(caller.known.sums) or (CUSTOM_SUM,) if ":" in name]
    return (*sums, CAPTURED) if op.kind == "all_reduce" and not caller.collectives else (CAPTURED,)


def _collective(op: Op, backend: str, device: Device) -> MeasuringWay:
    ranks, nodes, package = op.ranks, -(-op.ranks // op.ranks_per_node), package_of(backend)
    why = lacking(op, backend, device)
    if getattr(op, "experts", ranks) % ranks:
        why = f"{op.experts} experts do not divide by {ranks} ranks"
    elif ranks < 2:
        why = "a collective needs at least 2 ranks"
    elif not why and package in OWN_SUM_RANKS:
        counts = OWN_SUM_RANKS[package]
        fits = nodes == 1 and op.size_bytes <= OWN_SUM_MOST_BYTES and ranks in counts
        why = "" if fits else OWN_SUM_WORDS.format(", ".join(map(str, counts[:-1])), counts[-1])
    where = f"{ranks} GPUs on {nodes} node{'s' * (nodes > 1)}"
    return MeasuringWay(backend, op, package, why, int(2 * op.cost.bytes), where)


def seconds(latency_us: float, size_bytes: float, settings: Settings, caches: int = 2) -> float:
    """How long an op of so many microseconds takes to measure: repetitions, inputs, and what is around them.

    What a package compiles at its first call is not in it.
    """
    repeated = max(settings.case_budget_s, FEWEST_CALLS * latency_us / 1e6)
    return caches * (CASE_S + repeated + size_bytes / (FILL_GBPS * 1e9))
