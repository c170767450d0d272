"""Table lookups."""

from __future__ import annotations

from functools import partial

from ...datasets.ops import Op
from .base import Inputs, Run, case
from .rows import same_dtype


@case("embedding")
def embedding(op: Op, inputs: Inputs) -> Run:
    """``F.embedding`` with uniformly random indices: the least locality a batch can have."""
    from torch.nn import functional

    same_dtype(op)
    table = inputs.normal(op.vocab, op.hidden, dtype=op.dtype)
    return partial(functional.embedding, inputs.integers(op.tokens, high=op.vocab), table)


@case("embedding_backward")
def embedding_backward(op: Op, inputs: Inputs) -> Run:
    """``aten.embedding_dense_backward``: a fresh zero table, gradient rows added into it."""
    import torch

    same_dtype(op)
    dy = inputs.normal(op.tokens, op.hidden, dtype=op.dtype)
    indices = inputs.integers(op.tokens, high=op.vocab)
    return partial(torch.ops.aten.embedding_dense_backward, dy, indices, op.vocab, -1, False)
