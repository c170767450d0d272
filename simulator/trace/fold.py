"""Repeated layers stored once: from a list of executed nodes to blocks with counts.

Nodes are cut into segments, one for each visit to a layer. Segments that run the same operators are candidates;
a run of them becomes a block only when every tensor in it follows a rule that :class:`Block` can state: the
same tensor in each repetition, or the next (previous) one of a row of tensors. :class:`Chains` collects these
rows. Nothing else is assumed, so unrolling gives back the list, with tensors renumbered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ..graph import Block, Graph, Node, Tensor, join_tensors, layer_of

MAX_PERIOD = 16  # layers after which a pattern of layers may begin anew


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive nodes of one layer (or of none: ``layer`` is None), with what must be equal to be repeated."""

    start: int
    stop: int
    stack: str
    layer: int | None
    kind: int


@dataclass(frozen=True, slots=True)
class Loop:
    """``repeat`` times ``length`` nodes from ``start`` on, ``stride`` layers of ``stack`` each time.

    ``moves`` and ``exceptions`` are what :func:`_wire` and :func:`_uneven_frees` found.
    """

    start: int
    length: int
    repeat: int
    stack: str
    stride: int
    moves: Mapping[int, int] = field(default_factory=dict)
    exceptions: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.start + self.length * self.repeat


class Chains:
    """Tensors in rows: a tensor's neighbours are what takes its place in the next and previous repetition.

    A row must stay a row (no tensor with three neighbours, no ring), so that consecutive ids can follow it.
    """

    def __init__(self) -> None:
        self._neighbours: dict[int, list[int]] = {}
        self._ends: dict[int, int] = {}  # the other end of the row, for tensors at an end

    def add(self, links: Iterable[tuple[int, int]]) -> bool:
        """Join pairs of neighbours; False, with nothing changed, when that would break a row."""
        joined: list[tuple[int, int]] = []
        for a, b in links:
            if b in self._neighbours.get(a, ()):
                continue
            if not self._join(a, b):
                self._undo(joined)
                return False
            joined.append((a, b))
        return True

    def _join(self, a: int, b: int) -> bool:
        crowded = any(len(self._neighbours.get(tensor, ())) == 2 for tensor in (a, b))
        if crowded or self._ends.get(a, a) == b:
            return False
        far_a, far_b = self._ends.get(a, a), self._ends.get(b, b)
        self._ends[far_a], self._ends[far_b] = far_b, far_a
        self._neighbours.setdefault(a, []).append(b)
        self._neighbours.setdefault(b, []).append(a)
        return True

    def _undo(self, joined: Sequence[tuple[int, int]]) -> None:
        for a, b in reversed(joined):
            self._neighbours[a].remove(b)
            self._neighbours[b].remove(a)
            for end in (a, b):
                far = self._far_end(end)
                self._ends[end], self._ends[far] = far, end

    def _far_end(self, tensor: int) -> int:
        previous = -1
        while following := [n for n in self._neighbours.get(tensor, ()) if n != previous]:
            previous, tensor = tensor, following[0]
        return tensor

    def row(self, tensor: int, rank: Sequence[int]) -> list[int]:
        """The whole row that a tensor is in, from the end that comes first in ``rank``."""
        members, previous = [self._far_end(tensor)], -1
        while following := [n for n in self._neighbours.get(members[-1], ()) if n != previous]:
            previous = members[-1]
            members.append(following[0])
        return members if rank[members[0]] <= rank[members[-1]] else members[::-1]


def fold(graph: Graph) -> Graph:
    """The same graph with repeated layers in blocks and tensors renumbered by first use."""
    nodes = list(graph.nodes())
    descriptions = [(t.size_bytes, t.dtype, t.role) for t in graph.tensors for _ in range(t.count)]
    chains = Chains()
    loops = list(_loops(nodes, descriptions, chains))
    order = _number_tensors(nodes, chains, len(descriptions))
    number = {tensor: position for position, tensor in enumerate(order)}
    blocks = tuple(_blocks(nodes, loops, number))
    return replace(graph, blocks=blocks, tensors=join_tensors([descriptions[tensor] for tensor in order]))


def assemble(nodes: Sequence[Node], tensors: Sequence[Tensor], **properties: object) -> Graph:
    """An unfolded graph of nodes and tensors."""
    return Graph(blocks=(Block(tuple(nodes)),), tensors=tuple(tensors), **properties)  # type: ignore[arg-type]


# --- finding ---------------------------------------------------------------------------------------------


def _segments(nodes: Sequence[Node], descriptions: Sequence[tuple[int, str, str]]) -> list[Segment]:
    kinds: dict[object, int] = {}
    segments, start = [], 0
    for position in range(1, len(nodes) + 1):
        if position < len(nodes) and _phase_and_layer(nodes[position]) == _phase_and_layer(nodes[start]):
            continue
        signatures = tuple(_signature(node, descriptions) for node in nodes[start:position])
        stack, layer = layer_of(nodes[start].path) or ("", None)
        segments.append(Segment(start, position, stack, layer, kinds.setdefault((stack, signatures), len(kinds))))
        start = position
    return segments


def _phase_and_layer(node: Node) -> tuple[str, object]:
    return node.phase, layer_of(node.path)


def _signature(node: Node, descriptions: Sequence[tuple[int, str, str]]) -> object:
    """What two nodes must have in common to be repetitions of each other, tensors' identity aside."""
    layer = layer_of(node.path)
    path = node.path if layer is None else node.path.removeprefix(layer[0]).lstrip(".").partition(".")[2]
    tensors = tuple(tuple(descriptions[t] for t in group) for group in (node.reads, node.writes))
    return node.op, node.source, path, node.phase, node.bytes_moved, node.host, tensors


def _loops(nodes: Sequence[Node], descriptions: Sequence[tuple[int, str, str]], chains: Chains) -> Iterator[Loop]:
    """Repetitions from left to right, each the longest that starts there and that tensors follow."""
    segments = _segments(nodes, descriptions)
    position = 0
    while position < len(segments):
        for loop, count in _candidates(segments, position):
            wired = _wire_loop(nodes, loop, chains)
            if wired is not None:
                yield wired
                position += count
                break
        else:
            position += 1


def _candidates(segments: Sequence[Segment], start: int) -> Iterator[tuple[Loop, int]]:
    """Repetitions that start at a segment, most covered segments first, and then without their last round."""
    repetitions = []
    for period in range(1, min(MAX_PERIOD, (len(segments) - start) // 2) + 1):
        repeat, stride = _extent(segments, start, period)
        if repeat >= 2:
            repetitions.append((-period * repeat, period, repeat, stride))
    for _, period, repeat, stride in sorted(repetitions):
        first, last = segments[start], segments[start + period - 1]
        stack = next(s.stack for s in segments[start : start + period] if s.layer is not None)
        for rounds in (repeat, repeat - 1):
            if rounds >= 2:
                yield Loop(first.start, last.stop - first.start, rounds, stack, stride), period * rounds


def _extent(segments: Sequence[Segment], start: int, period: int) -> tuple[int, int]:
    """How often the ``period`` segments from ``start`` on repeat, and by how many layers they move each time."""
    body = segments[start : start + period]
    numbered = [segment for segment in body if segment.layer is not None]
    following = [s for s in segments[start + period : start + 2 * period] if s.layer is not None]
    if not numbered or not following:
        return 1, 0
    stride = (following[0].layer or 0) - (numbered[0].layer or 0)
    if stride == 0 or len({segment.stack for segment in numbered}) != 1:
        return 1, 0
    repeat = 1
    while _same_work(body, segments[start + repeat * period : start + (repeat + 1) * period], repeat * stride):
        repeat += 1
    return repeat, stride


def _same_work(body: Sequence[Segment], candidate: Sequence[Segment], layers: int) -> bool:
    """Whether segments do the same work, ``layers`` further on."""
    expected_layers = [None if segment.layer is None else segment.layer + layers for segment in body]
    return [(s.kind, s.layer) for s in candidate] == [(s.kind, m) for s, m in zip(body, expected_layers, strict=True)]


# --- wiring ----------------------------------------------------------------------------------------------


def _rounds(nodes: Sequence[Node], loop: Loop) -> list[Sequence[Node]]:
    """The nodes of each repetition."""
    return [nodes[start : start + loop.length] for start in range(loop.start, loop.stop, loop.length)]


def _wire_loop(nodes: Sequence[Node], loop: Loop, chains: Chains) -> Loop | None:
    """The loop, if every tensor in it is the same throughout or moves along a row; adds the rows if so.

    What is freed must follow too, except in the first and the last repetition: what enters the first is often
    held by others, and what all share goes with the last. Those become exceptions.
    """
    rounds = _rounds(nodes, loop)
    if all(len({len(node.frees) for node in position_nodes}) == 1 for position_nodes in zip(*rounds, strict=True)):
        moves = _wire([[t for n in body for t in (*n.reads, *n.writes, *n.frees)] for body in rounds], chains)
        if moves is not None:
            return replace(loop, moves=moves)
    places = _with_unread([[t for n in body for t in n.touches] for body in rounds], rounds)
    exceptions = _uneven_frees(rounds, places)
    moves = None if exceptions is None else _wire(places, chains)
    return None if exceptions is None or moves is None else replace(loop, moves=moves, exceptions=exceptions)


def _wire(rounds: Sequence[Sequence[int]], chains: Chains) -> Mapping[int, int] | None:
    """From tensors of the first repetition to those of the second, where they differ; adds the rows they form.

    None when a tensor, place by place, neither stands still nor moves along a row.
    """
    by_first: dict[int, tuple[int, ...]] = {}
    for position_tensors in zip(*rounds, strict=True):
        if by_first.setdefault(position_tensors[0], position_tensors) != position_tensors:
            return None
    moving = [tensors for tensors in by_first.values() if len(set(tensors)) > 1]
    if any(len(set(tensors)) != len(tensors) for tensors in moving):
        return None
    linked = chains.add(pair for tensors in moving for pair in pairwise(tensors))
    return {tensors[0]: tensors[1] for tensors in moving} if linked else None


def _with_unread(places: Sequence[Sequence[int]], rounds: Sequence[Sequence[Node]]) -> list[list[int]]:
    """The places of each repetition, and in addition what its nodes free without any of them using it.

    Autograd keeps some tensors for their shape alone. They have a place where every repetition frees as many.
    """
    unread = [
        [[t for t in node.frees if t not in used] for node in body]
        for used, body in zip(map(set, places), rounds, strict=True)
    ]
    regular = [len({len(frees) for frees in node}) == 1 for node in zip(*unread, strict=True)]
    return [
        [*used, *(t for frees, is_regular in zip(frees_of_nodes, regular, strict=True) if is_regular for t in frees)]
        for used, frees_of_nodes in zip(places, unread, strict=True)
    ]


def _uneven_frees(
    rounds: Sequence[Sequence[Node]], places: Sequence[Sequence[int]]
) -> Mapping[tuple[int, int], tuple[int, ...]] | None:
    """By (repetition, node), what the first (0) and the last (-1) repetition free in their own way.

    The second repetition is the rule, entered as (1, node), which all between first and last must keep. Tensors
    are named as in the first repetition; None when one of them has no name there.
    """
    freed = []
    for body, used in zip(rounds, places, strict=True):
        names = _frees_by_first_names(body, dict(zip(used, places[0], strict=True)), set(places[0]))
        if names is None:
            return None
        freed.append(names)
    rule = freed[1]
    if any(frees != rule for frees in freed[1:-1]):
        return None
    uneven = {
        (which, node): frees
        for which in (0, -1)
        for node, (frees, regular) in enumerate(zip(freed[which], rule, strict=True))
        if frees != regular
    }
    return uneven | {(1, node): frees for node, frees in enumerate(rule)}


def _frees_by_first_names(
    body: Sequence[Node], names: Mapping[int, int], claimed: set[int]
) -> list[tuple[int, ...]] | None:
    """What each node of a repetition frees, by the names of the first; None when one has no name there."""
    freed = []
    for node in body:
        if any(t not in names and t in claimed for t in node.frees):
            return None
        freed.append(tuple(sorted(names.get(t, t) for t in node.frees)))
    return freed


def _number_tensors(nodes: Sequence[Node], chains: Chains, count: int) -> list[int]:
    """All tensors in the order of their new ids: rows together, by first use; unused ones last."""
    used = dict.fromkeys(t for node in nodes for t in (*node.reads, *node.writes, *node.frees))
    rank = [count] * count
    for position, tensor in enumerate(used):
        rank[tensor] = position
    order: dict[int, None] = {}
    for tensor in (*used, *range(count)):
        if tensor not in order:
            order |= dict.fromkeys(chains.row(tensor, rank))
    return list(order)


def _blocks(nodes: Sequence[Node], loops: Sequence[Loop], number: Mapping[int, int]) -> Iterator[Block]:
    position = 0
    for loop in loops:
        if loop.start > position:
            yield Block(tuple(renumber_tensors(nodes[position : loop.start], number)))
        yield _block(nodes, loop, number)
        position = loop.stop
    if position < len(nodes):
        yield Block(tuple(renumber_tensors(nodes[position:], number)))


def _block(nodes: Sequence[Node], loop: Loop, number: Mapping[int, int]) -> Block:
    first = nodes[loop.start : loop.start + loop.length]
    steps = {number[a]: number[b] - number[a] for a, b in loop.moves.items()}
    exceptions = {key: tuple(sorted(number[t] for t in frees)) for key, frees in loop.exceptions.items()}
    body = list(renumber_tensors(first, number))
    if exceptions:
        body = [replace(node, frees=exceptions[1, position]) for position, node in enumerate(body)]
    uneven = {key: frees for key, frees in exceptions.items() if key[0] != 1}
    return Block(tuple(body), loop.repeat, steps, loop.stack, loop.stride, uneven)


def renumber_tensors(nodes: Iterable[Node], number: Mapping[int, int]) -> Iterator[Node]:
    """The same nodes with other ids for their tensors."""
    for node in nodes:
        yield replace(
            node,
            reads=tuple(number[t] for t in node.reads),
            writes=tuple(number[t] for t in node.writes),
            frees=tuple(sorted(number[t] for t in node.frees)),
        )
