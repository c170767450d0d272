"""When each node of one device's program runs: streams in order, tensors waited for, rates shared while they overlap.

Nodes of one stream run one after the other; a node waits for the last writers of what it reads, for the readers and
writers of what it overwrites, and for the host to have issued it. Nodes that run at the same time slow each other down:

- computing beside communication takes ``compute_slowdown`` longer while it lasts, communication beside computing
  ``communication_slowdown``;
- communications over the same kind of link share its bandwidth, computations share the device, each evenly.

Rates change only when a node starts or ends, so the walk from event to event is exact. A block that repeats is placed
for its first few repetitions and its last; where those have become alike, the rest are copies a period apart.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...graph import Block
from .program import Program, Wiring, kinds_of, labels_of

KEPT, FEW = 6, 18  # repetitions of a block that are walked through at first; as many or fewer all are
PLACED = 256  # programs placed last, which are remembered
EQUAL = 1e-9  # relative: times of repetitions that differ by less are the same


@dataclass(frozen=True)
class Overlap:
    """What running side by side costs, as a part of the time alone: 0.1 means a tenth longer.

    Transfers to and from the host (``copy`` kinds of op) are made by engines of their own and slow nothing down.
    Communications over the same kind of link share it, unless the links themselves are simulated (``by_kind`` false).
    """

    compute_slowdown: float = 0.0
    communication_slowdown: float = 0.0
    by_kind: bool = True


@dataclass(frozen=True)
class Placed:
    """Every executed node of a program in time; arrays have one entry per execution, in program order.

    ``node`` is the position of the stored node among those of all blocks. ``exposed_us`` is, by group, communication
    during which nothing computes (groups that communicate at once share the moment), ``hidden_us`` the rest of it.
    ``compute_us`` and ``exposed_us`` and ``idle_us`` add up to ``total_us``.
    """

    node: np.ndarray
    start_us: np.ndarray
    end_us: np.ndarray
    compute_us: float
    exposed_us: dict[str, float]
    hidden_us: dict[str, float]
    idle_us: float
    total_us: float


_KNOWN: OrderedDict[tuple[object, ...], Placed] = OrderedDict()


def place(
    blocks: Sequence[Block],
    latency_us: np.ndarray,
    host_us: np.ndarray | None = None,
    overlap: Overlap | None = None,
    waits: np.ndarray | None = None,
    lead_us: float = 0.0,
    gap_us: float = 0.0,
) -> Placed:
    """Place a program. ``latency_us`` is what each stored node takes alone, ``host_us`` what the host adds before it.

    Both have one entry per stored node of all blocks. Without ``host_us`` everything has been issued beforehand (a
    CUDA graph). ``waits`` marks nodes whose end the host waits for before it issues what follows (it reads a result).
    The host began ``lead_us`` before the device. A stream takes ``gap_us`` from the end of a node, or from when the
    next one is issued if that is later, to the next one's start. A program of several streams that was placed before,
    with the same times, is not placed again.
    """
    blocks = tuple(block for block in blocks if block.nodes)
    host = np.zeros(len(latency_us)) if host_us is None else np.asarray(host_us, dtype=float)
    stops = np.zeros(len(host), dtype=bool) if waits is None or host_us is None else np.asarray(waits, dtype=bool)
    latency = np.asarray(latency_us, dtype=float) + gap_us
    if sum(len(block.nodes) for block in blocks) != len(latency):
        raise ValueError(f"{len(latency)} latencies for {sum(len(b.nodes) for b in blocks)} stored nodes")
    node = unrolled(blocks)
    groups, label = labels_of(blocks)
    if len({n.stream for block in blocks for n in block.nodes}) <= 1:
        start = in_turn(latency[node], host[node], stops[node], lead_us)
        return summed(node, start + gap_us, start + latency[node], groups, label[node] if len(label) else label)
    overlap, kinds = overlap or Overlap(), kinds_of(blocks)
    wired = tuple(map(Wiring.of, blocks))
    times = tuple(column.tobytes() for column in (latency, host, stops))
    key = wired, tuple(groups), label.tobytes(), kinds.tobytes(), overlap, times, lead_us, gap_us
    if key in _KNOWN:
        _KNOWN.move_to_end(key)
        return _KNOWN[key]
    start, end = _fold_periods(blocks, latency, host, overlap, stops, lead_us)
    placed = _KNOWN[key] = summed(node, start + gap_us, end, groups, label[node])
    if len(_KNOWN) > PLACED:
        _KNOWN.popitem(last=False)
    return placed


def unrolled(blocks: Sequence[Block]) -> np.ndarray:
    """The position among all stored nodes of every executed node, in program order."""
    firsts = np.cumsum([0, *(len(block.nodes) for block in blocks)])
    parts = [
        np.tile(np.arange(first, first + len(block.nodes)), block.repeat)
        for first, block in zip(firsts.tolist(), blocks, strict=False)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def in_turn(
    latency_us: np.ndarray, host_us: np.ndarray, waits: np.ndarray | None = None, lead_us: float = 0.0
) -> np.ndarray:
    """Starts in a single stream: each when the one before has ended and the host has issued it.

    The host began ``lead_us`` before. After a node of ``waits`` host and device are level: what follows is issued from
    its end on.
    """
    before = np.cumsum(latency_us) - latency_us
    if not len(before):
        return before
    if waits is None or not waits.any():
        return before + np.maximum.accumulate(np.maximum(np.cumsum(host_us) - lead_us - before, 0.0))
    parts, now, edges = [], 0.0, [0, *(np.flatnonzero(waits) + 1).tolist(), len(before)]
    for first, after in itertools.pairwise(edges):
        if first < after:
            parts.append(now + in_turn(latency_us[first:after], host_us[first:after], lead_us=lead_us))
            now, lead_us = float(parts[-1][-1] + latency_us[after - 1]), 0.0
    return np.concatenate(parts)


def summed(node: np.ndarray, start: np.ndarray, end: np.ndarray, groups: Sequence[str], label: np.ndarray) -> Placed:
    """The account of a placed program. ``label`` is each execution's index in ``groups``, -1 for computing."""
    total = float(end.max()) if len(end) else 0.0
    times, at = np.unique(np.concatenate([start, end, [0.0]]), return_inverse=True)
    changes = np.zeros((len(groups) + 1, len(times)))
    np.add.at(changes, (label + 1, at[: len(start)]), 1)
    np.add.at(changes, (label + 1, at[len(start) : 2 * len(start)]), -1)
    active = np.cumsum(changes, axis=1)[:, :-1] > 0
    length = np.diff(times)
    computing = active[0]
    communicating = active[1:].sum(axis=0)
    alone = np.where(computing | (communicating == 0), 0.0, length / np.maximum(communicating, 1))
    exposed = (active[1:] * alone).sum(axis=1).tolist()
    totals = np.bincount(label + 1, end - start, len(groups) + 1)[1:].tolist() if len(node) else [0.0] * len(groups)
    compute = float(length[computing].sum())
    return Placed(
        node,
        start,
        end,
        compute,
        dict(zip(groups, exposed, strict=True)),
        {name: max(both - bare, 0.0) for name, both, bare in zip(groups, totals, exposed, strict=True)},
        max(total - compute - sum(exposed), 0.0),
        total,
    )


def _fold_periods(
    blocks: Sequence[Block],
    latency: np.ndarray,
    host: np.ndarray,
    overlap: Overlap,
    waits: np.ndarray,
    lead_us: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of all executions, of which only some repetitions of each block are walked through.

    The host runs ahead of the device by more in each repetition left out, which is known once their period is; until
    it is what was assumed, the walk is repeated. A host that waits in each repetition gains nothing.
    """
    keep = [KEPT if block.repeat > FEW else block.repeat for block in blocks]
    firsts = np.cumsum([0, *(len(block.nodes) for block in blocks)])
    level = [bool(waits[first:after].any()) for first, after in itertools.pairwise(firsts)]
    hosts = [float(host[first:after].sum()) for first, after in itertools.pairwise(firsts)]
    periods = [
        us if repetitions < block.repeat else 0.0 for us, repetitions, block in zip(hosts, keep, blocks, strict=True)
    ]
    hosts = [0.0 if even else us for us, even in zip(hosts, level, strict=True)]
    while True:
        program = Program.of(blocks, keep)
        for _ in range(len(blocks) + 1):
            issued = program.issued(host, [None if even else us for us, even in zip(periods, level, strict=True)])
            issued -= lead_us
            start, end = walk(program, latency, issued, overlap, waits)
            periods_us = [program.period(block, start, end, hosts[block]) for block in range(len(blocks))]
            uneven = [b for b, period in enumerate(periods_us) if period is None]
            settled = all(_same(one, other) for one, other in zip(periods_us, periods, strict=True) if one is not None)
            periods = [old if new is None else new for old, new in zip(periods, periods_us, strict=True)]
            if uneven or settled or not host.any():
                break
        else:
            uneven = [b for b, repetitions in enumerate(keep) if repetitions < blocks[b].repeat]
        if not uneven:
            return program.unfold(start, periods), program.unfold(end, periods)
        for block in uneven:
            keep[block] = FEW if keep[block] == KEPT else blocks[block].repeat


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= EQUAL * max(abs(one), 1.0)


def walk(
    program: Program, latency: np.ndarray, issued: np.ndarray, overlap: Overlap, waits: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of the kept executions, from event to event.

    ``issued`` is when a host that never waits issues each; every wait puts off all that comes after it.
    """
    work, ready = latency[program.node].tolist(), issued.tolist()
    stops = [*np.flatnonzero(waits[program.node]).tolist(), len(work)]
    stop, late = 0, 0.0
    needs, queues = program.needs, program.queues
    kinds = program.kinds[program.node].tolist()
    streams, lengths = range(len(queues)), list(map(len, queues))
    at, done, running = [0] * len(queues), [0] * len(queues), [-1] * len(queues)
    work_left = [0.0] * len(queues)
    state = [0] * len(queues)
    slowness_of: dict[tuple[int, ...], list[float]] = {}
    start, end = [0.0] * len(work), [0.0] * len(work)
    now, unfinished = 0.0, len(work)
    while unfinished:
        wake = math.inf
        for s in streams:
            if running[s] >= 0 or at[s] == lengths[s]:
                continue
            task = queues[s][at[s]]
            if task > stops[stop]:
                continue
            for other, position in needs[task]:
                if done[other] <= position:
                    break
            else:
                if ready[task] + late > now:
                    wake = min(wake, ready[task] + late)
                    continue
                running[s], state[s], work_left[s], start[task] = task, kinds[task], work[task], now
                at[s] += 1
        active = tuple(state)
        slower = slowness_of.get(active)
        if slower is None:
            slower = slowness_of[active] = slowness(active, overlap)
        first, soonest = -1, math.inf
        for s in streams:
            if running[s] >= 0:
                ends = work_left[s] * slower[s]
                if ends < soonest:
                    first, soonest = s, ends
        if first < 0 and wake == math.inf:
            raise ValueError("nodes of different streams wait for each other in a circle")
        if now + soonest <= wake:
            elapsed, now = soonest, now + soonest
        else:
            first, elapsed, now = -1, wake - now, wake
        for s in streams:
            task = running[s]
            if task < 0:
                continue
            work_left[s] -= elapsed / slower[s]
            if s == first or work_left[s] <= 1e-12 * work[task]:
                end[task], running[s], state[s] = now, -1, 0
                done[s] += 1
                unfinished -= 1
                if task == stops[stop]:
                    stop, late = stop + 1, max(late, now - ready[task])
    return np.array(start), np.array(end)


def slowness(active: Sequence[int], overlap: Overlap) -> list[float]:
    """How many times longer each stream's node takes beside the others. ``active``: see :attr:`Program.kinds`."""
    computing = sum(1 for kind in active if kind == 1)
    sending = sum(1 for kind in active if kind > 1)
    factors = {0: 1.0, 1: computing * (1.0 + (overlap.compute_slowdown if sending else 0.0))}
    beside = 1.0 + (overlap.communication_slowdown if computing else 0.0)

    def alike(kind: int) -> int:
        return sum(1 for other in active if other == kind) if overlap.by_kind or kind < 0 else 1

    return [factors[kind] if kind in factors else alike(kind) * (beside if kind > 1 else 1.0) for kind in active]
