"""A small decoder of plain torch modules, of which the host's time for an operator inside a model is read off.

One call of an operator in a loop tells little of it in a model: there its code is cold, operators are of many kinds (a
product passes through cuBLAS, a multiplication does not) and Python lies between. So layers as users write them run
here on one token, eager and in bf16: norms in fp32 with their casts, products, rotary embedding by slices, a
concatenated cache, attention, residuals. Widths are so small that no device's kernels take as long as their host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN, WIDE, HEADS, HEAD_DIM = 64, 128, 2, 32
CACHED = 8  # tokens in the cache


class Norm(nn.Module):
    """RMS norm that computes in fp32 (8 operators)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


def rotated(x: Tensor) -> Tensor:
    """The second half of the last dimension, negative, before the first."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (5 operators)."""
    return x * cos.unsqueeze(1) + rotated(x) * sin.unsqueeze(1)


class CacheLayer:
    """Keys and values of a layer, which grow by what they are given (2 operators)."""

    def __init__(self, first: Tensor) -> None:
        self.keys = self.values = self.first = first

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All of them, the new ones last."""
        self.keys = torch.cat([self.keys, key], dim=-2)
        self.values = torch.cat([self.values, value], dim=-2)
        return self.keys, self.values

    def reset(self) -> None:
        """What was there at first."""
        self.keys = self.values = self.first


def attend(
    module: DecoderAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, **_: Any
) -> Tensor:
    """Attention of one token to what the cache has, heads last but one (1 operator)."""
    causal = query.shape[2] > 1 and mask is None and module.causal
    attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, is_causal=causal)
    return attended.transpose(1, 2).contiguous()


ATTENTION = {"sdpa": attend}


class DecoderAttention(nn.Module):
    """Products, rotary embedding, cache and attention (17 operators)."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.causal, self.scale, self.way = layer, True, HEAD_DIM**-0.5, "sdpa"
        self.query = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.key = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.value = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(
        self, x: Tensor, position: tuple[Tensor, Tensor], mask: Tensor | None, cache: list[CacheLayer], **kwargs: Any
    ) -> Tensor:
        shape = (*x.shape[:-1], -1, HEAD_DIM)
        query = self.query(x).view(shape).transpose(1, 2)
        key = self.key(x).view(shape).transpose(1, 2)
        value = self.value(x).view(shape).transpose(1, 2)
        query, key = turned(query, *position), turned(key, *position)
        key, value = cache[self.layer].update(key, value)
        attended = ATTENTION[self.way](self, query, key, value, mask, scale=self.scale, **kwargs)
        return self.out(attended.reshape(*x.shape[:-1], -1).contiguous())


class Gated(nn.Module):
    """Three products and what is between them (5 operators)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, WIDE, bias=False)
        self.up = nn.Linear(HIDDEN, WIDE, bias=False)
        self.down = nn.Linear(WIDE, HIDDEN, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class DecoderLayer(nn.Module):
    """Norm, attention, norm, gated layer and two residuals."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.before, self.attention = Norm(HIDDEN), DecoderAttention(layer)
        self.after, self.gated = Norm(HIDDEN), Gated()

    def forward(self, x: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        residual = x
        x = self.before(x)
        x = residual + self.attention(x=x, mask=mask, **kwargs)
        residual = x
        x = self.after(x)
        return residual + self.gated(x)


def decoding(layers: int, device: str) -> Callable[[], object]:
    """A call that runs one token through so many layers, each of 40 operators that are no views."""
    stack = nn.ModuleList(DecoderLayer(number) for number in range(layers)).to(device, torch.bfloat16).eval()
    token = torch.ones(1, 1, HIDDEN, dtype=torch.bfloat16, device=device)
    position = token.new_ones(1, 1, HEAD_DIM), token.new_ones(1, 1, HEAD_DIM)
    cache = [CacheLayer(token.new_zeros(1, HEADS, CACHED, HEAD_DIM)) for _ in range(layers)]

    def run() -> None:
        x = token
        with torch.no_grad():
            for layer in stack:
                x = layer(x, mask=None, position=position, cache=cache)
        for layer_cache in cache:
            layer_cache.reset()

    return run
