"""Biases that a kernel of their own adds after a product.

Before PyTorch 1.12 (pull request 72728; issue 39661) ``torch.nn.functional.linear`` ran ``addmm`` for inputs of two
dimensions alone, and ``matmul`` and ``add_`` for all others. Models of sequences have three.
"""

from __future__ import annotations

import numpy as np

from ..rewriting.draft import Draft, Item, Section
from ..rewriting.match import expand
from ..rewriting.nodes import elementwise, name_of


def biases_apart(draft: Draft, released: np.ndarray) -> bool:
    """An addition in place after every forward product that has a bias in its epilogue."""
    return expand(draft.sections, _with_addition)


def _with_addition(_: Section, item: Item) -> list[Item]:
    node, op = item.node, item.node.op
    if node.phase == "backward" or op is None or op.kind != "gemm" or name_of(node) != "addmm":
        return [item]
    numel, written = op.batch * op.m * op.n, node.writes[:1]
    return [item, Item(elementwise("aten.add_", numel, node, written, written, op.out_dtype))]
