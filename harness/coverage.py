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
EAGER = "operators one by one: this stack runs them as one kernel"


@dataclass(frozen=True)
class Way:
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


def ways(op: Op, device: Device, stack: str = "") -> list[Way]:
    """Every backend that knows the kind, those of the stack's libraries first, then torch's, then those of others.

    ``stack`` is the id of a framework; with none operators one by one are an answer too.
    """
    from .cases import backends

    if KINDS[op.kind].collective:
        return [_collective(op)]
    names = backends(op, "cpu" if device.synchronous else "cuda")
    found = [_way(op, name, device, stack) for name in names]
    order = libraries(stack)
    return sorted(found, key=lambda way: (not way.runs, _place(way, order)))


def to_measure(found: Sequence[Way]) -> list[Way]:
    """The ways that answer for a step: those of the stack's libraries and torch's best; else the first that can."""
    able = [way for way in found if way.runs]
    libraries_own = [way for way in able if way.own and way.package][:MOST_OF_LIBRARIES]
    own = [*libraries_own, *[way for way in able if way.own and not way.package][:1]]
    return own or able[:1]


def _place(way: Way, order: Sequence[str]) -> int:
    mine = (at for at, name in enumerate(order) if way.backend == name or way.backend.startswith(f"{name}:"))
    return next(mine, len(order) + bool(way.package and not way.own))


def _way(op: Op, backend: str, device: Device, stack: str) -> Way:
    from .cases import Unsupported
    from .cases.outline import outline

    package = package_of(backend)
    own = not package or any(backend == name or backend.startswith(f"{name}:") for name in libraries(stack))
    count = kernels(op.kind, backend)
    why = lacking(op, backend, device)
    if not why and stack and not device.synchronous and is_eager(op.kind, backend):
        why = EAGER
    if why or device.synchronous:
        return Way(backend, package, why, int(op.cost.bytes), None, count, own)
    major, minor = divmod(round(10 * device.sm), 10)
    try:
        drawn = outline(op, backend, (major, minor))
    except Unsupported as error:
        return Way(backend, package, str(error), 0, None, count, own)
    if drawn.bytes > device.memory_gib * 2**30 and op.kind != "adamw":  # which is then measured in pieces
        why = f"it needs {drawn.bytes / 2**30:.1f} GiB of {device.memory_gib:g} GiB"
    return Way(backend, package, why, drawn.bytes, drawn.kernel, count, own)


def _collective(op: Op) -> Way:
    """Collectives need as many devices as they have ranks, on as many nodes."""
    ranks = getattr(op, "ranks", 1)
    if getattr(op, "experts", ranks) % ranks:
        return Way(COLLECTIVE, refusal=f"{op.experts} experts do not divide by {ranks} ranks")
    if ranks < 2:
        return Way(COLLECTIVE, refusal="a collective needs at least 2 ranks")
    nodes = -(-ranks // op.ranks_per_node)
    return Way(COLLECTIVE, bytes=int(2 * op.cost.bytes), kernel=f"{ranks} GPUs on {nodes} node{'s' * (nodes > 1)}")


def seconds(latency_us: float, size_bytes: float, settings: Settings, caches: int = 2) -> float:
    """How long an op of so many microseconds takes to measure: repetitions, inputs, and what is around them.

    What a package compiles at its first call is not in it.
    """
    repeated = max(settings.case_budget_s, FEWEST_CALLS * latency_us / 1e6)
    return caches * (CASE_S + repeated + size_bytes / (FILL_GBPS * 1e9))
