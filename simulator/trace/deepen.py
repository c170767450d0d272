"""More repetitions of a folded block: what tracing more layers would have given, without tracing them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ..graph import Block, Graph, Node, join_tensors, layer_of, shift_path

MIN_ROUNDS = 3  # a first, a last, and one between that is the rule


class DeepenError(Exception):
    """The graph does not say what more layers would do. The message says why."""


@dataclass(frozen=True, slots=True)
class MovingIds:
    """Ids that move with the repetitions of the blocks that grow.

    New ids go in before ``cut``. Everything below ``cut`` was there before the repetitions, everything from
    ``after`` on comes after them; ids between belong to the repetitions alone.
    """

    cut: int
    after: int


def deepen(graph: Graph, stack: str, first: int, layers: int) -> Graph:
    """The folded graph with ``layers`` more layers in the part of ``stack`` that repeats from layer ``first`` on.

    DeepenError when that part is not one block in each phase, or when something outside refers to its insides,
    so that it is not plain what the new layers would be to it.
    """
    if layers == 0:
        return graph
    growing = [block for block in graph.blocks if _repeats(block, stack, first)]
    phases = [block.nodes[0].phase for block in growing]
    if sorted(phases) != sorted({node.phase for node, _ in graph.weighted() if node.phase != "optimizer"}):
        raise DeepenError(f"layers from {first} on are not one block in each phase")
    strides = {abs(block.stride) for block in growing}
    if len(strides) != 1 or layers % min(strides):
        raise DeepenError(f"{layers} layers are not whole repetitions of {sorted(strides)} layers")
    return _Growth(graph, growing, layers, layers // min(strides)).graph()


def add_unread_tensors(graph: Graph, traced: int, layers: int) -> Graph:
    """The graph with what ``layers`` more layers hold and no node reads, such as the sinks of fused attention.

    Such tensors stand last; as many alike as layers were traced are one of each.
    """
    highest_ids = (
        _interval(block, t, block.steps.get(t, 0))[1] for block in graph.blocks for t in _ids_of_block(block)
    )
    descriptions = [(t.size_bytes, t.dtype, t.role) for t in graph.tensors for _ in range(t.count)]
    first = max(highest_ids, default=-1) + 1
    grown = descriptions[:first]
    for description, alike in groupby(descriptions[first:]):
        count = len(list(alike))
        grown += [description] * (count if count % traced else count // traced * (traced + layers))
    return replace(graph, tensors=join_tensors(grown))


def _repeats(block: Block, stack: str, first: int) -> bool:
    return block.repeat >= MIN_ROUNDS and block.stack == stack and min(_span(block)) >= first


def _span(block: Block) -> tuple[int, int]:
    """The lowest and highest layer that a block's repetitions visit."""
    layers = [layer[1] for node in block.nodes if (layer := layer_of(node.path)) and layer[0] == block.stack]
    moved_layers = (block.repeat - 1) * block.stride
    return min(min(layers), min(layers) + moved_layers), max(max(layers), max(layers) + moved_layers)


def _interval(block: Block, tensor: int, step: int) -> tuple[int, int]:
    last = tensor + (block.repeat - 1) * step
    return min(tensor, last), max(tensor, last)


class _Growth:
    """One deepening: the rows that grow, and how ids and paths change."""

    def __init__(self, graph: Graph, growing: Sequence[Block], layers: int, rounds: int) -> None:
        self._graph, self._grown = graph, {id(block) for block in growing}
        self._layers, self._rounds = layers, rounds
        self._rows = list(_rows([_interval(b, t, s) for b in growing for t, s in b.steps.items()]))
        self._cuts = [row.cut for row in self._rows]
        spans = [_span(block) for block in growing]
        self._stack = growing[0].stack
        self._first, self._last = max(low for low, _ in spans), min(high for _, high in spans)

    def graph(self) -> Graph:
        descriptions = [(t.size_bytes, t.dtype, t.role) for t in self._graph.tensors for _ in range(t.count)]
        for cut in reversed(self._cuts):
            descriptions[cut:cut] = [descriptions[cut]] * self._rounds
        blocks = tuple(self._grow(b) if id(b) in self._grown else self._keep(b) for b in self._graph.blocks)
        return replace(self._graph, blocks=blocks, tensors=join_tensors(descriptions))

    def _shifted_id(self, tensor: int) -> int:
        """The new id of a tensor that stands still; that of the first layer stays the first layer's."""
        below = bisect_right(self._cuts, tensor)
        if below and tensor == self._cuts[below - 1]:
            return tensor + (below - 1) * self._rounds
        if below and tensor < self._rows[below - 1].after:
            raise DeepenError("a tensor of one repeated layer is used outside of it")
        return tensor + below * self._rounds

    def _keep(self, block: Block) -> Block:
        """A block whose repetitions stay as many as they are."""
        for tensor, step in block.steps.items():
            low, high = _interval(block, tensor, step)
            if self._shifted_id(high) - self._shifted_id(low) != high - low:
                raise DeepenError("another block runs along the same tensors")
        return self._rewrite_block(block, {t: self._shifted_id(t) for t in _ids_of_block(block)}, outside=True)

    def _grow(self, block: Block) -> Block:
        number = {}
        for tensor in _ids_of_block(block):
            step = block.steps.get(tensor, 0)
            number[tensor] = self._stretched_start(block, tensor, step) if step else self._shifted_id(tensor)
        rewritten = self._rewrite_block(block, number, outside=False)
        return replace(rewritten, repeat=block.repeat + self._rounds)

    def _stretched_start(self, block: Block, tensor: int, step: int) -> int:
        """The first id of an interval that takes the new ids of its row in."""
        low, _ = _interval(block, tensor, step)
        below = sum(1 for row in self._rows if row.cut <= low) - (low in self._cuts)
        start = low + below * self._rounds
        return start if step > 0 else start + block.repeat + self._rounds - 1

    def _rewrite_block(self, block: Block, number: dict[int, int], outside: bool) -> Block:
        nodes = tuple(self._rename_tensors(block, node, number, outside) for node in block.nodes)
        steps = {number[tensor]: step for tensor, step in block.steps.items()}
        uneven = {key: tuple(sorted(number[t] for t in frees)) for key, frees in block.uneven.items()}
        return replace(block, nodes=nodes, steps=steps, uneven=uneven)

    def _rename_tensors(self, block: Block, node: Node, number: dict[int, int], outside: bool) -> Node:
        return replace(
            node,
            path=shift_path(node.path, self._stack, self._shift(node.path, block, outside)),
            reads=tuple(number[t] for t in node.reads),
            writes=tuple(number[t] for t in node.writes),
            frees=tuple(sorted(number[t] for t in node.frees)),
        )

    def _shift(self, path: str, block: Block, outside: bool) -> int:
        """By how many layers the first repetition of a node moves on."""
        layer = layer_of(path)
        if layer is None or layer[0] != self._stack:
            return 0
        if not outside:
            return self._layers if block.stride < 0 else 0
        if self._first <= layer[1] <= self._last:
            raise DeepenError(f"layer {layer[1]} is partly outside of the block that repeats")
        return self._layers if layer[1] > self._last else 0


def _ids_of_block(block: Block) -> set[int]:
    """Every id that a block's first repetition mentions."""
    ids = {t for node in block.nodes for t in (*node.reads, *node.writes, *node.frees)}
    return ids.union(*block.uneven.values())


def _rows(intervals: Iterable[tuple[int, int]]) -> Iterator[MovingIds]:
    """Overlapping intervals as rows, in order."""
    group: list[tuple[int, int]] = []
    for low, high in sorted(set(intervals)):
        if group and low > max(end for _, end in group):
            yield _row(group)
            group = []
        group.append((low, high))
    if group:
        yield _row(group)


def _row(intervals: Sequence[tuple[int, int]]) -> MovingIds:
    cut, after = max(low for low, _ in intervals), min(high for _, high in intervals) + 1
    if cut > after:
        raise DeepenError("repeated blocks disagree on which tensors are theirs")
    return MovingIds(cut, after)
