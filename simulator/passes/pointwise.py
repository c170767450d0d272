"""Nodes that work element by element, or sum all elements up: what passes insert beside communication."""

from __future__ import annotations

from ...datasets.ops import Op, make_op
from ..graph import Node

Ids = tuple[int, ...]


def elementwise(
    source: str,
    numel: float,
    reads: Ids,
    writes: Ids,
    *,
    phase: str,
    path: str = "",
    dtype: str = "bf16",
    out_dtype: str = "",
    inputs: int = 1,
    fn: str = "arithmetic",
    frees: Ids = (),
    stream: str = "compute",
) -> Node:
    """One pointwise kernel over ``numel`` elements with ``inputs`` operands of that size."""
    op = make_op(
        "elementwise", numel=max(round(numel), 1), inputs=inputs, fn=fn, dtype=dtype, out_dtype=out_dtype or dtype
    )
    return _node(op, source, phase, path, reads, writes, frees, stream)


def reduction(source: str, numel: float, reads: Ids, writes: Ids, *, phase: str, path: str, dtype: str) -> Node:
    """The sum over ``numel`` elements (a norm)."""
    op = make_op("reduce", outer=1, length=max(round(numel), 1), inner=1, dtype=dtype, out_dtype="fp32")
    return _node(op, source, phase, path, reads, writes, (), "compute")


def copied(
    source: str,
    size_bytes: float,
    reads: Ids,
    writes: Ids,
    *,
    phase: str,
    path: str = "",
    direction: str = "d2d",
    frees: Ids = (),
    stream: str = "compute",
) -> Node:
    """A copy of ``size_bytes`` inside device memory (``d2d``), to (``d2h``) or from the host (``h2d``)."""
    op = make_op("copy", size_bytes=max(round(size_bytes), 1), direction=direction, dtype="int8")
    return _node(op, source, phase, path, reads, writes, frees, stream)


def _node(op: Op, source: str, phase: str, path: str, reads: Ids, writes: Ids, frees: Ids, stream: str) -> Node:
    return Node(
        op=op,
        source=source,
        path=path,
        phase=phase,
        reads=reads,
        writes=writes,
        bytes_moved=int(op.cost.bytes),
        frees=frees,
        stream=stream,
    )
