"""A graph that is being rewritten: what every pass works on between the Graph it gets and the Graph it returns.

:class:`Draft` opens the blocks of a graph: a :class:`Section` is a block whose nodes may be replaced, removed and
inserted, and tensors are arrays that may be resized and added to. Repetition stays folded throughout: a change of a
section's node or tensor is a change in every repetition of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ..graph import ROLES, Block, Graph, Node, Tensor

Frees = tuple[int, ...]


@dataclass
class Item:
    """One node of a section, and what it frees in the first and last repetition where that is something else."""

    node: Node
    first: Frees | None = None
    last: Frees | None = None

    def change(self, **fields: Any) -> None:
        """Replace fields of the node."""
        self.node = replace(self.node, **fields)


@dataclass
class Section:
    """A block under change; ids and paths are those of its first repetition."""

    items: list[Item]
    repeat: int
    steps: dict[int, int]
    stack: str
    stride: int

    def ids(self, tensor: int) -> np.ndarray:
        """The ids that a tensor of the first repetition stands for over all repetitions."""
        step = self.steps.get(tensor, 0)
        return tensor + step * np.arange(self.repeat if step else 1)


@dataclass
class Draft:
    """Sections and tensors of a graph; :meth:`graph` closes it again."""

    source: Graph
    sections: list[Section] = field(init=False)
    sizes: np.ndarray = field(init=False)  # bytes by tensor id
    roles: np.ndarray = field(init=False)  # index into ROLES by tensor id
    dtypes: np.ndarray = field(init=False)  # index into dtype_names by tensor id
    dtype_names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        graph = self.source
        self.sizes = graph.tensor_bytes.copy()
        self.roles = graph.tensor_roles.copy()
        self.dtype_names = list(dict.fromkeys(t.dtype for t in graph.tensors))
        codes = {name: code for code, name in enumerate(self.dtype_names)}
        counts = [t.count for t in graph.tensors]
        self.dtypes = np.repeat(np.array([codes[t.dtype] for t in graph.tensors], dtype=np.int16), counts)
        self.sections = [_opened(block) for block in graph.blocks]

    def items(self) -> Iterator[tuple[Section, Item]]:
        """Every node with its section, in order."""
        for section in self.sections:
            for item in section.items:
                yield section, item

    def dtype(self, tensor: int) -> str:
        """The dtype of a tensor."""
        return self.dtype_names[self.dtypes[tensor]]

    def role(self, tensor: int) -> str:
        """The role of a tensor."""
        return ROLES[self.roles[tensor]]

    def code(self, dtype: str) -> int:
        """The index of a dtype in ``dtypes``, entered if it is new."""
        if dtype not in self.dtype_names:
            self.dtype_names.append(dtype)
        return self.dtype_names.index(dtype)

    def new(self, size_bytes: float, dtype: str, role: str = "activation", count: int = 1) -> int:
        """The id of the first of ``count`` new tensors alike."""
        first = len(self.sizes)
        self.sizes = np.append(self.sizes, np.full(count, int(size_bytes), dtype=np.int64))
        self.roles = np.append(self.roles, np.full(count, ROLES.index(role), dtype=self.roles.dtype))
        self.dtypes = np.append(self.dtypes, np.full(count, self.code(dtype), dtype=self.dtypes.dtype))
        return first

    def local(self, section: Section, size_bytes: float, dtype: str, role: str = "activation") -> int:
        """A new tensor of a section, one for every repetition."""
        tensor = self.new(size_bytes, dtype, role, section.repeat)
        if section.repeat > 1:
            section.steps[tensor] = 1
        return tensor

    def graph(self, **changes: Any) -> Graph:
        """The graph as it now stands; ``changes`` replace other fields of it."""
        blocks = tuple(_closed(section) for section in self.sections if section.items)
        return replace(self.source, blocks=blocks, tensors=self._runs(), **changes)

    def _runs(self) -> tuple[Tensor, ...]:
        if not len(self.sizes):
            return ()
        differs = np.diff(self.sizes) != 0
        differs |= (np.diff(self.roles) != 0) | (np.diff(self.dtypes) != 0)
        firsts = np.concatenate([[0], np.flatnonzero(differs) + 1, [len(self.sizes)]]).tolist()
        return tuple(
            Tensor(first, int(self.sizes[first]), self.dtype(first), self.role(first), after - first)
            for first, after in pairwise(firsts)
        )


def insert(items: list[Item], position: int, nodes: Sequence[Node]) -> None:
    """Put nodes before ``position``."""
    items[position:position] = [Item(node) for node in nodes]


def _opened(block: Block) -> Section:
    items = [
        Item(node, block.uneven.get((0, position)), block.uneven.get((-1, position)))
        for position, node in enumerate(block.nodes)
    ]
    return Section(items, block.repeat, dict(block.steps), block.stack, block.stride)


def _closed(section: Section) -> Block:
    uneven = {}
    for position, item in enumerate(section.items):
        if item.first is not None:
            uneven[0, position] = item.first
        if item.last is not None:
            uneven[-1, position] = item.last
    nodes = tuple(item.node for item in section.items)
    return Block(nodes, section.repeat, section.steps, section.stack, section.stride, uneven)
