"""Whether a graph is one that passes and schedules can work on: ids, roles, groups and lifetimes fit together.

A pass that is given a sound graph gives a sound one. After passes of a user's own this is always checked, since what is
amiss would show as a wrong time only. After opcast's own passes it is where :data:`EVERY_PASS` is set, as in tests.
"""

from __future__ import annotations

from itertools import islice
from typing import NoReturn

import numpy as np

from ...datasets.ops import KINDS
from ..graph import PHASES, ROLES, Graph, Node
from ..question.stack import GROUPS

EVERY_PASS = False
STREAMS = ("compute", "comm:", "copy")  # what names of queues begin with
NEVER = np.iinfo(np.int64).max
NEARLY = 1e-6  # of the FLOPs: what rounding to whole dimensions changes


class GraphError(ValueError):
    """A graph that does not fit together. The message says which node, and what is wrong with it."""


def verify(graph: Graph) -> None:
    """GraphError in one line for the first thing that is wrong with a graph."""
    _tensors(graph)
    count = sum(tensor.count for tensor in graph.tensors)
    for block in graph.blocks:
        if block.repeat < 1:
            raise GraphError(f"a block of {len(block.nodes)} nodes repeats {block.repeat} times")
        for node in block.nodes:
            _node(node)
    _lifetimes(graph, count)


def verify_flops(before: Graph, after: Graph) -> None:
    """GraphError where matrix products and attention of a graph are not what they were, in FLOPs."""
    was, now = tensor_flops(before), tensor_flops(after)
    if abs(now - was) > NEARLY * max(was, 1.0):
        raise GraphError(f"products and attention have {now:.6g} FLOPs, {was:.6g} before")


def tensor_flops(graph: Graph) -> float:
    """FLOPs of the matrix products and attention that a rank executes for one micro-batch."""
    ops = ((node.op, repeat) for node, repeat in graph.weighted() if node.op is not None)
    return sum(float(op.cost.flops) * repeat for op, repeat in ops if op.cost.unit == "tensor")


def _tensors(graph: Graph) -> None:
    following = 0
    for tensor in graph.tensors:
        if tensor.id != following or tensor.count < 1:
            raise GraphError(f"tensor {tensor.id} stands where {following} follows, {tensor.count} times")
        if tensor.role not in ROLES or tensor.size_bytes < 0:
            raise GraphError(f"tensor {tensor.id} has role {tensor.role!r} and {tensor.size_bytes} bytes")
        following += tensor.count


def _node(node: Node) -> None:
    wrong = ""
    if node.phase not in PHASES:
        wrong = f"phase {node.phase!r}, which is none of {', '.join(PHASES)}"
    elif node.group not in ("", *GROUPS):
        wrong = f"group {node.group!r}, which is none of {', '.join(GROUPS)}"
    elif not node.stream.startswith(STREAMS):
        wrong = f"stream {node.stream!r}, which begins with none of {', '.join(STREAMS)}"
    elif node.bytes_moved < 0:
        wrong = f"{node.bytes_moved} bytes moved"
    elif node.op is not None and KINDS[node.op.kind].family == "collective" and not node.group:
        wrong = "no group, though it communicates"
    if wrong:
        raise GraphError(f"{_describe(node)} has {wrong}")


def _lifetimes(graph: Graph, count: int) -> None:
    """Activations are written before they are read, nothing is used after it was freed, or freed twice."""
    reads, writes, frees = _touches(graph)
    for ids, times in (reads, writes, frees):
        beyond = (ids < 0) | (ids >= count)
        if beyond.any():
            _complain(graph, times[beyond][0], f"uses tensor {ids[beyond][0]} of {count}")
    first_read, first_written, freed = (_earliest(*touches, count) for touches in (reads, writes, frees))
    early = (first_read < first_written) & (first_read < NEVER) & _needs_writer(graph)
    if early.any():
        _complain(graph, first_read[early].min(), "reads tensor {} before it is written", first_read, early)
    last = np.zeros(count, dtype=np.int64)
    for ids, times in (reads, writes, frees):
        np.maximum.at(last, ids, times)
    gone = last > freed
    if gone.any():
        _complain(graph, last[gone].min(), "uses tensor {} after it was freed", last, gone)


def _touches(graph: Graph) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids and times, in executed nodes, of all that is read, written and freed."""
    touches_by_use: list[list[tuple[np.ndarray, np.ndarray]]] = [[], [], []]
    start = 0
    for block in graph.blocks:
        every = np.arange(block.repeat)
        touches_by_use[0].append(block.read.over(every, start))
        touches_by_use[1].append(block.written.over(every, start))
        touches_by_use[2] += [touches.over(repetitions, start) for touches, repetitions in block.freed]
        start += block.repeat * len(block.nodes)
    none = np.zeros(0, np.int64)
    return [
        (np.concatenate([none, *(ids for ids, _ in pairs)]), np.concatenate([none, *(times for _, times in pairs)]))
        for pairs in touches_by_use
    ]


def _earliest(ids: np.ndarray, times: np.ndarray, count: int) -> np.ndarray:
    first = np.full(count, NEVER)
    np.minimum.at(first, ids, times)
    return first


def _needs_writer(graph: Graph) -> np.ndarray:
    """Which tensors only nodes make: activations that have a size; others are there before the step."""
    written = [tensor.role == "activation" and tensor.size_bytes > 0 for tensor in graph.tensors]
    return np.repeat(
        np.array(written, dtype=bool), np.array([tensor.count for tensor in graph.tensors], dtype=np.int64)
    )


def _complain(
    graph: Graph, time: int, what: str, times: np.ndarray | None = None, chosen: np.ndarray | None = None
) -> NoReturn:
    """GraphError that names the node at a time, and the tensor among the ``chosen`` ones whose time that is."""
    if times is not None and chosen is not None:
        what = what.format(int(np.flatnonzero(chosen & (times == time))[0]))
    node = next(islice(graph.nodes(), int(time), None))
    raise GraphError(f"{_describe(node)} {what}")


def _describe(node: Node) -> str:
    return f"{node.source} of {node.path or 'the step'}"
