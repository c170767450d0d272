"""Attention in parts, as frameworks ran it before FlashAttention: scores, a fused softmax, dropout, weighted sum.

Scores live in memory: per layer five bytes a (query, key, head) stay for the backward pass, the 5·a·s/h of Korthikanti
et al. (arXiv 2205.05198, eq. 1). Causal masks save no arithmetic: products are over all pairs. ``eager`` attention
scales and masks the scores by kernels of their own, as plain PyTorch code does. Its products, and those of
``transposed`` attention (FasterTransformer's), want each head in one piece: queries, keys and values are gathered by
head before them, and what comes out is put back by token (``torch.matmul`` and ``contiguous`` in transformers, which
gather the heads of a single sequence by a view; invokeAddQKVBiasTranspose and invokeTransposeQKV in FasterTransformer's
UnfusedAttentionLayer.cc). Megatron's products read heads where they lie.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...datasets.dtypes import itemsize
from ...datasets.ops import Op, make_op
from ..graph import NO_CALLS, Graph, Node
from ..question.plan import Plan, PlanError
from ..question.stack import FUSED
from .rewriting.draft import Draft, Item, Section
from .rewriting.lifetimes import free_after_last_use, freed_tensors
from .rewriting.match import expand
from .sharding.attention import Attention, attention_of

SCORE_KERNELS = {"unfused": 0, "transposed": 0, "eager": 2}  # between a product and its softmax: the scale, the mask
GATHERS = {"unfused": 0, "transposed": 1, "eager": 3}  # kernels that gather queries, keys and values by head


class Extra(NamedTuple):
    """Kernels that an attention in parts has beside its products and its softmax."""

    scores: int
    gathers: int


class Kept(NamedTuple):
    """What one forward attention leaves for its backward: softmax, dropout mask, what was dropped out."""

    softmax: int
    mask: int
    dropped: int


def unfuse_attention(graph: Graph, plan: Plan) -> Graph:
    """The graph with every fused attention in parts, where ``plan.stack.attention`` is no fused kernel.

    PlanError where context ranks train in a ring: it merges statistics that fused kernels alone give.
    """
    if plan.stack.attention in FUSED:
        return graph
    extra = Extra(SCORE_KERNELS[plan.stack.attention], GATHERS[plan.stack.attention])
    draft = Draft(graph)
    released = freed_tensors(draft)
    training = any(item.node.phase == "backward" for _, item in draft.walk())
    saved: dict[int, Kept] = {}  # by the id of the statistics that the fused kernel writes, in every repetition

    def in_parts(section: Section, item: Item) -> list[Item]:
        call = attention_of(item.node)
        if call is None or call.op.kind not in ("attention_prefill", "attention_backward"):
            return [item]
        if call.backward and plan.parallel.cp > 1 and len(item.node.writes) == 1:
            raise PlanError(
                f"parallel.cp_style={plan.parallel.cp_style} merges what fused attention gives, and "
                f"stack.attention={plan.stack.attention} is in parts; take parallel.cp_style=allgather or ulysses"
            )
        if call.backward:
            nodes = _backward(draft, section, item.node, call, _recall(saved, section, item.node), extra)
        else:
            nodes = _forward(draft, section, item.node, call, saved if training else None, extra)
        return [Item(node) for node in nodes]

    expand(draft.sections, in_parts)
    free_after_last_use(draft, released)
    return draft.graph()


def _forward(
    draft: Draft, section: Section, node: Node, call: Attention, saved: dict[int, Kept] | None, extra: Extra
) -> list[Node]:
    pairs, dtype = _pairs(call), call.op.dtype
    rows = make_op("softmax", rows=pairs // call.seq_kv, cols=call.seq_kv, dtype=dtype)
    query_key = _product(call, call.seq_q, call.seq_kv, call.width_k, "nt")
    weighted = _product(call, call.seq_q, call.width_v, call.seq_kv, "nn")
    gathers, inputs = _by_head(draft, section, node, call, extra.gathers)
    put_back, writes = _put_back(draft, section, node, call) if extra.gathers else ([], node.writes)
    scores, softmax = (draft.local(section, pairs * itemsize(dtype), dtype) for _ in range(2))
    attended, dropout = softmax, list[Node]()
    if saved is not None:  # else nothing is dropped out, nothing kept
        attended, mask = draft.local(section, pairs * itemsize(dtype), dtype), draft.local(section, pairs, "bool")
        dropout = [_node(node, _elements(pairs, 1, dtype), (softmax,), (attended, mask))]
        for index, statistics in enumerate(section.ids(node.writes[-1]).tolist()):
            saved[statistics] = Kept(softmax + index, mask + index, attended + index)
    return [
        *gathers,
        _node(node, query_key, inputs, (scores,)),
        *_scale_or_mask(node, call, scores, extra.scores),
        _node(node, rows, (scores,), (softmax,)),
        *dropout,
        _node(node, weighted, (attended, *inputs), writes),
        *put_back,
    ]


def _backward(draft: Draft, section: Section, node: Node, call: Attention, saved: Kept, extra: Extra) -> list[Node]:
    grad, inputs = node.reads[0], node.reads[1:]
    pairs, dtype = _pairs(call), call.op.dtype
    coming, scores = (draft.local(section, pairs * itemsize(dtype), dtype) for _ in range(2))
    rows = make_op("softmax_backward", rows=pairs // call.seq_kv, cols=call.seq_kv, dtype=dtype)
    gathers: list[Node] = []
    if extra.gathers and call.batch > 1:
        op = _elements(_width(call), 1, dtype)
        gathered = draft.local(section, op.numel * itemsize(dtype), dtype)
        gathers = [_node(node, op, (grad,), (gathered,), "by_head")]
        grad = gathered
    d_query, d_key, d_value = node.writes[0], node.writes[-2], node.writes[-1]  # fewer where one storage holds them
    numel = _inputs(call) // max(extra.gathers, 1)
    put_back = [
        _node(node, _elements(numel, 1, dtype), (gradient,), (gradient,), "put_back")
        for gradient in (d_query, d_key, d_value)[: extra.gathers]
    ]
    return [
        *gathers,
        _node(node, _product(call, call.seq_kv, call.width_v, call.seq_q, "tn"), (saved.dropped, grad), (d_value,)),
        _node(node, _product(call, call.seq_q, call.seq_kv, call.width_v, "nt"), (grad, *inputs), (coming,)),
        _node(node, _elements(pairs, 2, dtype), (coming, saved.mask), (coming,)),
        _node(node, rows, (saved.softmax, coming), (scores,)),
        *_scale_or_mask(node, call, scores, extra.scores),
        _node(node, _product(call, call.seq_q, call.width_k, call.seq_kv, "nn"), (scores, *inputs), (d_query,)),
        _node(node, _product(call, call.seq_kv, call.width_k, call.seq_q, "tn"), (scores, *inputs), (d_key,)),
        *put_back,
    ]


def _by_head(
    draft: Draft, section: Section, node: Node, call: Attention, kernels: int
) -> tuple[list[Node], tuple[int, ...]]:
    """Kernels that gather queries, keys and values by head, and the tensors that the products then read."""
    if not kernels or (call.batch == 1 and kernels > 1):
        return [], node.reads
    dtype, numel = call.op.dtype, _inputs(call) // kernels
    pieces = [draft.local(section, numel * itemsize(dtype), dtype) for _ in range(kernels)]
    gathers = [_node(node, _elements(numel, 1, dtype), node.reads, (piece,), "by_head") for piece in pieces]
    return gathers, tuple(pieces)


def _put_back(draft: Draft, section: Section, node: Node, call: Attention) -> tuple[list[Node], tuple[int, ...]]:
    """The kernel that puts what comes out back by token, and what the last product writes before it."""
    op = _elements(_width(call), 1, call.op.dtype)
    out = draft.local(section, op.numel * itemsize(call.op.dtype), call.op.dtype)
    return [_node(node, op, (out,), node.writes, "put_back")], (out, *node.writes[1:])


def _inputs(call: Attention) -> int:
    """Elements of queries, keys and values."""
    return round((call.q_bytes(call.seq_q) + call.kv_bytes(call.seq_kv)) / itemsize(call.op.dtype))


def _width(call: Attention) -> int:
    """Elements that come out."""
    return call.batch * call.seq_q * call.heads_q * call.width_v


def _scale_or_mask(node: Node, call: Attention, scores: int, times: int) -> list[Node]:
    """Kernels that scale or mask scores, or their gradients."""
    return [_node(node, _elements(_pairs(call), 1, call.op.dtype), (scores,), (scores,)) for _ in range(times)]


def _recall(saved: dict[int, Kept], section: Section, node: Node) -> Kept:
    """What the forward of this backward left, as ids of the section's first repetition, with their steps entered."""
    statistics = next(tensor for tensor in node.reads[::-1] if tensor in saved)
    ids = section.ids(statistics).tolist()
    first = saved[ids[0]]
    if len(ids) > 1:
        step = saved[ids[1]].softmax - first.softmax
        section.steps.update(dict.fromkeys(first, step))
    return first


def _pairs(call: Attention) -> int:
    """(query, key) pairs of all heads."""
    return call.batch * call.heads_q * call.seq_q * call.seq_kv


def _product(call: Attention, m: int, n: int, k: int, layout: str) -> Op:
    """A product per sequence and head."""
    return make_op("gemm", batch=call.batch * call.heads_q, m=m, n=n, k=k, layout=layout, dtype=call.op.dtype)


def _elements(pairs: int, inputs: int, dtype: str) -> Op:
    """Dropout, scale or mask of scores, or its gradient."""
    return make_op("elementwise", numel=pairs, inputs=inputs, dtype=dtype)


def _node(like: Node, op: Op, reads: tuple[int, ...], writes: tuple[int, ...], name: str = "") -> Node:
    """One kernel in the place of the fused one."""
    cost = op.cost
    moved, source = round(float(cost.read_bytes) + float(cost.write_bytes)), f"unfused.{name or op.kind}"
    return replace(like, op=op, source=source, reads=reads, writes=writes, bytes_moved=moved, frees=(), host=NO_CALLS)
