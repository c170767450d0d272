"""Pipeline parallelism: one graph cut into chunks of layers, each a graph of its own.

A pipeline of ``pp`` stages with ``vpp`` chunks a stage has ``pp x vpp`` chunks in the order of the layers; chunk *c*
runs on stage ``c mod pp`` (Narayanan et al. 2021, arXiv 2104.04473, sec. 2.2). What stands before the layers goes with
the first chunk, what stands after them with the last; backward likewise in reverse. The optimizer's work is shared by
the weights that a chunk holds. Chunks that are cut alike are one graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from ...datasets.counts import counted
from ...datasets.dtypes import itemsize
from ...datasets.ops import KINDS, Op, make_op
from ..graph import ACTIVATION, FROZEN, GRADIENT, STATE, WEIGHT, Block, Graph, Node, Tensor, layer_of, shift_path
from ..question.plan import Plan, PlanError
from .rewriting.compact import compact

Piece = tuple[int, int, int, tuple[int, ...] | None]  # block, first repetition, count, kept nodes (None: all)
Cut = tuple[Piece, ...]


@dataclass(frozen=True)
class Chunk:
    """Layers ``first`` to ``last`` (exclusive) of the model on one stage. ``send_bytes`` go on to the next chunk."""

    graph: Graph
    stage: int
    first: int
    last: int
    send_bytes: float

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.last - self.first


def split_pipeline(graph: Graph, plan: Plan) -> tuple[Chunk, ...]:
    """The chunks of a graph in the order of the layers. PlanError where there are more chunks than layers."""
    p = plan.parallel
    stack, depth = layer_stack(graph)
    bounds = boundaries(depth, p.pp * p.vpp, p.stages, f"{graph.name} ({stack or 'no list of layers'})")
    if len(bounds) == 2:
        return (Chunk(graph, 0, 0, depth, 0.0),)
    cutter = _Cutter(graph, stack, bounds)
    return tuple(
        Chunk(cutter.graph(c), c % p.pp, first, last, cutter.sent(last) if c < len(bounds) - 2 else 0.0)
        for c, (first, last) in enumerate(pairwise(bounds))
    )


def layer_stack(graph: Graph) -> tuple[str, int]:
    """Path and length of the list of layers that the model is made of: the numbered path with most of its work."""
    work: Counter[str] = Counter()
    depth: dict[str, int] = {}
    for block in graph.blocks:
        for node in block.nodes:
            found = layer_of(node.path) if node.phase == "forward" else None
            if found is not None:
                stack, layer = found
                work[stack] += node.bytes_moved * block.repeat
                depth[stack] = max(depth.get(stack, 0), layer + 1 + max((block.repeat - 1) * block.stride, 0))
    if not work:
        return "", 0
    stack = work.most_common(1)[0][0]
    return stack, depth[stack]


def boundaries(depth: int, chunks: int, layers: Sequence[int], what: str) -> list[int]:
    """First layer of every chunk and the end: as given, else as even as can be, the first and last chunk shortest."""
    if layers:
        if len(layers) != chunks or sum(layers) != depth or min(layers) < 0:
            raise PlanError(
                f"parallel.stages={list(layers)} must be {chunks} numbers of layers that "
                f"add up to the {depth} of {what}"
            )
        return [0, *np.cumsum(layers).tolist()]
    if chunks > 1 and not depth:
        raise PlanError(f"{what} cannot be cut into pp x vpp = {chunks} chunks; take parallel.pp=1 parallel.vpp=1")
    if chunks > 1 and chunks > depth + 2 * (chunks > 2):  # the first may hold the embedding alone, the last the loss
        raise PlanError(
            f"pp x vpp = {chunks} chunks, but {what} has {counted(depth, 'layer')}; take pp x vpp of at most {depth}"
        )
    base, more = divmod(depth, chunks)
    order = sorted(range(chunks), key=lambda c: (c in (0, chunks - 1), c))  # ends also hold embedding and loss
    sizes = [base + (c in order[:more]) for c in range(chunks)]
    return [0, *np.cumsum(sizes).tolist()]


@dataclass
class _Cutter:
    source: Graph
    stack: str
    bounds: list[int]

    def __post_init__(self) -> None:
        self.made: dict[Any, Graph] = {}
        self.named: dict[int, _Named] = {}
        self.whole = self.source.tensor_bytes

    def graph(self, chunk: int) -> Graph:
        """The graph of one chunk; chunks cut alike share one."""
        cut = tuple(self._cut(chunk))
        alike = tuple((block, count, inside, self._ends(block, first, count)) for block, first, count, inside in cut)
        if alike not in self.made:
            self.made[alike] = self._build(cut)
        return self.made[alike]

    def sent(self, layer: int) -> float:
        """Bytes that the forward of the layer before ``layer`` hands to it."""
        written: set[int] = set()
        reads: set[int] = set()
        shared: set[int] = set()  # by all layers, such as tables of positions
        for block, row in zip(self.source.blocks, self._places, strict=True):
            for node, position in zip(block.nodes, row, strict=True):
                if node.phase != "forward" or position is None:
                    continue
                for at, tensors, into in ((layer - 1, node.writes, written), (layer, node.reads, reads)):
                    for repetition in _repetitions_within(position, block.stride, block.repeat, at, at + 1):
                        into.update(t + repetition * block.steps.get(t, 0) for t in tensors)
                if block.repeat > 1:
                    shared.update(t for t in node.reads if not block.steps.get(t))
        return float(
            sum(self.whole[t] for t in (written & reads) - shared if self.source.tensor_roles[t] == ACTIVATION)
        )

    @cached_property
    def _places(self) -> list[list[int | None]]:
        """Layer of every stored node in its first repetition; nodes between layers go with the one before them."""
        depth = self.bounds[-1]
        places: list[list[int | None]] = []
        last = {"forward": -1, "backward": depth}
        for block in self.source.blocks:
            row: list[int | None] = []
            for node in block.nodes:
                if node.phase == "optimizer":
                    row.append(None)
                    continue
                phase = "forward" if node.phase == "forward" else "backward"
                layer = layer_of(node.path)
                if layer is not None and layer[0] == self.stack:
                    last[phase] = layer[1]
                elif block.repeat == 1 and not node.group:
                    last[phase] = self._end(phase, last[phase])
                row.append(last[phase])
            if block.repeat > 1:
                for phase in last:
                    if any((n.phase == "forward") == (phase == "forward") for n in block.nodes):
                        last[phase] += (block.repeat - 1) * block.stride
            places.append(row)
        return places

    def _end(self, phase: str, layer: int) -> int:
        depth = self.bounds[-1]
        if phase == "forward":
            return -1 if layer < 0 else depth
        return depth if layer >= depth else -1

    def _cut(self, chunk: int) -> Iterator[Piece]:
        """The pieces of blocks that belong to a chunk, whole repetitions together."""
        first, last = self.bounds[chunk], self.bounds[chunk + 1]
        low = -1 if chunk == 0 else first
        high = self.bounds[-1] + 1 if chunk == len(self.bounds) - 2 else last
        for index, block in enumerate(self.source.blocks):
            row = self._places[index]
            if all(place is None for place in row):
                yield index, 0, block.repeat, None
                continue
            fits = [
                range(block.repeat)
                if place is None
                else _repetitions_within(place, block.stride, block.repeat, low, high)
                for place in row
            ]
            common = range(max(r.start for r in fits), min(r.stop for r in fits))
            for repetition in range(min(r.start for r in fits), max(r.stop for r in fits)):
                if repetition in common:
                    if repetition == common.start:
                        yield index, common.start, len(common), None
                    continue
                kept = tuple(position for position, inside in enumerate(fits) if repetition in inside)
                if kept:
                    yield index, repetition, 1, kept

    def _ends(self, block: int, first: int, count: int) -> tuple[bool, bool]:
        return first == 0, first + count == self.source.blocks[block].repeat

    def _build(self, cut: Cut) -> Graph:
        blocks = [slice_block(self.source.blocks[index], first, count, inside) for index, first, count, inside in cut]
        working = [b for b in blocks if b.nodes and b.nodes[0].phase != "optimizer"]
        resident = _resident_tensors(working, self.source.tensor_roles)
        tensors = list(self.source.tensors)
        count, finished = self.source.tensor_count, []
        shares = np.arange(count)  # what stands here for each tensor of the source
        for block in blocks:
            if not block.nodes or block.nodes[0].phase != "optimizer":
                finished.append(block)
                continue
            nodes = []
            for node in block.nodes:
                shared_node, weights = _share_update(
                    node, self._named_tensors(node), resident, self.whole, count, shares
                )
                tensors += weights
                count += len(weights)
                nodes.append(shared_node)
            finished.append(replace(block, nodes=tuple(n for n in nodes if n is not None)))
        blocks_run = tuple(b for b in finished if b.nodes)
        parameters = int(self._elements[resident & (self.source.tensor_roles == WEIGHT)].sum())
        return compact(replace(self.source, blocks=blocks_run, tensors=tuple(tensors), parameters=parameters))

    def _named_tensors(self, node: Node) -> _Named:
        """What an optimizer node names; of those that several chunks share a part of, once."""
        if id(node) not in self.named:  # the source keeps its nodes, and with them their identities
            self.named[id(node)] = _Named.of(node, self.source.tensor_roles, self.whole)
        return self.named[id(node)]

    @cached_property
    def _elements(self) -> np.ndarray:
        """Elements of every tensor of the source."""
        sizes = [itemsize(tensor.dtype) for tensor in self.source.tensors]
        return self.whole / np.repeat(sizes, [tensor.count for tensor in self.source.tensors])


@dataclass(frozen=True)
class _Named:
    """The tensors that an optimizer node reads and writes, [reads] and [writes], and the weights that it reads.

    ``weights`` are gradients where it reads no weights, as a norm of gradients does. ``states`` are those of the
    optimizer among both, each once; ``total`` is the size of the weights in bytes.
    """

    reads: np.ndarray
    writes: np.ndarray
    weights: np.ndarray
    states: np.ndarray
    total: float

    @classmethod
    def of(cls, node: Node, roles: np.ndarray, sizes: np.ndarray) -> _Named:
        reads, writes = np.array(node.reads, dtype=np.int64), np.array(node.writes, dtype=np.int64)
        named = np.zeros(len(roles), dtype=bool)
        named[reads] = named[writes] = True
        states = np.flatnonzero(named & (roles == STATE))
        weights = reads[roles[reads] == WEIGHT]
        if not len(weights):
            weights = reads[roles[reads] == GRADIENT]
        return cls(reads, writes, weights, states, float(sizes[weights].sum()))


def _repetitions_within(position: int, stride: int, repeat: int, low: int, high: int) -> range:
    """The repetitions in which ``low <= place + repetition x stride < high``."""
    if not stride:
        return range(repeat if low <= position < high else 0)
    if stride < 0:
        position, stride, low, high = -position, -stride, 1 - high, 1 - low
    first = max(-((position - low) // stride), 0)
    return range(first, max(min(-((position - high) // stride), repeat), first))


def slice_block(block: Block, first: int, count: int, positions: tuple[int, ...] | None) -> Block:
    """Repetitions of a block, of which only the nodes at ``positions`` (None: all)."""
    if first == 0 and count == block.repeat and positions is None:
        return block
    ends = {0: first == 0, -1: first + count == block.repeat}
    moved = {t: t + first * step for t, step in block.steps.items()} if first else {}

    def of(tensors: Sequence[int]) -> tuple[int, ...]:
        return tuple([moved.get(t, t) for t in tensors])

    nodes: list[Node] = []
    uneven = {}
    for position in range(len(block.nodes)) if positions is None else positions:
        for which, there in ends.items():
            if there and (which, position) in block.uneven:
                uneven[which, len(nodes)] = of(block.uneven[which, position])
        node = block.nodes[position]
        if first:
            frees = uneven.get((-1, len(nodes)), of(node.frees)) if count == 1 else of(node.frees)
            path = shift_path(node.path, block.stack, first * block.stride)
            node = replace(node, path=path, reads=of(node.reads), writes=of(node.writes), frees=frees)
        nodes.append(node)
    steps = {moved.get(t, t): step for t, step in block.steps.items()}
    return Block(tuple(nodes), count, steps, block.stack, block.stride, uneven)


def _resident_tensors(blocks: Sequence[Block], roles: np.ndarray) -> np.ndarray:
    """Which tensors are a chunk's own: all but weights and gradients that no node of these blocks touches [tensors]."""
    resident: np.ndarray = ~np.isin(roles, (WEIGHT, FROZEN, GRADIENT))
    for block in blocks:
        for used in (block.read, block.written):
            resident[used.over(np.arange(block.repeat))[0]] = True
    return resident


def _share_update(
    node: Node, named: _Named, resident: np.ndarray, sizes: np.ndarray, count: int, shares: np.ndarray
) -> tuple[Node | None, list[Tensor]]:
    """An optimizer node as far as it works on weights that are ``held``, with a share of the states that it touches.

    One that works on no weights at all, as the step's counter, stands in every chunk. ``shares`` has what stands here
    for each tensor: for states that earlier states touch their share, and learns of this node's.
    """
    weights = named.weights[resident[named.weights]]
    share = float(sizes[weights].sum()) / named.total if named.total else 1.0
    if share == 0.0:
        return None, []
    states = []
    fresh = named.states[shares[named.states] == named.states]
    if len(fresh):
        states.append(Tensor(count, round(float(sizes[fresh].sum()) * share), "fp32", "optimizer_state"))
        shares[fresh] = count
    op = node.op
    if op is not None and len(named.weights):
        op = _fraction(op, share, len(weights) / len(named.weights))
    reads, writes = (tuple(dict.fromkeys(shares[t[resident[t]]].tolist())) for t in (named.reads, named.writes))
    return replace(node, op=op, reads=reads, writes=writes, bytes_moved=round(node.bytes_moved * share)), states


def _fraction(op: Op, share: float, of_tensors: float) -> Op:
    """An op of the optimizer on a share of its elements."""
    dims: dict[str, Any] = {name: value for name, value in op.to_dict().items() if name in KINDS[op.kind].names}
    for name in ("numel", "size_bytes", "length"):
        if name in dims and isinstance(dims[name], int):
            dims[name] = max(round(dims[name] * share), 1)
    if "tensors" in dims:
        dims["tensors"] = max(round(dims["tensors"] * of_tensors), 1)
    return make_op(op.kind, dtype=op.dtype, out_dtype=op.out_dtype, **dims)
