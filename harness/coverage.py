"""Who can measure an op on a GPU, and how long that takes: answered on any machine, by the real builders.

No GPU is needed: builders run on tensors without memory (:mod:`.cases.outline`), and what chips lack is a table
(:mod:`...datasets.kernels`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..datasets.devices import Device
from ..datasets.kernels import is_eager, kernels, lacking, libraries, package_of
from ..datasets.ops import KINDS, Op
from .plan import Settings

CASE_S = 0.3  # of a case beside its repetitions: allocation, warm-up, bookkeeping
FEWEST_CALLS = 8  # of a case, however long one takes
FILL_GBPS = 200.0  # at which random inputs are made
MOST_OF_LIBRARIES = 3
COLLECTIVE = "nccl"
VLLM_ALL_REDUCE, VLLM_MOST_BYTES = "vllm:custom_all_reduce", 8 << 20  # CustomAllreduce's max_size
GRAPH_MOST_BYTES = 16 << 20  # of a sum that is captured: vLLM's graphs hold 512 tokens at the most (cudagraph sizes)
SERVED_BY = {
    "all_reduce": (VLLM_ALL_REDUCE, "nccl:graph"),
    "all_gather": ("nccl:graph",),
    "reduce_scatter": ("nccl:graph",),
}
TRAINS = ("megatron", "nemo", "torchtitan")
SDPA = "sdpa"  # what torch takes for attention where a stack's own choice is not to be had
EAGER = "operators one by one: this stack runs them as one kernel"


@dataclass(frozen=True)
class MeasuringWay:
    """A backend for an op: the package that it is of (empty: torch), why it cannot run it (empty: it can).

    ``bytes`` is what a case takes on the device, ``kernel`` what the builder says of the kernel, ``kernels`` how many a
    call launches, and ``own`` whether it is of a library that the stack runs.
    """

    backend: str
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


def ways(op: Op, device: Device, stack: str = "") -> list[MeasuringWay]:
    """Every backend that knows the kind, those of the stack's libraries first, then torch's, then those of others.

    ``stack`` is the id of a framework; with none operators one by one are an answer too.
    """
    from .cases import backends

    if KINDS[op.kind].collective:
        return _collectives(op, device, stack)
    names = backends(op, "cpu" if device.synchronous else "cuda")
    found = [_way(op, name, device, stack) for name in names]
    order = libraries(stack)
    return sorted(found, key=lambda way: (not way.runs, _place(way, order)))


def to_measure(found: Sequence[MeasuringWay]) -> list[MeasuringWay]:
    """The ways that answer for a step: those of the stack's libraries and torch's best; else the first that can."""
    able = [way for way in found if way.runs]
    libraries_own = [way for way in able if way.own and way.package][:MOST_OF_LIBRARIES]
    of_torch = [way for way in able if way.own and not way.package]
    best = [way for way in of_torch if way.backend in (of_torch[0].backend, SDPA)]
    return [*libraries_own, *best] or able[:1]


def _place(way: MeasuringWay, order: Sequence[str]) -> int:
    mine = (at for at, name in enumerate(order) if way.backend == name or way.backend.startswith(f"{name}:"))
    return next(mine, len(order) + bool(way.package and not way.own))


def _way(op: Op, backend: str, device: Device, stack: str) -> MeasuringWay:
    from .cases import Unsupported
    from .cases.outline import outline
    from .cases.system import IN_PIECES

    package = package_of(backend)
    own = not package or any(backend == name or backend.startswith(f"{name}:") for name in libraries(stack))
    count = kernels(op.kind, backend)
    why = lacking(op, backend, device)
    if not why and stack and not device.synchronous and is_eager(op.kind, backend):
        why = EAGER
    if why or device.synchronous:
        return MeasuringWay(backend, package, why, int(op.cost.bytes), None, count, own)
    major, minor = divmod(round(10 * device.sm), 10)
    try:
        drawn = outline(op, backend, (major, minor))
    except Unsupported as error:
        return MeasuringWay(backend, package, str(error), 0, None, count, own)
    if drawn.bytes > device.memory_gib * 2**30 and op.kind not in IN_PIECES:
        why = f"it needs {drawn.bytes / 2**30:.1f} GiB of {device.memory_gib:g} GiB"
    return MeasuringWay(backend, package, why, drawn.bytes, drawn.kernel, count, own)


def _collectives(op: Op, device: Device, stack: str) -> list[MeasuringWay]:
    """The ways of a collective; as an engine captures it first, where the stack is one. They need all of its ranks."""
    names: tuple[str, ...] = ("gloo",) if device.synchronous else (COLLECTIVE,)
    if libraries(stack) and not device.synchronous and not stack.startswith(TRAINS):
        served = SERVED_BY.get(op.kind, ()) if getattr(op, "size_bytes", 0) <= GRAPH_MOST_BYTES else ()
        names = (*served, *names)
    return [_collective(op, name, device) for name in names]


def _collective(op: Op, backend: str, device: Device) -> MeasuringWay:
    ranks, nodes = op.ranks, -(-op.ranks // op.ranks_per_node)
    why = lacking(op, backend, device)
    if getattr(op, "experts", ranks) % ranks:
        why = f"{op.experts} experts do not divide by {ranks} ranks"
    elif ranks < 2:
        why = "a collective needs at least 2 ranks"
    elif backend == VLLM_ALL_REDUCE and (nodes > 1 or op.size_bytes > VLLM_MOST_BYTES or ranks not in (2, 4, 6, 8)):
        why = "vLLM leaves it to NCCL: its kernel is for up to 8 MiB on 2, 4, 6 or 8 GPUs of one node"
    where = f"{ranks} GPUs on {nodes} node{'s' * (nodes > 1)}"
    return MeasuringWay(backend, package_of(backend), why, int(2 * op.cost.bytes), where)


def seconds(latency_us: float, size_bytes: float, settings: Settings, caches: int = 2) -> float:
    """How long an op of so many microseconds takes to measure: repetitions, inputs, and what is around them.

    What a package compiles at its first call is not in it.
    """
    repeated = max(settings.case_budget_s, FEWEST_CALLS * latency_us / 1e6)
    return caches * (CASE_S + repeated + size_bytes / (FILL_GBPS * 1e9))
