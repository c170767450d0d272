"""A device's program laid out for placing: which executions are walked through, and what each waits for."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ....datasets.ops import KINDS, Op
from ...graph import Block, Node

ALIKE = 1e-9  # relative
WIRINGS = 512  # programs whose dependencies are remembered

Needs = tuple[tuple[int, int], ...]  # (stream, position in it) that must have ended
Touched = list[tuple[int, int]]  # (tensor, its step)


def group_of(node: Node) -> str:
    """What a node's communication is booked under: its process group, else its kind; empty for computing."""
    if node.group:
        return node.group
    if node.op is None:
        return ""
    if KINDS[node.op.kind].collective:
        return node.op.kind
    return "copy" if node.op.kind == "copy" and node.stream != "compute" else ""


def labels_of(blocks: Sequence[Block]) -> tuple[list[str], np.ndarray]:
    """The groups of a program and, by stored node, the index of its group (-1: computing)."""
    names = [group_of(node) for block in blocks for node in block.nodes]
    groups = sorted(set(names) - {""})
    return groups, np.array([groups.index(name) if name else -1 for name in names], dtype=np.int64)


def kinds_of(blocks: Sequence[Block]) -> np.ndarray:
    """What each stored node occupies: 1 the device, 2, 3, … a kind of link, -1, -2, … a direction of copying."""
    numbers: dict[object, int] = {}
    kind_of: dict[tuple[int, bool], int] = {}  # by the op's identity
    kinds = []
    for node in (node for block in blocks for node in block.nodes):
        moves = group_of(node) != ""
        key = id(node.op), moves
        if key not in kind_of:
            kind_of[key] = _kind(node.op, moves, numbers)
        kinds.append(kind_of[key])
    return np.array(kinds, dtype=np.int64)


def _kind(op: Op | None, moves: bool, numbers: dict[object, int]) -> int:
    if not moves:
        return 1
    dims = op.to_dict() if op is not None else {}
    if dims.get("kind") == "copy":
        return -numbers.setdefault(dims["direction"], len(numbers) + 1)
    return numbers.setdefault(dims.get("link"), len(numbers) + 2)


@dataclass(frozen=True)
class Program:
    """The kept executions of a program, in order. Arrays have one entry per kept execution.

    ``node`` is the position among all stored nodes; ``block`` and ``repetition`` say where it stands. Of a block of
    R repetitions of which k are kept, those are 0 to k - 2 and R - 1. ``queues`` are the executions of each stream,
    ``needs`` what each waits for in other streams, ``kinds`` (by stored node) what :func:`kinds_of` says.
    """

    blocks: Sequence[Block]
    keep: Sequence[int]
    node: np.ndarray
    block: np.ndarray
    repetition: np.ndarray
    queues: Sequence[Sequence[int]]
    needs: Sequence[Needs]
    kinds: np.ndarray

    @classmethod
    def of(cls, blocks: Sequence[Block], keep: Sequence[int]) -> Program:
        """The program with ``keep`` repetitions of each block."""
        firsts = np.cumsum([0, *(len(block.nodes) for block in blocks)]).tolist()
        node, which, repetitions = [], [], []
        for number, (block, kept) in enumerate(zip(blocks, keep, strict=True)):
            length = len(block.nodes)
            node.append(np.tile(np.arange(firsts[number], firsts[number] + length), kept))
            which.append(np.full(length * kept, number))
            repetitions.append(np.repeat(kept_repetitions(block.repeat, kept), length))
        queues, needs = dependencies(tuple(map(Wiring.of, blocks)), tuple(keep))
        return cls(
            blocks,
            keep,
            np.concatenate(node),
            np.concatenate(which),
            np.concatenate(repetitions),
            queues,
            needs,
            kinds_of(blocks),
        )

    def issued(self, host: np.ndarray, periods: Sequence[float | None]) -> np.ndarray:
        """When the host has issued each execution, less the time that the repetitions left out before it take.

        A period of None is that of a host that waits in each repetition: those left out bring it no nearer.
        """
        clock, parts, first = 0.0, [], 0
        for block, repetitions, period in zip(self.blocks, self.keep, periods, strict=True):
            host_us = host[first : first + len(block.nodes)]
            first += len(host_us)
            for repetition in range(repetitions):
                if repetition == repetitions - 1 and period is not None:
                    clock += (block.repeat - repetitions) * (float(host_us.sum()) - period)
                parts.append(clock + np.cumsum(host_us))
                clock = float(parts[-1][-1])
        return np.concatenate(parts)

    def period(self, number: int, start: np.ndarray, end: np.ndarray, host_us: float) -> float | None:
        """Time between repetitions that are left out; None when the last ones kept before them are not alike.

        They are when each node starts and ends as much later than in the repetition before as every other, none is
        still running two repetitions on, and what stands before or after the block runs before or after them;
        and the host, which takes ``host_us`` for a repetition, does not lose its lead meanwhile.
        """
        block, repetitions = self.blocks[number], self.keep[number]
        if repetitions == block.repeat:
            return 0.0
        mine = self.block == number
        starts, ends = (times[mine].reshape(repetitions, -1) for times in (start, end))
        last = repetitions - 2
        later = np.diff(np.concatenate([starts, ends], axis=1)[last - 2 : last + 1], axis=0)
        period = float(later[-1, 0])
        if np.abs(later - period).max() > ALIKE * max(ends[last].max(), 1.0):
            return None
        if ends[last - 2].max() > starts[last].min() or host_us > period * (1 + ALIKE):
            return None
        before, after = self.block < number, self.block > number
        over = end[before].max(initial=0.0) <= starts[last - 2].min()
        return period if over and start[after].min(initial=math.inf) >= ends[last].max() else None

    def unfold(self, times: np.ndarray, periods: Sequence[float]) -> np.ndarray:
        """Times of all executions from those of the kept ones."""
        parts, shift = [], 0.0
        for number, (block, repetitions, period) in enumerate(zip(self.blocks, self.keep, periods, strict=True)):
            block_times = times[self.block == number].reshape(repetitions, -1) + shift
            if repetitions < block.repeat:
                missing = block.repeat - repetitions
                steady = block_times[-2] + period * np.arange(1, missing + 1)[:, None]
                shift += missing * period
                block_times = np.concatenate([block_times[:-1], steady, block_times[-1:] + missing * period])
            parts.append(block_times.ravel())
        return np.concatenate(parts)


def kept_repetitions(repeat: int, repetitions: int) -> np.ndarray:
    """Which repetitions of a block are walked through."""
    return np.append(np.arange(repetitions - 1), repeat - 1)


class Wiring(NamedTuple):
    """What of a block says which node waits for which: by node its stream and tensors; blocks wired alike are equal."""

    repeat: int
    streams: tuple[str, ...]
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, block: Block) -> Wiring:
        """That of a block."""
        nodes = block.nodes
        return cls(
            block.repeat,
            tuple([node.stream for node in nodes]),
            tuple([node.reads for node in nodes]),
            tuple([node.writes for node in nodes]),
            tuple(block.steps.items()),
        )


@lru_cache(maxsize=WIRINGS)
def dependencies(blocks: tuple[Wiring, ...], keep: tuple[int, ...]) -> tuple[list[list[int]], list[Needs]]:
    """The queue of each stream and what each kept execution waits for in other streams.

    Where repetitions are left out, the repetition after them takes the place of the one that follows those before.
    What was found is kept: layouts that a search asks for are often wired alike. Callers must not change it.
    """
    names = sorted({stream for block in blocks for stream in block.streams})
    count = len(names)
    queues: list[list[int]] = [[] for _ in range(count)]
    needs: list[Needs] = []
    writer: dict[int, tuple[int, int]] = {}
    readers: dict[int, dict[int, int]] = {}
    matrix = [[-1] * count for _ in range(count)]
    for block, repetitions, (reads, writes) in zip(blocks, keep, shared_tensors(blocks), strict=True):
        stream_of = [names.index(stream) for stream in block.streams]
        moved = {pair for pairs in (*reads, *writes) for pair in pairs if pair[1]}
        for turn, repetition in enumerate(kept_repetitions(block.repeat, repetitions).tolist()):
            if repetition != turn:
                _move(moved, repetition - turn, turn, writer, readers)
            for stream, reads_of_node, written in zip(stream_of, reads, writes, strict=True):
                position = len(queues[stream])
                if reads_of_node or written:
                    sources = _needed_tasks(reads_of_node, written, repetition, stream, position, writer, readers)
                    already = matrix[stream]
                    needs.append(tuple((other, last) for other, last in sources.items() if last > already[other]))
                    for other, last in needs[-1]:
                        already[other] = last
                else:
                    needs.append(())
                queues[stream].append(len(needs) - 1)
    return queues, needs


def _needed_tasks(
    touched: Touched,
    written: Touched,
    repetition: int,
    stream: int,
    position: int,
    writer: dict[int, tuple[int, int]],
    readers: dict[int, dict[int, int]],
) -> dict[int, int]:
    """The last node of each other stream that an execution waits for; enters what it reads and writes itself."""
    sources: dict[int, int] = {}
    for tensors in (touched, written):
        for tensor, step in tensors:
            other, last = writer.get(tensor + repetition * step, (stream, -1))
            sources[other] = max(last, sources.get(other, -1))
    for tensor, step in written:
        for other, last in readers.pop(tensor + repetition * step, {}).items():
            sources[other] = max(last, sources.get(other, -1))
    for tensor, step in touched:
        readers.setdefault(tensor + repetition * step, {})[stream] = position
    for tensor, step in written:
        writer[tensor + repetition * step] = stream, position
    sources.pop(stream, None)
    return sources


def _move(
    tensors: set[tuple[int, int]],
    skipped: int,
    turns: int,
    writer: dict[int, tuple[int, int]],
    readers: dict[int, dict[int, int]],
) -> None:
    """Let the repetitions left out have written and read what those before them did."""
    pairs = [
        (tensor + turn * step, tensor + (turn + skipped) * step) for tensor, step in tensors for turn in range(turns)
    ]
    written = {there: writer[here] for here, there in pairs if here in writer}
    moved = {there: dict(readers[here]) for here, there in pairs if here in readers}
    writer.update(written)
    readers.update(moved)


def shared_tensors(blocks: Sequence[Wiring]) -> Iterator[tuple[list[Touched], list[Touched]]]:
    """By block, what each node reads and writes of the tensors that more than one stream touches."""
    steps = [dict(block.steps) for block in blocks]
    touched = np.zeros(1 + max(map(_highest, blocks, steps), default=0), dtype=bool)
    streams = Counter(stream for block in blocks for stream in block.streams)
    busiest = max(sorted(streams), key=lambda name: streams[name])
    for block, block_steps in zip(blocks, steps, strict=True):
        for stream, tensors in zip(block.streams, map(operator.add, block.reads, block.writes), strict=True):
            if stream != busiest:
                for tensor in tensors:
                    touched[_ids(block, block_steps, tensor)] = True
    for block, block_steps in zip(blocks, steps, strict=True):
        pairs = {t: (t, block_steps.get(t, 0)) for tensors in (*block.reads, *block.writes) for t in tensors}
        shared = {t: pair for t, pair in pairs.items() if touched[_ids(block, block_steps, t)].any()}
        reads = [[shared[t] for t in tensors if t in shared] for tensors in block.reads]
        yield reads, [[shared[t] for t in tensors if t in shared] for tensors in block.writes]


def _ids(block: Wiring, steps: dict[int, int], tensor: int) -> np.ndarray:
    step = steps.get(tensor, 0)
    return tensor + step * np.arange(block.repeat if step else 1)


def _highest(block: Wiring, steps: dict[int, int]) -> int:
    """The greatest id that a block touches in any repetition."""
    tensors = {t for tensors in (*block.reads, *block.writes) for t in tensors}
    return max((t + max(steps.get(t, 0) * (block.repeat - 1), 0) for t in tensors), default=0)
