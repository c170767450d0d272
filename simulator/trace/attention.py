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
    windows: dict[int, int] = {}

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
        window = windows.get(id(attn_mask), 0)
        if torch.is_autocast_enabled("cpu"):  # attention is a product
            query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
        return operator(query, key, value, None if window else attn_mask, is_causal or bool(window), window)[0]

    functional.scaled_dot_product_attention = attention
    try:
        with _without_copies_and_masks(windows):
            yield
    finally:
        functional.scaled_dot_product_attention = original


@contextmanager
def _without_copies_and_masks(windows: dict[int, int]) -> Iterator[None]:
    """While inside, transformers shares key and value heads without copies and tells windows without writing masks.

    ``windows`` gets the window of every mask that stands for one, by the identity of a tensor without content.
    """
    try:
        from transformers.integrations import sdpa_attention
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    except ImportError:
        yield
        return
    module: Any = sdpa_attention
    original, masks = module.use_gqa_in_sdpa, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    module.use_gqa_in_sdpa = lambda *_: True
    ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = _mark_windows(masks, windows)
    try:
        yield
    finally:
        module.use_gqa_in_sdpa = original
        del ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]


def _mark_windows(masks: Any, windows: dict[int, int]) -> Any:
    """``masks`` as it is, but for prompts longer than a local window. A chunk sees half its size on average."""
    placeholders = []

    def mask(*args: Any, local_size: int | None = None, config: Any = None, **arguments: Any) -> Any:
        size = 0 if args or local_size is None or arguments.get("attention_mask") is not None else local_size
        if not size or arguments["q_length"] == 1 or arguments["kv_length"] <= size:
            return masks(*args, local_size=local_size, config=config, **arguments)
        chunked = getattr(config, "attention_chunk_size", None) == size
        placeholder = torch.empty(1, 1, 1, 1, dtype=torch.bool)
        placeholders.append(placeholder)
        windows[id(placeholder)] = (size + 1) // 2 if chunked else size
        return placeholder

    return mask


@cache
def _operator() -> Any:
    """Register ``opcast::attention`` and its gradient: shapes only, nothing to compute."""
    library = torch.library.Library("opcast", "FRAGMENT")
    library.define(
        "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, int window) -> Tensor[]"
    )
    library.define(
        "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp,"
        " Tensor? attn_mask, bool is_causal, int window) -> Tensor[]"
    )
    forward, backward = torch.ops.opcast.attention, torch.ops.opcast.attention_backward

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        query, key, value, mask, ctx.is_causal, ctx.window = inputs
        ctx.save_for_backward(query, key, value, *output, *([] if mask is None else [mask]))

    def differentiate(ctx: Any, gradients: Any) -> Any:
        *saved, mask = (*ctx.saved_tensors, None)[:6]
        return (*backward(gradients[0], *saved[:5], mask, ctx.is_causal, ctx.window), None, None, None)

    library._register_fake("attention", _forward_shapes)
    library._register_fake("attention_backward", lambda grad, q, k, v, *_: [torch.empty_like(x) for x in (q, k, v)])
    torch.library.register_autograd("opcast::attention", differentiate, setup_context=setup, lib=library)
    _LIBRARIES.append(library)
    return forward


_LIBRARIES: list[Any] = []  # a Library undoes its registrations when it is collected


def _forward_shapes(query: Any, key: Any, value: Any, mask: Any, is_causal: bool, window: int) -> list[Any]:
    batch, heads, tokens, _ = query.shape
    out = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
    return [out, query.new_empty(batch, heads, tokens, dtype=torch.float32)]
