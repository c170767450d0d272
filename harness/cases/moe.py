"""Mixtures of experts: routing, moving rows to experts and back, and all of a rank's experts in one go."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

from ...datasets.dtypes import WEIGHT_BITS
from ...datasets.experts import power_law
from ...datasets.ops import Op
from .base import Inputs, Run, Unsupported, case, torch_dtype
from .gemm import one_kernel_for_all
from .rows import same_dtype

if TYPE_CHECKING:
    import torch

PACKED = ("fp8", "fp8_block", "nvfp4", "mxfp4", "mxfp8", *WEIGHT_BITS)  # experts of these formats need their scales


@case("moe_route")
def moe_route(op: Op, inputs: Inputs) -> Run:
    """fp32 softmax over the experts, top-k, renormalised, cast to ``out_dtype``: the router of Mixtral and Qwen3.

    ``kernels: topk`` is ``torch.topk`` of the scores alone.
    """
    import torch

    if op.topk > op.experts:
        raise Unsupported(f"top {op.topk} of {op.experts} experts")
    scores = inputs.normal(op.tokens, op.experts, dtype=op.dtype)
    target = torch_dtype(op.out_dtype)
    if op.kernels:
        return partial(torch.topk, scores, op.topk, dim=-1)

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


@case("fused_moe", when=lambda op, device: op.dtype not in PACKED, capturable=lambda op: one_kernel_for_all())
def fused_moe(op: Op, inputs: Inputs) -> Run:
    """Permute, both grouped products with the gate between them, and the weighted sum, on the first rank.

    Tokens come routed: the choice of experts is an op of its own (``moe_route``).
    """
    import torch

    same_dtype(op)
    local, width = share(op)
    if not hasattr(torch, "_grouped_mm"):
        raise Unsupported(f"torch {torch.__version__} has no grouped product; 2.8 brought it")
    weights, chosen = drawn_experts(op, inputs)
    x = inputs.normal(op.tokens, op.hidden, dtype=op.dtype)
    up = inputs.normal(local, (1 + op.gated) * width, op.hidden, dtype=op.dtype).transpose(-2, -1)
    down = inputs.normal(local, op.hidden, width, dtype=op.dtype).transpose(-2, -1)
    rows = inputs.count(chosen < local, 1 / op.ep)
    experts = torch.arange(local, device=inputs.device)

    def run() -> torch.Tensor:
        sorted_expert, order = torch.sort(chosen.view(-1), stable=True)
        mine = order[:rows]
        token = mine // op.topk
        ends = torch.searchsorted(sorted_expert, experts, right=True, out_int32=True)
        inner = _gate(torch._grouped_mm(x[token], up, offs=ends), bool(op.gated))
        outer = torch._grouped_mm(inner, down, offs=ends)
        scaled = outer * weights.view(-1, 1)[mine].to(outer.dtype)
        return torch.zeros_like(x).index_add_(0, token, scaled)

    return run


def share(op: Op) -> tuple[int, int]:
    """Experts of one rank and the width of one of them; Unsupported where they do not divide."""
    if op.topk > op.experts:
        raise Unsupported(f"top {op.topk} of {op.experts} experts")
    if op.experts % op.ep or op.inter % op.tp:
        raise Unsupported(f"{op.experts} experts or a width of {op.inter} do not divide by ep={op.ep}, tp={op.tp}")
    return op.experts // op.ep, op.inter // op.tp


def drawn_experts(op: Op, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (fp32, of sum one) and experts of each token, [tokens, topk] each, by the experts' shares of the tokens.

    Scores are the logarithms of the shares plus Gumbel noise: their top k are drawn without replacement by the shares
    (Kool et al., arXiv 1903.06059).
    """
    import torch

    shares = torch.tensor(expert_shares(op, inputs.seed), device=inputs.device)
    scores = _gumbel(inputs.normal(op.tokens, op.experts, dtype="fp32")) + shares.log()
    weights, chosen = torch.topk(torch.softmax(scores, -1), op.topk, dim=-1)
    return weights / weights.sum(-1, keepdim=True), chosen


def _gumbel(normal: torch.Tensor) -> torch.Tensor:
    """Gumbel noise from standard normal values, by the inverse of its distribution."""
    import torch

    return -torch.log(-torch.special.log_ndtr(normal))


def expert_shares(op: Op, seed: int) -> list[float]:
    """Each expert's share of the tokens when loads are spread as x^-(skew / 100), those of the busiest rank first.

    Quantiles of the power law (:mod:`....datasets.experts`), in random order over the ranks; equal without skew.
    """
    if op.skew == 0:
        return [1.0 / op.experts] * op.experts
    places = ((i + 0.5) / op.experts for i in range(op.experts))
    loads = [float(power_law(load_at, op.tokens, op.topk, op.experts, op.skew)) for load_at in places]
    Random(seed).shuffle(loads)
    local_experts = op.experts // op.ep
    busiest = max(range(op.ep), key=lambda rank: sum(loads[rank * local_experts : (rank + 1) * local_experts]))
    loads = loads[busiest * local_experts :] + loads[: busiest * local_experts]
    return [load / sum(loads) for load in loads]


def _gate(x: torch.Tensor, gated: bool) -> torch.Tensor:
    """SwiGLU of two halves, or SiLU without a gate."""
    from torch.nn import functional

    if not gated:
        return functional.silu(x)
    a, b = x.chunk(2, -1)
    return functional.silu(a) * b
