"""What surrounds the experts: routing, and moving rows to experts and back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ...datasets.ops import Op
from .base import Inputs, Run, Unsupported, case, torch_dtype
from .rows import same_dtype

if TYPE_CHECKING:
    import torch


@case("moe_route")
def moe_route(op: Op, inputs: Inputs) -> Run:
    """fp32 softmax over the experts, top-k, renormalised, cast to ``out_dtype``: the router of Mixtral and Qwen3."""
    import torch

    if op.topk > op.experts:
        raise Unsupported(f"top {op.topk} of {op.experts} experts")
    scores = inputs.normal(op.tokens, op.experts, dtype=op.dtype)
    target = torch_dtype(op.out_dtype)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = torch.softmax(scores, -1, dtype=torch.float32)
        weights, chosen = torch.topk(probabilities, op.topk, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(target), chosen

    return run


@case("moe_permute")
def moe_permute(op: Op, inputs: Inputs) -> Run:
    """Rows gathered in expert order by ``x[token]``; back by weights, inverse order and a sum over each token's rows.

    The operators of transformers' grouped experts, in their order.
    """
    same_dtype(op)
    if op.direction == 0:
        return _permute(op, inputs)
    rows = inputs.normal(op.tokens * op.topk, op.hidden, dtype=op.dtype)
    weights = inputs.normal(op.tokens * op.topk, 1, dtype=op.dtype)
    inverse = inputs.permutation(op.tokens * op.topk)

    def unpermute() -> torch.Tensor:
        weighted = (rows * weights)[inverse]
        return weighted.view(op.tokens, op.topk, op.hidden).sum(1)

    return unpermute


def _permute(op: Op, inputs: Inputs) -> Run:
    x = inputs.normal(op.tokens, op.hidden, dtype=op.dtype)
    token_of_row = inputs.permutation(op.tokens * op.topk) // op.topk
    return partial(x.__getitem__, token_of_row)
