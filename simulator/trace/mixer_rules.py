"""Rules of :mod:`.aten` for the fused operators of linear and sparse attention (:mod:`.mixers`)."""

from __future__ import annotations

from typing import Any

from ...datasets.ops import Op, make_op
from .aten import DECODE_QUERIES, op_of, rule
from .calls import Call
from .layout import dtype_of, numel


@rule("linear_attention_prefill", "linear_attention_backward")
def _scan(call: Call) -> Op | None:
    key, value = call.arguments["key"], call.arguments["value"]
    kind = call.name.partition(".")[2]
    states = _states(call, key.shape, value.shape)
    return make_op(kind, **states, seq=value.shape[1], chunk=call.arguments["chunk"])


@rule("linear_attention_decode")
def _token(call: Call) -> Op | None:
    key, value = call.arguments["key"], call.arguments["value"]
    return make_op("linear_attention_decode", **_states(call, key.shape, value.shape))


def _states(call: Call, key: tuple[int, ...], value: tuple[int, ...]) -> dict[str, Any]:
    about = {"dtype": dtype_of(call.arguments["value"].dtype), "rule": call.arguments["rule"]}
    sizes = {"batch": value[0], "heads": value[-2], "groups": key[-2], "head_dim": value[-1], "state_dim": key[-1]}
    return about | sizes


@rule("causal_conv1d", "causal_conv1d_backward", "causal_conv1d_update")
def _convolution(call: Call) -> Op | None:
    """Rows are tokens, columns channels: x is [batch, channels, tokens]."""
    x, width = call.arguments["x"], call.arguments["weight"].shape[-1]
    cols = x.shape[1]
    sizes = {"dtype": dtype_of(x.dtype), "rows": numel(x) // cols, "cols": cols, "width": width}
    if call.name.endswith("backward"):
        return make_op("causal_conv1d_backward", **sizes)
    return make_op("causal_conv1d", **sizes, update=call.name.endswith("update"))


@rule("sparse_index")
def _index(call: Call) -> Op | None:
    query, key = call.arguments["query"], call.arguments["key"]
    batch, tokens, heads, width = query.shape
    sizes = {"batch": batch, "heads": heads, "head_dim": width, "seq_q": tokens, "seq_kv": key.shape[1]}
    kind = "sparse_index_decode" if _decoding(tokens, key.shape[1]) else "sparse_index_prefill"
    return op_of(kind, query, topk=call.arguments["topk"], **sizes)


@rule("sparse_attention", "sparse_attention_backward")
def _attention(call: Call) -> Op | None:
    query, key, value = (call.arguments[name] for name in ("query", "key", "value"))
    batch, heads, tokens, width = query.shape
    suffix = "decode" if _decoding(tokens, key.shape[2]) else "prefill"
    suffix = "backward" if call.name.endswith("backward") else suffix
    heads_of = {"heads_q": heads, "heads_kv": key.shape[1], "head_dim": width, "v_head_dim": value.shape[3]}
    sizes = {"batch": batch, "seq_q": tokens, "seq_kv": key.shape[2], "topk": call.arguments["topk"]}
    return op_of(f"sparse_attention_{suffix}", query, **heads_of, **sizes)


def _decoding(queries: int, keys: int) -> bool:
    """Whether so few queries against a longer cache are a step of generation."""
    return queries <= DECODE_QUERIES and queries < keys
