"""Nodes that passes insert: collectives between ranks, kernels that go element by element, copies."""

from __future__ import annotations

from typing import NamedTuple

from ....datasets.ops import Op, make_op
from ...graph import Node
from ...question.plan import Group

Ids = tuple[int, ...]
ALONE = "blocking."  # begins the source of collectives that the framework waits for, whatever it overlaps


class Location(NamedTuple):
    """Where in a step and a model a node is put; a node is one too, whose neighbour it becomes."""

    phase: str
    path: str = ""


def name_of(node: Node) -> str:
    """The framework's name of a node's operator, without its namespace."""
    return node.source.rpartition(".")[2]


def kernel(
    op: Op, source: str, near: Node | Location, reads: Ids, writes: Ids, frees: Ids = (), stream: str = "compute"
) -> Node:
    """One kernel; it moves the bytes that its op costs."""
    return Node(op, source, near.path, near.phase, reads, writes, int(op.cost.bytes), frees, stream=stream)


def collective(
    kind: str,
    size_bytes: float,
    group: Group,
    near: Node | Location,
    reads: Ids,
    writes: Ids,
    dtype: str,
    *,
    stream: str = "compute",
    frees: Ids = (),
    issuer: str = "nccl.",
) -> Node:
    """One collective of a process group; ``size_bytes`` by nccl-tests' convention of its kind.

    On the ``compute`` stream nothing else runs meanwhile; on a stream of its own it runs beside compute.
    """
    moved, link = round(size_bytes), group.link
    op = make_op(kind, dtype, size_bytes=moved, ranks=group.ranks, ranks_per_node=group.ranks_per_node, link=link)
    source = f"{issuer}{kind}"
    return Node(op, source, near.path, near.phase, reads, writes, moved, frees, group=group.name, stream=stream)


def elementwise(
    source: str,
    numel: float,
    near: Node | Location,
    reads: Ids,
    writes: Ids,
    dtype: str,
    out_dtype: str = "",
    *,
    inputs: int = 1,
    fn: str = "arithmetic",
    frees: Ids = (),
    stream: str = "compute",
) -> Node:
    """One pointwise kernel over ``numel`` elements with ``inputs`` operands of that size."""
    op = make_op("elementwise", dtype, out_dtype or dtype, numel=max(round(numel), 1), inputs=inputs, fn=fn)
    return kernel(op, source, near, reads, writes, frees, stream)


def addition(total: int, addend: int, numel: float, dtype: str, near: Node) -> Node:
    """``addend`` added to ``total`` and let go of, in the place of ``near`` in the model."""
    return elementwise("aten.add_", numel, near, (total, addend), (total,), dtype, inputs=2, frees=(addend,))


def reduction(source: str, numel: float, near: Node | Location, reads: Ids, writes: Ids, dtype: str) -> Node:
    """The sum over ``numel`` elements (a norm)."""
    op = make_op("reduce", outer=1, length=max(round(numel), 1), inner=1, dtype=dtype, out_dtype="fp32")
    return kernel(op, source, near, reads, writes)


def copy_kernel(
    source: str,
    size_bytes: float,
    near: Node | Location,
    reads: Ids,
    writes: Ids,
    direction: str = "d2d",
    *,
    frees: Ids = (),
    stream: str = "compute",
) -> Node:
    """A copy of ``size_bytes`` inside device memory (``d2d``), to (``d2h``) or from the host (``h2d``)."""
    op = make_op("copy", size_bytes=max(round(size_bytes), 1), direction=direction, dtype="int8")
    return kernel(op, source, near, reads, writes, frees, stream)
