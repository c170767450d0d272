"""One fused attention kernel for every call, as accelerators have it, whatever a CPU would fall back to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@contextmanager
def fused_attention() -> Iterator[None]:
    """While inside, ``F.scaled_dot_product_attention`` is one operator forward and one backward.

    As FlashAttention does it: key and value heads are shared without copies, keys and values may differ in width,
    and the result lies as [batch, tokens, heads, width] in memory.
    """
    functional = torch.nn.functional
    original, operator = functional.scaled_dot_product_attention, _operator()

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: Any = None,
        enable_gqa: bool = False,
    ) -> Any:
        return operator(query, key, value, attn_mask, is_causal)[0]

    functional.scaled_dot_product_attention = attention
    try:
        with _shared_heads():
            yield
    finally:
        functional.scaled_dot_product_attention = original


@contextmanager
def _shared_heads() -> Iterator[None]:
    """While inside, transformers gives the kernel the heads of keys and values as they are, masked or not."""
    try:
        from transformers.integrations import sdpa_attention
    except ImportError:
        yield
        return
    module: Any = sdpa_attention
    original = module.use_gqa_in_sdpa
    module.use_gqa_in_sdpa = lambda *_: True
    try:
        yield
    finally:
        module.use_gqa_in_sdpa = original


@cache
def _operator() -> Any:
    """Register ``opcast::attention`` and its gradient: shapes only, nothing to compute."""
    library = torch.library.Library("opcast", "FRAGMENT")
    library.define("attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal) -> Tensor[]")
    library.define(
        "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp,"
        " Tensor? attn_mask, bool is_causal) -> Tensor[]"
    )
    forward, backward = torch.ops.opcast.attention, torch.ops.opcast.attention_backward

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        query, key, value, mask, ctx.is_causal = inputs
        ctx.save_for_backward(query, key, value, *output, *([] if mask is None else [mask]))

    def differentiate(ctx: Any, gradients: Any) -> Any:
        *saved, mask = (*ctx.saved_tensors, None)[:6]
        return (*backward(gradients[0], *saved[:5], mask, ctx.is_causal), None, None)

    library._register_fake("attention", _forward_shapes)
    library._register_fake("attention_backward", lambda grad, q, k, v, *_: [torch.empty_like(x) for x in (q, k, v)])
    torch.library.register_autograd("opcast::attention", differentiate, setup_context=setup, lib=library)
    _LIBRARIES.append(library)
    return forward


_LIBRARIES: list[Any] = []  # a Library undoes its registrations when it is collected


def _forward_shapes(query: Any, key: Any, value: Any, mask: Any, is_causal: bool) -> list[Any]:
    batch, heads, tokens, _ = query.shape
    out = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
    return [out, query.new_empty(batch, heads, tokens, dtype=torch.float32)]
