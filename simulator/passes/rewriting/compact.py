"""A graph with no other tensors than those that its nodes name, numbered anew in the same order.

Parts cut alike, from wherever in a model, are then wired alike to the last id: what was found out about the wiring of
one holds for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...graph import Block, Graph, Tensor


def compact(graph: Graph) -> Graph:
    """The graph without tensors that none of its nodes names."""
    named = [_named_tensors(block) for block in graph.blocks]
    used = np.zeros(graph.tensor_count, dtype=bool)
    for block, tensors in zip(graph.blocks, named, strict=True):
        if block.repeat == 1:
            used[tensors] = True
            continue
        for tensor in tensors:
            last = tensor + block.steps.get(tensor, 0) * (block.repeat - 1)
            used[min(tensor, last) : max(tensor, last) + 1] = True  # with those between, so that steps stay
    numbers = np.cumsum(used) - 1
    blocks = [
        _rename_tensors(block, dict(zip(tensors, numbers[tensors].tolist(), strict=True)))
        for block, tensors in zip(graph.blocks, named, strict=True)
    ]
    counts = np.add.reduceat(used, [run.id for run in graph.tensors], dtype=np.int64)
    runs = zip(graph.tensors, (np.cumsum(counts) - counts).tolist(), counts.tolist(), strict=True)
    used_tensors = [Tensor(first, t.size_bytes, t.dtype, t.role, count) for t, first, count in runs if count]
    return replace(graph, blocks=tuple(blocks), tensors=tuple(used_tensors))


def _named_tensors(block: Block) -> list[int]:
    """The tensors that the nodes of a block name in its first repetition."""
    tensors = {t for node in block.nodes for t in (*node.reads, *node.writes, *node.frees)}
    return list(tensors.union(*block.uneven.values()))


def _rename_tensors(block: Block, names: Mapping[int, int]) -> Block:
    def of(tensors: Sequence[int]) -> tuple[int, ...]:
        return tuple([names[t] for t in tensors])

    nodes = [replace(n, reads=of(n.reads), writes=of(n.writes), frees=of(n.frees)) for n in block.nodes]
    steps = {names[t]: step for t, step in block.steps.items() if t in names}
    return replace(block, nodes=tuple(nodes), steps=steps, uneven={at: of(frees) for at, frees in block.uneven.items()})
