"""Nodes that move data between ranks: what passes insert where a tensor has to be summed, gathered or sent."""

from __future__ import annotations

from ...datasets.ops import make_op
from ..graph import Node
from ..plan import Group


def collective(
    kind: str,
    size_bytes: float,
    group: Group,
    reads: tuple[int, ...],
    writes: tuple[int, ...],
    *,
    phase: str,
    path: str = "",
    dtype: str = "bf16",
    stream: str = "compute",
    frees: tuple[int, ...] = (),
) -> Node:
    """One collective of a process group; ``size_bytes`` by nccl-tests' convention of its kind.

    On the ``compute`` stream nothing else runs meanwhile; on a stream of its own it runs beside compute.
    """
    op = make_op(
        kind,
        size_bytes=round(size_bytes),
        ranks=group.ranks,
        ranks_per_node=group.ranks_per_node,
        link=group.link,
        dtype=dtype,
    )
    return Node(
        op=op,
        source=f"nccl.{kind}",
        path=path,
        phase=phase,
        reads=reads,
        writes=writes,
        bytes_moved=round(size_bytes),
        frees=frees,
        group=group.name,
        stream=stream,
    )
