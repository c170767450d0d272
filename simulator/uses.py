"""What the nodes of a block use, as arrays: one entry per node and tensor, and where they stand in every repetition."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from .graph import Block


class Uses(NamedTuple):
    """Tensors that nodes of a block use: id in the first repetition, what is added per repetition, and which node.

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


def reads(block: Block) -> Uses:
    """What each node reads."""
    return _uses(block, [node.reads for node in block.nodes])


def writes(block: Block) -> Uses:
    """What each node writes."""
    return _uses(block, [node.writes for node in block.nodes])


def frees(block: Block) -> list[tuple[Uses, np.ndarray]]:
    """What each node frees, and in which repetitions: usually, in the first and in the last one."""
    usual = [node.frees for node in block.nodes]
    found = [(_uses(block, usual), np.arange(1, block.repeat - 1))] if block.repeat > 2 else []
    for which, repetition in ((0, 0), (-1, block.repeat - 1))[: min(block.repeat, 2)]:
        own = [block.uneven.get((which, position), freed) for position, freed in enumerate(usual)]
        found.append((_uses(block, own), np.array([repetition])))
    return found


def _uses(block: Block, named: Sequence[Sequence[int]]) -> Uses:
    tensors = list(chain.from_iterable(named))
    node = np.repeat(np.arange(len(named)), [len(each) for each in named])
    steps = np.zeros(len(tensors), dtype=np.int64)
    if block.repeat > 1 and block.steps:
        steps[:] = [block.steps.get(tensor, 0) for tensor in tensors]
    return Uses(np.array(tensors, dtype=np.int64), steps, node, len(named))
