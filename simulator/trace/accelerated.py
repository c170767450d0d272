"""Kernels of accelerators in the models that transformers writes out in plain products only.

MPT, GPT-J, BLOOM, GPT-OSS and Gemma 2 compute attention by products and a softmax, and Llama 4 sends every token
through every expert; frameworks on accelerators run one fused attention and route tokens. :func:`accelerate` gives
such modules a forward that does the same. Attention sinks, soft caps and ALiBi cost a fused kernel next to nothing, so
they are left out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from .mixers import choose_tokens
from .model_caches import returned_cache


def accelerate(module: nn.Module) -> None:
    """Replace, in place, the forward calls of a model's modules that have a faster form on accelerators."""
    parts: Any = module.modules()
    for part in parts:
        name, replacement = FORWARDS.get(type(part).__name__, ("", None))
        if replacement is not None and hasattr(part, name):
            setattr(part, name, MethodType(replacement, part))
        if getattr(part, "attn_logit_softcapping", None) is not None:
            part.attn_logit_softcapping = None
    config: Any = getattr(module, "config", None)
    if getattr(config, "model_type", "") in ("gpt_oss", "gemma2"):
        config._attn_implementation = "sdpa"


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of [batch, heads, tokens, width]; queries are the last of the positions."""
    causal = query.shape[2] > 1 and query.shape[2] == key.shape[2]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)


def _heads_joined(context: torch.Tensor) -> torch.Tensor:
    return context.transpose(1, 2).flatten(2)


def _mpt(self: Any, hidden_states: torch.Tensor, *_: Any, **options: Any) -> Any:
    parts = self.Wqkv(hidden_states).chunk(3, dim=2)
    query, key, value = (piece.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for piece in parts)
    if (cache := returned_cache(options)) is not None:
        key, value = cache.update(key, value, self.layer_idx)
    return self.out_proj(_heads_joined(_attend(query, key, value))), None


def _gptj(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    return _attend(query.to(value.dtype), key.to(value.dtype), value), None


def _bloom(
    self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, *_: Any, layer_past: Any = None, **__: Any
) -> Any:
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    return self.dense(_heads_joined(_attend(query, key, value))) + residual, None


def _llama4(self: Any, hidden_states: torch.Tensor) -> Any:
    """Tokens go to their own experts only."""
    rows = hidden_states.reshape(-1, self.hidden_dim)
    logits = torch.nn.functional.linear(rows, self.router.weight)
    best, chosen = torch.topk(logits, self.top_k, dim=1)
    weights = torch.sigmoid(best.float()).to(rows.dtype)
    return self.shared_expert(rows) + self.experts(rows, chosen, weights), logits


def _llama4_experts(self: Any, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
    """One grouped product a matrix."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    self.has_gate, self.has_bias, self.is_transposed = True, False, True
    self._is_expert_parallel, self.has_post_expert_norm = False, False
    self._apply_gate = _gated(self.act_fn)
    return grouped_mm_experts_forward(self, rows, chosen, weights)


def _gated(activation: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    return apply


FORWARDS: dict[str, tuple[str, Callable[..., Any]]] = {
    "MptAttention": ("forward", _mpt),
    "GPTJAttention": ("_attn", _gptj),
    "BloomAttention": ("forward", _bloom),
    "Llama4TextMoe": ("forward", _llama4),
    "Llama4TextExperts": ("forward", _llama4_experts),
    "DeepseekV32Indexer": ("forward", choose_tokens),
    "GlmMoeDsaIndexer": ("forward", choose_tokens),
}
