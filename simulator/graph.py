"""The graph of one step: ops as nodes, tensors with lifetimes, repeated blocks folded.

A :class:`Graph` is what tracing produces, passes rewrite and schedules time. Nodes stand in execution order.
A run of nodes that repeats (the layers of a transformer) is stored once as a :class:`Block` with its count;
:meth:`Graph.nodes` unrolls it. Tensors are numbered; a node names the tensors it reads and writes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass

from ..datasets.ops import Op, make_op

FORMAT = 1
PHASES = ("forward", "backward", "optimizer")
ROLES = ("activation", "weight", "gradient", "optimizer_state", "input", "cache")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A stored tensor: its bytes and what it is for. Views share the tensor they look into."""

    id: int
    size_bytes: int
    dtype: str
    role: str


@dataclass(frozen=True, slots=True)
class Node:
    """One executed operator.

    ``op`` is None for an operator that no kind covers: it is costed by ``bytes_moved`` and listed in reports.
    ``source`` is the framework's name for it (``aten.mm``); ``path`` the module that called it.
    ``host_calls`` counts the framework calls that led to it and do no work of their own: (views, modules).
    """

    op: Op | None
    source: str
    path: str
    phase: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    bytes_moved: int
    host_calls: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive nodes, executed ``repeat`` times. Tensor ids are those of the first repetition."""

    nodes: tuple[Node, ...]
    repeat: int = 1


@dataclass(frozen=True)
class Graph:
    """One step of a model on one device.

    ``parameters`` counts trainable elements; ``model_flops`` is the arithmetic of the step as the model
    defines it (what MFU divides), without recomputation.
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
            for _ in range(block.repeat):
                yield from block.nodes
