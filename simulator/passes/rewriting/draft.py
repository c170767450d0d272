"""A graph that is being rewritten: what every pass works on between the Graph it gets and the Graph it returns.

:class:`Draft` opens the blocks of a graph: a :class:`Section` is a block whose nodes may be replaced, removed and
inserted, and tensors are arrays that may be resized and added to. Repetition stays folded throughout: a change of a
section's node or tensor is a change in every repetition of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ....datasets.dtypes import itemsize
from ....datasets.ops import Op
from ...graph import ROLES, Block, Graph, Node, Tensor

Frees = tuple[int, ...]
WHOLE_NUMBERS = ("int64", "int32", "bool")  # dtypes of positions, counters and masks


@dataclass
class Item:
    """One node of a section, and what it frees in the first and last repetition where that is something else."""

    node: Node
    first: Frees | None = None
    last: Frees | None = None

    def change(self, **fields: Any) -> None:
        """Replace fields of the node."""
        self.node = replace(self.node, **fields)

    def compute(self, op: Op, **fields: Any) -> None:
        """Run another op, which moves the bytes that it costs, and replace other fields."""
        self.change(op=op, bytes_moved=int(op.cost.bytes), **fields)

    def free(self, *tensors: int) -> None:
        """Let go of these tensors too, in every repetition."""
        self._free(lambda frees: tuple(sorted((*frees, *tensors))))

    def keep(self, *tensors: int) -> None:
        """No longer let go of these tensors, in any repetition."""
        lasting = set(tensors)
        self._free(lambda frees: tuple(t for t in frees if t not in lasting))

    def read_instead(self, names: Mapping[int, int]) -> None:
        """Read other tensors in the place of some."""
        self.change(reads=tuple(names.get(t, t) for t in self.node.reads))

    def touch_instead(self, names: Mapping[int, int]) -> None:
        """Read and write other tensors in the place of some, and free the same ones as before."""
        self.read_instead(names)
        self.change(writes=tuple(names.get(t, t) for t in self.node.writes))

    def rename(self, names: Mapping[int, int]) -> None:
        """Know tensors by other ids."""

        def renamed(tensors: Frees) -> Frees:
            return tuple(names.get(t, t) for t in tensors)

        node = self.node
        if not names.keys().isdisjoint(
            (*node.reads, *node.writes, *node.frees, *(self.first or ()), *(self.last or ()))
        ):
            self.change(reads=renamed(node.reads), writes=renamed(node.writes))
            self._free(renamed)

    def _free(self, changed: Callable[[Frees], Frees]) -> None:
        self.change(frees=changed(self.node.frees))
        self.first = None if self.first is None else changed(self.first)
        self.last = None if self.last is None else changed(self.last)


@dataclass
class Section:
    """A block under change; ids and paths are those of its first repetition. ``source`` is the block as it was."""

    items: list[Item]
    repeat: int
    steps: dict[int, int]
    stack: str
    stride: int
    source: Block | None = None

    def ids(self, tensor: int) -> np.ndarray:
        """The ids that a tensor of the first repetition stands for over all repetitions."""
        step = self.steps.get(tensor, 0)
        return tensor + step * np.arange(self.repeat if step else 1)

    def place(self, item: Item) -> int:
        """The position of an item; StopIteration when it is not here."""
        return next(position for position, other in enumerate(self.items) if other is item)

    def readers(self) -> dict[int, list[int]]:
        """The positions of the items that read each tensor, in order."""
        readers: dict[int, list[int]] = {}
        for position, item in enumerate(self.items):
            for tensor in item.node.reads:
                readers.setdefault(tensor, []).append(position)
        return readers

    def span(self, tensor: int) -> slice:
        """The same ids, in the same order, as a slice."""
        step = self.steps.get(tensor, 0)
        after = tensor + step * self.repeat
        return slice(tensor, after if after >= 0 else None, step) if step else slice(tensor, tensor + 1)


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
        self.sections = [_open_block(block) for block in graph.blocks]

    def walk(self) -> Iterator[tuple[Section, Item]]:
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

    def numel(self, tensor: int) -> int:
        """The number of elements of a tensor."""
        return int(self.sizes[tensor] / itemsize(self.dtype(tensor)))

    def elements(self, tensors: Sequence[int] | np.ndarray) -> np.ndarray:
        """The number of elements of each tensor, float64."""
        ids = np.asarray(tensors, dtype=np.int64)
        return self.sizes[ids] / np.array([itemsize(name) for name in self.dtype_names])[self.dtypes[ids]]

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
        blocks = tuple(_close_section(section) for section in self.sections if section.items)
        return replace(self.source, blocks=blocks, tensors=self._runs(), **changes)

    def _runs(self) -> tuple[Tensor, ...]:
        if not len(self.sizes):
            return ()
        differs = np.diff(self.sizes) != 0
        differs |= (np.diff(self.roles) != 0) | (np.diff(self.dtypes) != 0)
        firsts = np.append(0, np.flatnonzero(differs) + 1)
        counts = np.diff(firsts, append=len(self.sizes)).tolist()
        dtypes = [self.dtype_names[code] for code in self.dtypes[firsts].tolist()]
        roles = [ROLES[code] for code in self.roles[firsts].tolist()]
        return tuple(map(Tensor, firsts.tolist(), self.sizes[firsts].tolist(), dtypes, roles, counts))


def begin_token(draft: Draft, section: Section, position: int) -> tuple[int, ...]:
    """An empty tensor that the repetition before writes as its item at ``position`` begins; none without repetition."""
    if section.repeat == 1:
        return ()
    token, first = draft.new(0, "int8", "buffer", section.repeat + 1), section.items[position]
    section.steps.update({token: 1, token + 1: 1})
    first.change(writes=(*first.node.writes, token + 1))
    return (token,)


class Insertions:
    """Nodes to be put before or after the items of sections, applied at once so that positions stay valid."""

    def __init__(self) -> None:
        self._made: list[tuple[Section, int, int, list[Node]]] = []

    def before(self, section: Section, position: int, nodes: list[Node]) -> None:
        """Put nodes before an item, after those put there earlier."""
        self._made.append((section, position, 0, nodes))

    def after(self, section: Section, position: int, nodes: list[Node]) -> None:
        """Put nodes after an item, after those put there earlier."""
        self._made.append((section, position, 1, nodes))

    def apply(self) -> None:
        """Insert all of them."""
        by_section: dict[int, tuple[Section, dict[tuple[int, int], list[Node]]]] = {}
        for section, position, side, nodes in self._made:
            by_section.setdefault(id(section), (section, {}))[1].setdefault((position, side), []).extend(nodes)
        for section, places in by_section.values():
            items: list[Item] = []
            for position, item in enumerate(section.items):
                items += map(Item, places.get((position, 0), ()))
                items.append(item)
                items += map(Item, places.get((position, 1), ()))
            section.items = items
        self._made = []


def _open_block(block: Block) -> Section:
    items = [
        Item(node, block.uneven.get((0, position)), block.uneven.get((-1, position)))
        for position, node in enumerate(block.nodes)
    ]
    return Section(items, block.repeat, dict(block.steps), block.stack, block.stride, block)


def _close_section(section: Section) -> Block:
    uneven = {}
    for position, item in enumerate(section.items):
        if item.first is not None:
            uneven[0, position] = item.first
        if item.last is not None:
            uneven[-1, position] = item.last
    nodes = tuple(item.node for item in section.items)
    block = Block(nodes, section.repeat, section.steps, section.stack, section.stride, uneven)
    unchanged = section.source is not None and section.source == block
    return section.source if unchanged and section.source else block  # with what is known of it
