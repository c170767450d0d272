"""The graph of one step: ops as nodes, tensors with lifetimes, repeated blocks folded.

A :class:`Graph` is what tracing produces, passes rewrite and schedules time. Nodes stand in execution order.

**Tensors** are storages: views share the tensor they look into. They are numbered 0, 1, 2, …; a
:class:`Tensor` describes a run of consecutive ids that are alike (the same weight of every layer).
A node names the tensors it ``reads``, ``writes`` (a tensor in both is updated in place) and ``frees``: those
that the framework let go of after it. A tensor lives from its first write, or from the start when nothing
writes it before it is read, to the node that frees it, or to the end of the step.

**Repetition.** Consecutive nodes that repeat (the layers of a transformer) are stored once as a
:class:`Block`, written for its first repetition. In repetition *i* (from 0)

- tensor ``t`` is ``t + i · steps.get(t, 0)``: 0 for what all share (rotary tables), +1 for a layer's own
  weights and activations, -1 for what a backward block, which walks the layers in reverse, reads of them.
  A value carried from one repetition to the next (hidden states in, hidden states out) is read as ``h`` and
  written as ``h + 1``, both with step 1: the two are each other's phi pair, and ids say so by themselves;
- the layer number in ``Node.path`` after ``Block.stack`` grows by ``i · Block.stride``;
- the first and the last repetition may free other tensors than the rest (what enters the first is often held by
  others, what all share goes with the last): ``Block.uneven`` says what they free instead.

So unrolling is exact, wiring and lifetimes included: :meth:`Graph.nodes`. Nothing else is ever implied: two
layers that differ in any op, shape, lifetime or wiring stand in different blocks.
"""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np

from ..datasets.ops import Op

FORMAT = 2
PHASES = ("forward", "recompute", "backward", "optimizer")
ROLES = ("activation", "weight", "frozen", "buffer", "gradient", "optimizer_state", "input", "cache")
ACTIVATION, WEIGHT, FROZEN, BUFFER, GRADIENT, STATE, INPUT, CACHE = range(len(ROLES))  # as arrays have them

REST_SUFFIX = ".rest"  # ends the source of a node that was cut off another, and is issued with it

_LAYER = re.compile(r"^(?:(.*?)\.)??(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Tensor:
    """``count`` stored tensors alike, with ids ``id`` to ``id + count - 1``: bytes of each, and what they are for.

    Roles: ``weight`` is a trained parameter, ``frozen`` one that is not trained, ``buffer`` a module's constant
    (rotary frequencies), ``cache`` keys and values kept between steps; ``activation`` is everything else that
    the step makes.
    """

    id: int
    size_bytes: int
    dtype: str
    role: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class HostCalls:
    """What the host did between the previous node and this one, besides this node's own operator call.

    ``dispatch``: operator calls without work of their own (an empty tensor, the single updates inside a
    multi-tensor call); ``views``: calls that made a view; ``modules``: ``nn.Module`` calls begun; ``autograd``:
    backward nodes begun (each was recorded once in the forward pass).
    """

    dispatch: int = 0
    views: int = 0
    modules: int = 0
    autograd: int = 0

    def __add__(self, other: HostCalls) -> HostCalls:
        return HostCalls(
            self.dispatch + other.dispatch,
            self.views + other.views,
            self.modules + other.modules,
            self.autograd + other.autograd,
        )


NO_CALLS = HostCalls()


@dataclass(frozen=True, slots=True)
class Node:
    """One executed operator.

    ``op`` is None for an operator that no kind covers: it is costed by ``bytes_moved`` and listed in the graph's
    notes. ``source`` is the framework's name for it (``aten.mm``); ``path`` the module that called it, in
    backward the module whose forward it differentiates. ``group`` is the process group that a communication joins
    (``tp``, ``cp``, ``dp``, ``dp_cp``, ``pp``, ``ep``, ``etp``, ``edp``), ``stream`` the queue it runs in:
    nodes of one stream run one after the other, those of different streams wait for each other's tensors only. What
    is computed again for the backward pass has phase ``recompute`` and runs where it stands.
    """

    op: Op | None
    source: str
    path: str
    phase: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    bytes_moved: int
    frees: tuple[int, ...] = ()
    host: HostCalls = NO_CALLS
    group: str = ""
    stream: str = "compute"

    @property
    def kind(self) -> str:
        """The kind of its op; empty where no kind covers it."""
        return self.op.kind if self.op is not None else ""

    @property
    def work(self) -> Op:
        """The op of a node that has one."""
        assert self.op is not None, self.source
        return self.op

    @property
    def touches(self) -> tuple[int, ...]:
        """What it reads and writes."""
        return (*self.reads, *self.writes)


class Touches(NamedTuple):
    """Tensors that nodes of a block touch: id in the first repetition, what is added per repetition, and which node.

    ``length`` is how many nodes the block has.
    """

    tensor: np.ndarray
    step: np.ndarray
    node: np.ndarray
    length: int

    def over(self, repetitions: np.ndarray, offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Ids and times in these repetitions of a block that begins at ``offset``, in executed nodes."""
        ids = self.tensor + self.step * repetitions[:, None]
        times = self.node + (offset + self.length * repetitions[:, None])
        return ids.ravel(), times.ravel()


@dataclass(frozen=True)
class Block:
    """Consecutive nodes, executed ``repeat`` times; ids and paths are those of the first repetition.

    ``steps`` gives, by tensor id, what is added to it per repetition (absent: 0). ``stack`` is the path of the
    list of layers that repeats (``model.layers``), ``stride`` the layers each repetition moves on (negative in
    backward). ``uneven`` gives by (repetition, node), with repetition 0 or -1 for the last, what that node frees
    there; its ids, too, are those of the first repetition.
    """

    nodes: tuple[Node, ...]
    repeat: int = 1
    steps: Mapping[int, int] = field(default_factory=dict)
    stack: str = ""
    stride: int = 0
    uneven: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def read(self) -> Touches:
        """What each node reads."""
        return self._collect_touches([node.reads for node in self.nodes])

    @cached_property
    def written(self) -> Touches:
        """What each node writes."""
        return self._collect_touches([node.writes for node in self.nodes])

    @cached_property
    def freed(self) -> list[tuple[Touches, np.ndarray]]:
        """What each node frees, and in which repetitions: usually, in the first and in the last one."""
        usual_frees = [node.frees for node in self.nodes]
        touches = [(self._collect_touches(usual_frees), np.arange(1, self.repeat - 1))] if self.repeat > 2 else []
        for which, repetition in ((0, 0), (-1, self.repeat - 1))[: min(self.repeat, 2)]:
            end_frees = [self.uneven.get((which, position), frees) for position, frees in enumerate(usual_frees)]
            touches.append((self._collect_touches(end_frees), np.array([repetition])))
        return touches

    def _collect_touches(self, tensors_of_nodes: Sequence[Sequence[int]]) -> Touches:
        tensors = list(chain.from_iterable(tensors_of_nodes))
        node = np.repeat(np.arange(len(tensors_of_nodes)), [len(ids) for ids in tensors_of_nodes])
        steps = np.zeros(len(tensors), dtype=np.int64)
        if self.repeat > 1 and self.steps:
            steps[:] = [self.steps.get(tensor, 0) for tensor in tensors]
        return Touches(np.array(tensors, dtype=np.int64), steps, node, len(tensors_of_nodes))

    def repetition(self, index: int) -> Iterator[Node]:
        """The nodes of one repetition, with their own tensors and paths."""
        steps = {tensor: tensor + index * step for tensor, step in self.steps.items()} if index else {}
        which = 0 if index == 0 else -1 if index == self.repeat - 1 else 1
        for position, node in enumerate(self.nodes):
            frees = self.uneven.get((which, position), node.frees)
            if not index and frees is node.frees:
                yield node
                continue
            yield dataclasses.replace(
                node,
                path=shift_path(node.path, self.stack, index * self.stride),
                reads=tuple(steps.get(t, t) for t in node.reads),
                writes=tuple(steps.get(t, t) for t in node.writes),
                frees=tuple(sorted(steps.get(t, t) for t in frees)),
            )


@dataclass(frozen=True)
class Graph:
    """One step of a model on one device.

    ``tensors`` cover the ids 0 … n-1 in order. ``parameters`` counts trained elements, tied ones once.
    ``model_flops`` is the arithmetic of the step as the model defines it (what MFU divides): the matrix
    products and attention of the forward pass, as computed, three times over in training (the backward pass
    costs twice the forward; recomputation never counts).
    """

    name: str
    blocks: tuple[Block, ...]
    tensors: tuple[Tensor, ...]
    parameters: int
    model_flops: float
    notes: tuple[str, ...] = ()

    def nodes(self) -> Iterator[Node]:
        """Every executed node, blocks unrolled."""
        for block in self.blocks:
            for index in range(block.repeat):
                yield from block.repetition(index)

    def weighted(self) -> Iterator[tuple[Node, int]]:
        """Every stored node with the number of times it runs: enough for totals, without unrolling."""
        for block in self.blocks:
            for node in block.nodes:
                yield node, block.repeat

    def tensor(self, tensor_id: int) -> Tensor:
        """The description of one tensor; IndexError outside the graph."""
        if not 0 <= tensor_id < self.tensor_count:
            raise IndexError(f"tensor {tensor_id} is not in {self.name} (it has {self.tensor_count})")
        return self.tensors[bisect_right(self._first_ids, tensor_id) - 1]

    @cached_property
    def tensor_count(self) -> int:
        return sum(tensor.count for tensor in self.tensors)

    @cached_property
    def _first_ids(self) -> list[int]:
        return [tensor.id for tensor in self.tensors]

    @cached_property
    def tensor_bytes(self) -> np.ndarray:
        """Bytes of every tensor, int64 by id."""
        sizes = np.array([tensor.size_bytes for tensor in self.tensors], dtype=np.int64)
        return np.repeat(sizes, [tensor.count for tensor in self.tensors])

    @cached_property
    def tensor_roles(self) -> np.ndarray:
        """Role of every tensor by id, as an index into ``ROLES``."""
        roles = np.array([ROLES.index(tensor.role) for tensor in self.tensors], dtype=np.int8)
        return np.repeat(roles, [tensor.count for tensor in self.tensors])

    def unrolled(self) -> Graph:
        """The same graph with every repetition written out, in one block."""
        return dataclasses.replace(self, blocks=(Block(tuple(self.nodes())),))


def layer_of(path: str) -> tuple[str, int] | None:
    """The outermost numbered module of a path: ``model.layers.3.mlp`` is layer 3 of ``model.layers``."""
    match = _LAYER.match(path)
    return (match.group(1) or "", int(match.group(2))) if match else None


def shift_path(path: str, stack: str, layers: int) -> str:
    """The path of the same module ``layers`` further on in ``stack``; other paths as they are."""
    match = _LAYER.match(path)
    if not layers or match is None or (match.group(1) or "") != stack:
        return path
    return f"{path[: match.start(2)]}{int(match.group(2)) + layers}{path[match.end(2) :]}"


def join_tensors(tensors: Iterable[tuple[int, str, str]]) -> tuple[Tensor, ...]:
    """Descriptions (bytes, dtype, role) by id, equal neighbours joined."""
    joined, first = [], 0
    for description, alike in groupby(tensors):
        count = sum(1 for _ in alike)
        joined.append(Tensor(first, *description, count))
        first += count
    return tuple(joined)
