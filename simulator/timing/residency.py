"""Which bytes an op finds in the last-level cache: reuse distance over the graph's tensors.

An operator that runs right after its input was written finds it in the cache; a layer's weights, last touched
one step ago, it does not. Nor is the memory of a new result always in the cache: an allocator hands out the block
freed last, warm when that was a moment ago, cold when a whole forward pass has kept its activations since. The
harness times both states (``cache`` = warm, cold); this module says how much of each node's traffic is cold, so that
the two can be mixed. Where the host itself computes, the code of an operator goes cold like data: on a machine whose
curves were measured (:mod:`opcast.datasets.reuse`) each has its own, on others it is counted as one more tensor that
every call of that operator reads.

Stack distance as in Mattson et al. 1970, with the traffic since the last touch standing for the distinct bytes
touched. A last-level cache does not keep the most recent bytes exactly: with random replacement a line survives d bytes
of traffic through a cache of C with probability exp(-d/C).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..graph import Block

NEVER = -np.inf
READ, WRITE, FREE = range(3)
KINDS = 3
CODE_BYTES = 2**20  # what fetching an operator's code costs in time, as bytes streamed: some 20 us at 40 GB/s


@dataclass(frozen=True)
class Reuse:
    """How long ago executions touched what they touch, as bytes that have passed since, of one walk of a step.

    Touches [t]: the execution ``at`` each happens, bytes ``moved`` and the ``distance``. Executions [n]: the bytes
    since their operator ran last (``code``), since the very node did (``python``), and all bytes they move (``total``).
    """

    at: np.ndarray
    moved: np.ndarray
    distance: np.ndarray
    total: np.ndarray
    code: np.ndarray
    python: np.ndarray

    def mean(self, shares: np.ndarray) -> np.ndarray:
        """Shares of touches [t], on average over each execution's bytes [n]; 0 where one moves none."""
        missing = np.bincount(self.at, self.moved * shares, len(self.total))
        return np.divide(missing, self.total, out=np.zeros(len(self.total)), where=self.total > 0)


def reuse_of(blocks: Sequence[Block], walked: Sequence[int], tensor_bytes: np.ndarray) -> Reuse:
    """The reuse of each execution; of each block the first ``walked`` repetitions are run.

    What one execution frees is freed in order of ids. The step is walked twice and the second walk counts, because a
    step follows a step.
    """
    moves = np.concatenate([np.zeros(0), *(np.tile(_move_ids(b), n) for b, n in zip(blocks, walked, strict=True))])
    events = _events(blocks, walked, len(moves))
    sizes = tensor_bytes[events.tensor].astype(float)
    moved = np.where(events.freed, 0.0, np.minimum(sizes, moves[events.at]))
    total = np.bincount(events.at, moved, len(moves))
    after = np.cumsum(total)  # bytes that have passed in this walk when an execution ends
    distance = (after - total)[events.at] - _touch_distances(events, sizes, after) + sizes / 2  # its own bytes pass too
    before = after - total
    return Reuse(
        events.at,
        moved,
        np.where(events.freed, 0.0, distance),
        total,
        before - _end_values(_named_tensors(blocks, walked), after),
        before - _end_values(_place_tensors(blocks, walked), after),
    )


def cold_blocks(
    blocks: Sequence[Block],
    walked: Sequence[int],
    tensor_bytes: np.ndarray,
    cache_bytes: float,
    code_bytes: int = 0,
) -> np.ndarray:
    """Share of the bytes that each execution reads and writes that lie outside a cache of ``cache_bytes``.

    ``code_bytes`` is the weight of an operator's code among its operands. Shape [executions], from 0 (all in the cache)
    to 1.
    """
    reuse = reuse_of(blocks, walked, tensor_bytes)
    missing = reuse.mean(_gone(reuse.distance, cache_bytes)) * reuse.total + code_bytes * _gone(reuse.code, cache_bytes)
    total = reuse.total + code_bytes
    return np.divide(missing, total, out=np.zeros(len(total)), where=total > 0)


def _gone(distance: np.ndarray, cache_bytes: float) -> np.ndarray:
    return 1.0 - np.exp(-distance / cache_bytes)


def _move_ids(block: Block) -> np.ndarray:
    return np.array([node.bytes_moved for node in block.nodes], dtype=float)


def _named_tensors(blocks: Sequence[Block], walked: Sequence[int]) -> np.ndarray:
    """A number for the operator of each execution."""
    names: dict[str, int] = {}
    tensors = [
        np.tile([names.setdefault(node.source, len(names)) for node in block.nodes], count)
        for block, count in zip(blocks, walked, strict=True)
    ]
    return np.concatenate([np.zeros(0), *tensors]).astype(np.int64)


def _place_tensors(blocks: Sequence[Block], walked: Sequence[int]) -> np.ndarray:
    """The stored node of each execution."""
    firsts = np.cumsum([0, *(len(block.nodes) for block in blocks)]).tolist()
    placements = [
        np.tile(np.arange(len(block.nodes)) + first, count)
        for block, count, first in zip(blocks, walked, firsts, strict=False)
    ]
    return np.concatenate([np.zeros(0), *placements]).astype(np.int64)


def _end_values(which: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The bytes that had passed when the last execution of the same number ended, in this walk or the one before."""
    found = np.empty(len(which))
    if not len(which):
        return found
    order = np.argsort(which, kind="stable")
    begins = np.flatnonzero(np.diff(which[order], prepend=-1))
    found[order] = np.roll(after[order], 1)
    ends = np.append(begins[1:], len(order)) - 1
    found[order[begins]] = after[order[ends]] - after[-1]
    return found


@dataclass(frozen=True)
class _Events:
    """Touches and frees of one walk in order of (tensor, execution): the tensor, the execution ``at``, and which.

    A tensor that an execution reads and writes is touched once, by ``reading``. ``follows`` tells events that are not
    the first of their tensor.
    """

    tensor: np.ndarray
    at: np.ndarray
    reading: np.ndarray
    freed: np.ndarray
    follows: np.ndarray


def _events(blocks: Sequence[Block], walked: Sequence[int], count: int) -> _Events:
    """The events of ``count`` executions. One number holds tensor, execution and kind, so that sorting is all."""
    keys, offset = [np.zeros(0, dtype=np.int64)], 0
    for block, repeat in zip(blocks, walked, strict=True):
        every = np.arange(repeat)
        used = [(block.read, every, READ), (block.written, every, WRITE)]
        used += [(freed, those[those < repeat], FREE) for freed, those in block.freed]
        for touches, repetitions, kind in used:
            ids, at = touches.over(repetitions, offset)
            keys.append((ids * count + at) * KINDS + kind)
        offset += len(block.nodes) * repeat
    key = np.sort(np.concatenate(keys))
    position, which = np.divmod(key, KINDS)
    again = np.diff(position, prepend=-1) == 0  # a tensor that is read is not new where it is written
    once = ~again | ((which == FREE) & (np.diff(which, prepend=FREE) != 0))
    position, which = position[once], which[once]
    tensor, at = np.divmod(position, max(count, 1))
    return _Events(tensor, at, which == READ, which == FREE, np.diff(tensor, prepend=-1) == 0)


def _touch_distances(events: _Events, sizes: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The bytes that had passed when what each event of the second walk touches was touched last.

    Those of the walk before are negative. A tensor that is new stands in the memory that was freed last of those of its
    size; -inf where none is left.
    """
    number = len(events.tensor)
    before = np.append(False, ~events.freed[:-1]) & events.follows  # a touch of the same tensor
    first = ~events.follows
    begins = np.flatnonzero(first)
    group = np.cumsum(first) - 1
    ends = np.append(begins[1:], number)[: len(begins)] - 1
    opens = ~events.freed & ~before  # touches of what is new, in the first walk
    opened = np.maximum.accumulate(np.where(opens, np.arange(number), 0))
    lasting = ~events.freed[ends]
    written_back = lasting & ~events.reading[opened[ends]]  # made by the step; its caller drops it before the next
    stays = lasting & ~written_back
    earlier = np.append(0.0, after[events.at[:-1]]) if number else np.zeros(0)
    passed = after[-1] if len(after) else 0.0
    reuse_bytes = after[events.at[ends]] - passed
    touched = (
        np.where(before, earlier, np.where(first & stays[group], reuse_bytes[group], NEVER)) if number else earlier
    )
    warm = before | (first & stays[group]) if number else before

    dropped = ends[written_back]
    order = events.at * 2 + events.freed  # memory is handed out before an execution and given back after it
    walk = 2 * (len(after) + 1)
    one, two = np.flatnonzero(opens | (events.freed & before)), np.flatnonzero(events.freed == warm)
    which = np.concatenate([one, dropped, two])
    time = np.concatenate([order[one], np.full(len(dropped), walk - 1), order[two] + walk])
    pushed = np.concatenate([events.freed[one], np.ones(len(dropped), dtype=bool), events.freed[two]])
    value = np.concatenate([earlier[one] - passed, reuse_bytes[written_back], touched[two]])
    popped = last_freed(sizes[which], time, pushed, value)
    touched[two] = np.where(events.freed[two], touched[two], popped[len(one) + len(dropped) :])
    return touched


def last_freed(size: np.ndarray, time: np.ndarray, freed: np.ndarray, value: np.ndarray) -> np.ndarray:
    """For each event that takes memory, the ``value`` of the block of its ``size`` that was freed last and not taken.

    Events [n] in any order; those of one time are as they stand. -inf where no such block is left, and for those that
    free one. Blocks of one size are a stack: what takes from height h takes what was last put at height h.
    """
    if not len(size):
        return np.zeros(0)
    order = np.lexsort((time, size))
    bins = np.cumsum(np.append(False, np.diff(size[order]) != 0))
    put = freed[order]
    height = np.cumsum(np.where(put, 1, -1))
    begins = np.flatnonzero(np.diff(bins, prepend=-1))
    height -= np.append(0, height[begins[1:] - 1])[bins]
    apart = len(height) + 1  # sizes follow each other by so much, so that one running minimum serves all
    lowest = np.minimum.accumulate(np.minimum(height, 0) - bins * apart) + bins * apart
    level = height - lowest + ~put  # at which an event puts or takes
    short = ~put & (np.minimum(np.append(0, lowest[:-1]) * np.append(False, np.diff(bins) == 0), 0) > lowest)
    times = np.full(len(size), NEVER)
    lasting = np.flatnonzero(~short)
    pairs = lasting[np.lexsort((level[lasting], bins[lasting]))]
    taking = np.flatnonzero(~put[pairs])
    times[order[pairs[taking]]] = value[order[pairs[taking - 1]]]
    return times
