"""From an aten call to an :class:`Op`: one rule per family of operators.

A rule takes a recorded call and returns the op that stands for it, or None when no kind does; such a call is
costed by the bytes it moves. A custom operator that has the name of a kind with rows and columns is that kind.
``VERSION`` goes into the key of cached graphs: raise it with every change here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ...datasets.dtypes import itemsize
from ...datasets.ops import KINDS, Op, make_op
from .calls import Call, View
from .layout import contiguous_run, dtype_of, in_memory_order, numel, size_bytes, transposed, unique_numel

VERSION = 10

Rule = Callable[[Call], Op | None]
RULES: dict[str, Rule] = {}
MAY_BE_EMPTY: set[Rule] = set()
DECODE_QUERIES = 16  # at most this many queries against a longer cache are a step of generation

ARITHMETIC = """
    add sub rsub mul neg abs sign square relu clamp clamp_min clamp_max minimum maximum fmin fmax lerp addcmul where
    masked_fill threshold_backward hardtanh leaky_relu eq ne lt le gt ge isnan isinf isfinite logical_and logical_or
    logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor floor ceil round trunc tril triu cumsum
    sigmoid_backward tanh_backward hardtanh_backward leaky_relu_backward conj _conj_physical polar view_as_complex_copy
    bitwise_left_shift bitwise_right_shift native_dropout_backward copysign heaviside positive nan_to_num
"""
DIVISION = "div true_divide sqrt rsqrt reciprocal floor_divide remainder fmod addcdiv"
EXPONENTIAL = """
    exp exp2 expm1 log log2 log10 log1p sin cos tan tanh sigmoid silu silu_backward softplus softplus_backward
    log_sigmoid_forward log_sigmoid_backward erf erfc mish mish_backward elu elu_backward native_dropout bernoulli
    rand rand_like randn randn_like uniform normal exponential randint randperm logaddexp atan2 hardswish hardsigmoid
"""
FILL = """
    zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full fill zero scalar_tensor arange eye
    linspace
"""
OVERWRITING = frozenset(f"{name}_" for name in "copy zero fill uniform normal exponential bernoulli".split())
SUMS = "sum mean amax amin max min any all argmax argmin prod std var var_mean logsumexp norm linalg_vector_norm"
COPIES = """
    clone copy contiguous constant_pad_nd repeat flip roll _to_copy slice_scatter select_scatter expand_copy
    slice_backward select_backward
"""
SCATTERED = "gather scatter scatter_add index_copy index_fill index_add take_along_dim masked_scatter masked_select"
PREFILL = """
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable attention
"""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators by name, without namespace, overload or the underscore of in-place forms."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def may_be_empty(function: Rule) -> Rule:
    """Mark a rule for operators some of whose results may be empty: statistics that nobody asked for."""
    MAY_BE_EMPTY.add(function)
    return function


def to_op(call: Call) -> Op | None:
    """The op of a call, or None when no kind covers it."""
    namespace, _, name = call.name.partition(".")
    function = RULES.get(name) or RULES.get(name.removesuffix("_"))
    if function is None and namespace != "aten" and name in KINDS and KINDS[name].row_wise:
        function = _row_wise_op
    if function is None or (function not in MAY_BE_EMPTY and any(not numel(view) for view in call.outputs)):
        return None
    return function(call)


def bytes_moved(call: Call) -> int:
    """Bytes that a call reads and writes at the least: each distinct operand and result once."""
    results = set(call.outputs) | {view for view in call.inputs if view.storage in call.written}
    operands = {view for view in call.inputs if not overwrites(call, view)}
    return sum(map(size_bytes, operands)) + sum(map(size_bytes, results))


def overwrites(call: Call, view: View) -> bool:
    """Whether the call replaces the whole of an operand without reading it."""
    target = call.arguments.get("self", call.arguments.get("out"))
    return call.name.partition(".")[2] in OVERWRITING and view == target


def _first(call: Call) -> View:
    return call.inputs[0]


def _result(call: Call) -> View:
    """What the call makes, or the operand that it updates."""
    return call.outputs[0] if call.outputs else next(v for v in call.inputs if v.storage in call.written)


# --- matrix products -----------------------------------------------------------------------------------


def gemm_op(a: View, b: View, out: View) -> Op:
    """gemm of two (batches of) matrices, with the layout that their strides show.

    Aᵀ·Bᵀ, for which no layout has a name, is the transpose of B·A.
    """
    (m, k), n = a.shape[-2:], b.shape[-1]
    batch = math.prod(a.shape[:-2])
    flips = ("t" if transposed(a) else "n") + ("t" if transposed(b) else "n")
    if flips == "tt":
        m, n, flips = n, m, "nn"
    dtypes = {"dtype": dtype_of(a.dtype), "out_dtype": dtype_of(out.dtype)}
    return make_op("gemm", batch=batch, m=m, n=n, k=k, layout=flips, **dtypes)


def _flip(matrix: View) -> View:
    shape, stride = list(matrix.shape), list(matrix.stride)
    shape[-2:], stride[-2:] = shape[:-3:-1], stride[:-3:-1]
    return matrix._replace(shape=tuple(shape), stride=tuple(stride))


@rule("mm", "bmm", "_int_mm", "_scaled_mm")
def _mm(call: Call) -> Op | None:
    a, b = call.inputs[:2]
    return gemm_op(a, b, _result(call))


@rule("addmm", "baddbmm", "addbmm")
def _addmm(call: Call) -> Op | None:
    a, b = call.inputs[1:3]
    return gemm_op(a, b, _result(call))


@rule("linear", "mkldnn_linear", "_linear_pointwise")
def _linear(call: Call) -> Op | None:
    x, weight = call.inputs[:2]
    rows = x._replace(shape=(numel(x) // x.shape[-1], x.shape[-1]), stride=(x.shape[-1], 1))
    return gemm_op(rows, _flip(weight), _result(call))


@rule("mv")
def _mv(call: Call) -> Op | None:
    matrix, vector = call.inputs[:2]
    column = vector._replace(shape=(vector.shape[0], 1), stride=(1, 1))
    return gemm_op(matrix, column, _result(call))


@rule("_grouped_mm", "grouped_mm_fallback")
def _grouped(call: Call) -> Op | None:
    """Rows by experts' weights, or, where both are matrices, the weights' gradients."""
    a, b = call.inputs[:2]
    if len(a.shape) != 2:
        return gemm_op(a, b, _result(call))
    weight_gradient = len(b.shape) == 2
    experts = _result(call).shape[0] if weight_gradient else b.shape[0]
    tokens, k = (a.shape[1], a.shape[0]) if weight_gradient else a.shape
    layout = "tn" if weight_gradient else "nt" if transposed(b) else "nn"
    return make_op(
        "grouped_gemm",
        dtype=dtype_of(a.dtype),
        out_dtype=dtype_of(_result(call).dtype),
        experts=experts,
        tokens=tokens,
        n=b.shape[-1],
        k=k,
        imbalance=imbalance(call.groups),
        layout=layout,
    )


def imbalance(groups: tuple[int, ...]) -> int:
    """Rows of the busiest group over the mean, in percent; 100 when none could have fewer."""
    total = sum(groups)
    if not total or max(groups) == -(-total // len(groups)):
        return 100
    return max(100, round(100 * max(groups) * len(groups) / total))


# --- attention -----------------------------------------------------------------------------------------


def _attention_dims(call: Call) -> dict[str, Any]:
    """A single query sees every key: that is written causal=1, like the steps of generation it belongs to."""
    query, key, value = (call.arguments[name] for name in ("query", "key", "value"))
    masked = isinstance(call.arguments.get("attn_mask", call.arguments.get("attn_bias")), View)
    plain = int(bool(call.arguments.get("is_causal")) or (query.shape[2] == 1 and not masked))
    causal, window = call.attended or (plain, call.arguments.get("window") or 0)
    return {
        "dtype": dtype_of(query.dtype),
        "batch": query.shape[0],
        "heads_q": query.shape[1],
        "heads_kv": key.shape[1],
        "head_dim": query.shape[3],
        "v_head_dim": value.shape[3],
        "seq_q": query.shape[2],
        "seq_kv": key.shape[2],
        "causal": causal,
        "window": window,
    }


@rule(*PREFILL.split())
def _attention(call: Call) -> Op | None:
    dims = _attention_dims(call)
    decoding = dims["seq_q"] <= DECODE_QUERIES and dims["seq_q"] < dims["seq_kv"]
    return make_op("attention_decode" if decoding else "attention_prefill", **dims)


@rule(*(f"{name}_backward" for name in PREFILL.split()))
def _attention_backward(call: Call) -> Op | None:
    return make_op("attention_backward", **_attention_dims(call))


# --- rows ----------------------------------------------------------------------------------------------


def _rows(kind: str, x: View, cols: int, out: View) -> Op:
    return make_op(kind, dtype=dtype_of(x.dtype), out_dtype=dtype_of(out.dtype), rows=numel(x) // cols, cols=cols)


def _row_wise_op(call: Call) -> Op:
    """An operator that has the name of a kind of op: the rows are those of its result."""
    out, kind = _result(call), call.name.partition(".")[2]
    cols, dtypes = out.shape[-1], {"dtype": dtype_of(_first(call).dtype), "out_dtype": dtype_of(out.dtype)}
    return make_op(kind, rows=numel(out) // cols, cols=cols, **dtypes)


@rule("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def _norm(call: Call) -> Op | None:
    kind = "rms_norm" if "rms" in call.name else "layer_norm"
    return _rows(kind, _first(call), math.prod(call.arguments["normalized_shape"]), _result(call))


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def _norm_backward(call: Call) -> Op | None:
    kind = "rms_norm_backward" if "rms" in call.name else "layer_norm_backward"
    return _rows(kind, call.arguments["input"], math.prod(call.arguments["normalized_shape"]), call.outputs[0])


@rule("_softmax", "_safe_softmax", "_log_softmax", "softmax", "log_softmax")
@rule("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax(call: Call) -> Op | None:
    kind, x = "softmax_backward" if "backward" in call.name else "softmax", _first(call)
    return _rows(kind, x, x.shape[call.arguments["dim"]], _result(call))


@rule("gelu", "gelu_backward")
def _gelu(call: Call) -> Op | None:
    kind = "gelu_backward" if "backward" in call.name else "gelu"
    return _rows(kind, _first(call), _first(call).shape[-1], _result(call))


# --- elements ------------------------------------------------------------------------------------------


def elementwise_op(function: str, call: Call) -> Op:
    """elementwise of one cost class: operands of the result's size are read, smaller ones are broadcast.

    Broadcast operands count in the run: they, too, break the inner loop where they begin anew.
    """
    out = _result(call)
    operands = [v for v in call.inputs if len(v.shape) <= len(out.shape) and not overwrites(call, v)]
    full = [v for v in operands if v.shape == out.shape and unique_numel(v) == numel(v)]
    if not full and function != "fill":
        function = "fill"  # an outer product of axes: what is read is small beside what is written
    if function == "fill":
        full = operands = []
    widest = max(full, key=lambda v: itemsize(dtype_of(v.dtype)), default=out)
    return make_op(
        "elementwise",
        dtype=dtype_of(widest.dtype),
        out_dtype=dtype_of(out.dtype),
        numel=numel(out),
        inputs=len(full),
        fn=function,
        run=contiguous_run([out, *operands]),
    )


for _function, _names in (
    ("arithmetic", ARITHMETIC),
    ("division", DIVISION),
    ("exponential", EXPONENTIAL),
    ("fill", FILL),
):
    rule(*_names.split())(partial(elementwise_op, _function))


PLAIN_POWERS = dict.fromkeys((1, 2, 3), "arithmetic") | dict.fromkeys((0.5, -0.5, -1, -2), "division")


@rule("pow")
def _pow(call: Call) -> Op | None:
    """Squares and cubes are products, square roots and inverses divisions; only the rest are powers."""
    exponent = call.arguments.get("exponent")
    cost_class = PLAIN_POWERS.get(exponent) if isinstance(exponent, (int, float)) else None
    return elementwise_op(cost_class or "exponential", call)


@rule(*SUMS.split())
def _reduce(call: Call) -> Op | None:
    """The reduced axes as one: what lies outside them in memory is ``outer``, inside ``inner``."""
    x, out = _first(call), call.outputs[0]
    axes = call.arguments.get("dim")
    if axes is None or axes == ():
        axes = range(len(x.shape))
    reduced = {axis % max(len(x.shape), 1) for axis in ([axes] if isinstance(axes, int) else axes)}
    inner = 1
    for axis in reversed(in_memory_order(x)):
        if axis in reduced:
            break
        inner *= x.shape[axis]
    length = math.prod(x.shape[axis] for axis in reduced)
    outer = numel(x) // (length * inner)
    dtypes = {"dtype": dtype_of(x.dtype), "out_dtype": dtype_of(out.dtype)}
    return make_op("reduce", outer=outer, length=length, inner=inner, **dtypes)


@rule("sort", "argsort")
def _sort(call: Call) -> Op | None:
    """A merge sort goes through its keys log2(n) times."""
    x, out = _first(call), call.outputs[0]
    passes = max(1, math.ceil(math.log2(max(x.shape[call.arguments.get("dim", -1)] if x.shape else 1, 2))))
    dtypes = {"dtype": dtype_of(x.dtype), "out_dtype": dtype_of(out.dtype)}
    return make_op("elementwise", numel=numel(x) * passes, inputs=1, fn="arithmetic", **dtypes)


@rule("histc", "bincount", "nonzero", "_unique2")
def _scan(call: Call) -> Op | None:
    x = _first(call)
    return make_op("reduce", dtype=dtype_of(x.dtype), outer=1, length=max(numel(x), 1))


@rule("_local_scalar_dense")
def _item(call: Call) -> Op | None:
    """A number that Python waits for."""
    x = _first(call)
    return make_op("copy", dtype=dtype_of(x.dtype), size_bytes=size_bytes(x), direction="d2h")


# --- losses, tables, experts ---------------------------------------------------------------------------


@rule("nll_loss_forward", "nll_loss2d_forward")
def _nll(call: Call) -> Op | None:
    """One element of every row, far apart."""
    x = _first(call)
    rows = numel(x) // x.shape[-1]
    return make_op("elementwise", dtype=dtype_of(x.dtype), numel=rows, inputs=1, run=1 if rows > 1 else 0)


@rule("nll_loss_backward", "nll_loss2d_backward")
def _nll_backward(call: Call) -> Op | None:
    """Zeros everywhere but in one element of every row."""
    return elementwise_op("fill", call)


@rule("embedding")
def _embedding(call: Call) -> Op | None:
    table, indices = call.inputs[:2]
    return _lookup("embedding", table, numel(indices), table.shape[0], table.shape[1])


@rule("embedding_dense_backward")
def _embedding_backward(call: Call) -> Op | None:
    gradient, table = _first(call), call.outputs[0]
    return _lookup("embedding_backward", gradient, numel(gradient) // table.shape[1], table.shape[0], table.shape[1])


def _lookup(kind: str, x: View, tokens: int, vocab: int, hidden: int) -> Op:
    return make_op(kind, dtype=dtype_of(x.dtype), tokens=tokens, vocab=vocab, hidden=hidden)


@rule("topk")
def _topk(call: Call) -> Op | None:
    """The selection alone: a router's softmax and sum are calls of their own."""
    scores, out = _first(call), call.outputs[0]
    experts = scores.shape[-1]
    dtypes = {"dtype": dtype_of(scores.dtype), "out_dtype": dtype_of(out.dtype)}
    tokens, topk = numel(scores) // experts, out.shape[-1]
    return make_op("moe_route", tokens=tokens, experts=experts, topk=topk, kernels="topk", **dtypes)


@rule("index", "index_select")
def _index(call: Call) -> Op | None:
    """Whole rows by one index are a permutation to experts or a table lookup; single elements a slow copy."""
    x, out = _first(call), call.outputs[0]
    positions = call.arguments.get("indices", ())
    by_row = call.arguments.get("dim", 0) == 0 and sum(p is not None for p in positions) <= 1 and len(x.shape) > 1
    if not by_row or (positions and positions[0] is None):
        return _copy_elements(call)
    hidden = math.prod(x.shape[1:])
    rows, tokens = numel(out) // hidden, x.shape[0]
    if rows % tokens:
        return _lookup("embedding", x, rows, tokens, hidden)
    return make_op("moe_permute", dtype=dtype_of(x.dtype), tokens=tokens, hidden=hidden, topk=rows // tokens)


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def _index_put(call: Call) -> Op | None:
    """Rows added back where they came from; single elements by index are a slow copy."""
    table, rows, dtype = _first(call), call.arguments["values"], dtype_of(_first(call).dtype)
    count, width = numel(rows), math.prod(table.shape[1:])
    whole_rows = len(call.arguments["indices"]) == 1 and len(table.shape) > 1
    if whole_rows and count and count % numel(table) == 0:
        topk = count // numel(table)
        return make_op("moe_permute", dtype, tokens=table.shape[0], hidden=width, topk=topk, direction="unpermute")
    run = width if whole_rows else 1
    return make_op("elementwise", dtype, numel=max(count, 1), inputs=1, run=run if run < count else 0)


@rule(*SCATTERED.split())
def _copy_elements(call: Call) -> Op | None:
    """Single elements by index: as many as the smaller of what is read and written, none next to another."""
    index = call.arguments.get("index")
    out = index if isinstance(index, View) and numel(index) < numel(_result(call)) else _result(call)
    dtype = dtype_of(_first(call).dtype)
    return make_op("elementwise", dtype=dtype, numel=numel(out), inputs=1, run=1 if numel(out) > 1 else 0)


# --- copies --------------------------------------------------------------------------------------------


def copy_op(view: View, run: int, joins: int = 0) -> Op:
    """A copy of a view's bytes in contiguous runs of ``run`` elements, of so many parts with gaps."""
    size = itemsize(dtype_of(view.dtype))
    total_bytes, run_bytes = int(numel(view) * size), int(run * size)
    return make_op("copy", dtype_of(view.dtype), size_bytes=total_bytes, run_bytes=run_bytes, joins=joins)


@rule(*COPIES.split())
def _copy(call: Call) -> Op | None:
    """Same dtype: a copy in runs of what is read (a broadcast operand is written out like a fill)."""
    out = _result(call)
    source = call.arguments.get("src") if call.name.endswith("copy_") else _first(call)
    if not isinstance(source, View) or numel(source) == 1 < numel(out):
        return elementwise_op("fill", call)
    if source.dtype != out.dtype:
        return elementwise_op("cast", call)
    same = source.shape == out.shape
    return copy_op(out, contiguous_run([out, source]) if same else 0)


@rule("cat", "stack", "_cat")
def _cat(call: Call) -> Op | None:
    """Each part is copied in runs no longer than its own share of the joined axis.

    Where one of several parts is not contiguous, torch has a slower kernel for them (``joins``).
    """
    out = _result(call)
    axis = call.arguments.get("dim", 0) % len(out.shape)
    views = [view for view in call.inputs if numel(view)]
    if call.name.endswith("stack"):
        return copy_op(out, math.prod(out.shape[axis + 1 :]))
    shares = [math.prod(view.shape[axis:]) for view in views]
    runs = [contiguous_run([view]) or numel(view) for view in views]
    shortest = min(min(pair) for pair in zip(shares, runs, strict=True))
    gaps = len(views) > 1 and any(run < numel(view) for run, view in zip(runs, views, strict=True))
    joins = numel(out) // max(map(numel, views)) if gaps else 0
    return copy_op(out, 0 if shortest == numel(out) else shortest, joins)
