"""Kernels of linear and sparse attention as single operators, as accelerators have them.

transformers names the functions that a kernel may replace (``mamba2_chunk_scan``, ``chunk_gated_delta_rule``, …) and
writes them out in plain operators, token by token or chunk by chunk. :func:`fused_mixers` puts an operator of shapes
alone in the place of each, in the modules whose classes a model has. What an indexer of sparse attention scores, and
attention to what it chose, become one operator each (:func:`index_sparsely`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from .model_caches import returned_cache

INDEXERS = (
    "DeepseekV32Indexer",
    "GlmMoeDsaIndexer",
)  # which choose tokens; others choose blocks or what stands for them
SPARSE = "opcast_sparse"  # transformers' name of an attention to chosen tokens


@contextmanager
def fused_mixers(model: nn.Module) -> Iterator[None]:
    """While inside, scans and short convolutions of the model's modules are one operator each."""
    homes = {
        id(home): home
        for submodule in model.modules()
        if (home := sys.modules.get(type(submodule).__module__)) is not None
    }
    patches = [(home, name) for home in homes.values() for name in REPLACED if name in vars(home)]
    before = [(home, name, vars(home)[name]) for home, name in patches]
    for home, name in patches:
        setattr(home, name, REPLACED[name])
    try:
        yield
    finally:
        for home, name, function in before:
            setattr(home, name, function)


# --- what transformers calls ------------------------------------------------------------------------------


def _chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803  (transformers' names)
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    chunk_size: int,
    D: torch.Tensor | None = None,  # noqa: N803
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """Mamba-2 over a prompt: [batch, tokens, heads, width] by C and B of [batch, tokens, groups, state]."""
    small = [parameter for parameter in (A, D, dt_bias) if parameter is not None]
    out, state = operators().linear_attention_prefill(
        C, B, hidden_states, dt, None, small, initial_states, chunk_size, "ssd"
    )
    return (out, state.transpose(2, 3)) if return_final_states else out


def _state_update(
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor | None = None,  # noqa: N803
    **_: Any,
) -> torch.Tensor:
    """One token of Mamba-2: the state of [batch, heads, width, state] is changed in place."""
    return operators().linear_attention_decode(C, B, hidden_states, dt, None, state, "ssd")


def _chunks_of(rule: str) -> Callable[..., Any]:
    """A delta rule over a prompt: queries and keys of [batch, tokens, groups, state], values of [.., heads, width]."""

    def chunked(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunk_size: int = 64,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        **_: Any,
    ) -> Any:
        out, state = operators().linear_attention_prefill(
            query, key, value, g, beta, [], initial_state, chunk_size, rule
        )
        return out, state if output_final_state else None

    return chunked


def _token_of(rule: str) -> Callable[..., Any]:
    """One token of a delta rule, whose state of [batch, heads, state, width] is changed in place."""

    def token(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        **_: Any,
    ) -> Any:
        flat = [tensor.squeeze(1) for tensor in (query, key, value, g)]
        out = operators().linear_attention_decode(*flat, beta.squeeze(1), initial_state, rule)
        return out.unsqueeze(1), initial_state

    return token


def _convolution(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """Channels [batch, channels, tokens], each convolved over the tokens before, and its activation."""
    return operators().causal_conv1d(hidden_states, weight, bias)


def _convolution_update(
    hidden_states: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """One token more of each channel, whose last tokens are kept in place."""
    return operators().causal_conv1d_update(hidden_states, conv_state, weight, bias)


REPLACED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "causal_conv1d_update": _convolution_update,
    "mamba2_chunk_scan": _chunk_scan,
    "mamba2_selective_state_update": _state_update,
    "torch_chunk_gated_delta_rule": _chunks_of("gated_delta"),
    "torch_recurrent_gated_delta_rule": _token_of("gated_delta"),
    "chunk_kimi_delta_attention": _chunks_of("kda"),
    "recurrent_kimi_delta_attention": _token_of("kda"),
}


# --- sparse attention --------------------------------------------------------------------------------------


def index_sparsely(model: nn.Module) -> None:
    """Have a model with indexers attend to what they choose, instead of to all tokens under a mask."""
    config: Any = getattr(model, "config", None)
    if not any(type(submodule).__name__ in INDEXERS for submodule in model.modules()):
        return
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(SPARSE, _attend_sparsely)
    ALL_MASK_ATTENTION_FUNCTIONS.register(SPARSE, _nothing_masked)
    config._attn_implementation = SPARSE


def _nothing_masked(*_: Any, batch_size: int = 1, **__: Any) -> torch.Tensor:
    """A mask without content: kernels know the positions of their tokens."""
    return torch.empty(batch_size, 1, 1, 1, dtype=torch.bool)


def _attend_sparsely(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    indices: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of [batch, heads, tokens, width] to chosen tokens; the result is [batch, tokens, heads, width]."""
    config: Any = module.config
    return operators().sparse_attention(query, key, value, indices, config.index_topk)[0], None


def choose_tokens(
    self: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    *_: Any,
    **arguments: Any,
) -> torch.Tensor:
    """An indexer's forward pass, with one operator from its queries and keys to the chosen tokens."""
    with torch.no_grad():
        home = sys.modules[type(self).__module__]
        rotate = getattr(home, "apply_rotary_pos_emb", None) or vars(home)["apply_rotary_pos_emb_interleave"]
        query = self.wq_b(q_resid).unflatten(2, (self.n_heads, self.head_dim))
        key = self.k_norm(self.wk(hidden_states)).unsqueeze(2)
        widths = [self.qk_rope_head_dim, self.head_dim - self.qk_rope_head_dim]
        (turned_q, plain_q), (turned_k, plain_k) = query.split(widths, dim=-1), key.split(widths, dim=-1)
        turned_q, turned_k = rotate(turned_q, turned_k, *position_embeddings, unsqueeze_dim=2)
        query, key = torch.cat([turned_q, plain_q], dim=-1), torch.cat([turned_k, plain_k], dim=-1).squeeze(2)
        if (kv_cache := returned_cache(arguments)) is not None:
            key = kv_cache.update_indexer(key, self.layer_idx)
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype))
        return operators().sparse_index(query, key, weights, self.index_topk)


# --- operators ---------------------------------------------------------------------------------------------

SCHEMAS = (
    "linear_attention_prefill(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta, Tensor[] small,"
    " Tensor? state, int chunk, str rule) -> Tensor[]",
    "linear_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta,"
    " Tensor[] small, Tensor? state, int chunk, str rule) -> Tensor[]",
    "linear_attention_decode(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta, Tensor(a!) state,"
    " str rule) -> Tensor",
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    "causal_conv1d_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias) -> Tensor[]",
    "causal_conv1d_update(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias) -> Tensor",
    "sparse_index(Tensor query, Tensor key, Tensor weights, int topk) -> Tensor",
    "sparse_attention(Tensor query, Tensor key, Tensor value, Tensor indices, int topk) -> Tensor[]",
    "sparse_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp,"
    " Tensor indices, int topk) -> Tensor[]",
)
_LIBRARIES: list[Any] = []  # a Library undoes its registrations when it is collected


@cache
def operators() -> Any:
    """Register the operators and their gradients: shapes only, nothing to compute. Returns their namespace."""
    library = torch.library.Library("opcast", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    shapes: dict[str, Callable[..., Any]] = {
        "linear_attention_prefill": _scanned,
        "linear_attention_backward": lambda grad, q, k, v, g, beta, small, *_: _alike(q, k, v, g, beta, *small),
        "linear_attention_decode": lambda q, k, v, *_: torch.empty_like(v),
        "causal_conv1d": lambda x, *_: torch.empty_like(x),
        "causal_conv1d_backward": lambda grad, x, weight, bias: _alike(x, weight, bias),
        "causal_conv1d_update": lambda x, *_: torch.empty_like(x),
        "sparse_index": lambda q, k, w, topk: q.new_empty(*q.shape[:2], min(topk, k.shape[1]), dtype=torch.int32),
        "sparse_attention": _attended,
        "sparse_attention_backward": lambda grad, q, k, v, *_: _alike(q, k, v),
    }
    for name, function in shapes.items():
        library._register_fake(name, function)
    ops = torch.ops.opcast
    _differentiate(library, "linear_attention_prefill", _save_scan, _scan_gradients)
    _differentiate(
        library,
        "causal_conv1d",
        lambda ctx, inputs, output: _save(ctx, *inputs),
        lambda ctx, grad: (*_fill(ops.causal_conv1d_backward(grad, *_saved(ctx)), _saved(ctx)),),
    )
    _differentiate(
        library,
        "sparse_attention",
        _save_choice,
        lambda ctx, grads: (*ops.sparse_attention_backward(grads[0], *_saved(ctx), ctx.topk), None, None),
    )
    _LIBRARIES.append(library)
    return ops


def _differentiate(library: Any, name: str, setup: Callable[..., None], backward: Callable[..., Any]) -> None:
    torch.library.register_autograd(f"opcast::{name}", backward, setup_context=setup, lib=library)


def _save(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """Keep tensors for backward, some of which may not be there. Nobody makes up gradients of what nobody reads."""
    ctx.set_materialize_grads(False)
    ctx.there = [tensor is not None for tensor in tensors]
    ctx.save_for_backward(*(tensor for tensor in tensors if tensor is not None))


def _saved(ctx: Any) -> list[torch.Tensor | None]:
    saved = iter(ctx.saved_tensors)
    return [next(saved) if there else None for there in ctx.there]


def _fill(gradients: list[torch.Tensor], inputs: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Gradients of the inputs that are there, in their places."""
    values = iter(gradients)
    return [None if value is None else next(values) for value in inputs]


def _save_choice(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, indices, ctx.topk = inputs
    _save(ctx, query, key, value, *output, indices)


def _save_scan(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, small, state, ctx.chunk, ctx.rule = inputs
    ctx.small = len(small)
    _save(ctx, *tensors, state, *small)


def _scan_gradients(ctx: Any, gradients: Any) -> Any:
    query, key, value, decay, beta, state, *small = _saved(ctx)
    inputs = [query, key, value, decay, beta]
    input_gradients = torch.ops.opcast.linear_attention_backward(
        gradients[0], *inputs, small, state, ctx.chunk, ctx.rule
    )
    first = _fill(input_gradients, inputs)
    return (*first, input_gradients[len(input_gradients) - ctx.small :], None, None, None)


def _alike(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors if tensor is not None]


def _scanned(query: Any, key: Any, value: Any, *_: Any) -> list[Any]:
    """The result, and the state of [batch, heads, state, width] in fp32."""
    batch, _, heads, width = value.shape
    state = value.new_empty(batch, heads, key.shape[-1], width, dtype=torch.float32)
    return [value.new_empty(value.shape), state]


def _attended(query: Any, key: Any, value: Any, *_: Any) -> list[Any]:
    batch, heads, tokens, _ = query.shape
    out = query.new_empty(batch, tokens, heads, value.shape[-1])
    return [out, query.new_empty(batch, heads, tokens, dtype=torch.float32)]
