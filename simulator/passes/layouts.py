"""Tensors that a framework lays out anew around attention and merged products, where a traced model has views.

``qkv``, as nanotron has it (``models/llama.py``, ``CausalSelfAttention.forward`` of a model without grouped queries):
what the merged product made is permuted into queries, keys and values, keys and values are joined, and permuted once
more for the rotary kernel. Backward, their gradients are joined where they were split, stacked, and permuted back.
``gate_up``: the gradients of the halves of a merged product are joined (torch's backward of a split).
"""

from __future__ import annotations

from ..graph import Graph, Node
from ..question.plan import Plan
from .rewriting.draft import Draft, Item, Section
from .rewriting.match import expand
from .rewriting.nodes import elementwise
from .sharding.attention import Attention, attention_of

NN = 0  # the layout of a product that makes the gradient of its input
MERGED = "fused.gate_up"  # the source of a merged product


def copy_layouts(graph: Graph, plan: Plan) -> Graph:
    """The graph with the copies that ``plan.stack.layouts`` names; the very same where it names none."""
    chosen = plan.stack.layouts
    if not chosen:
        return graph

    def with_copies(_: Section, item: Item) -> list[Item]:
        ahead, behind = _copies(item.node, chosen)
        return [*map(Item, ahead), item, *map(Item, behind)]

    draft = Draft(graph)
    expand(draft.sections, with_copies)
    return draft.graph()


def _copies(node: Node, chosen: tuple[str, ...]) -> tuple[list[Node], list[Node]]:
    """Copies before and after a node."""
    call = attention_of(node) if "qkv" in chosen else None
    if call is not None and call.op.kind == "attention_prefill":
        return [_copy(node, numel, node.reads) for numel in (_all(call), _keys(call), _keys(call))], []
    if call is not None and call.backward:
        return [], [_copy(node, numel, node.writes) for numel in (_keys(call), _all(call), _all(call))]
    op = node.op
    merged = op is not None and op.kind == "gemm" and node.source == MERGED and node.phase == "backward"
    if merged and op is not None and op.layout == NN and "gate_up" in chosen:
        return [_copy(node, op.m * op.k, node.reads)], []
    return [], []


def _keys(call: Attention) -> int:
    """Elements of keys and values."""
    return call.batch * call.seq_kv * call.heads_kv * (call.width_k + call.width_v)


def _all(call: Attention) -> int:
    """Elements of queries, keys and values."""
    return call.batch * call.seq_q * call.heads_q * call.width_k + _keys(call)


def _copy(near: Node, numel: int, tensors: tuple[int, ...]) -> Node:
    """One copy of so many elements, in the place of ``near``: what is copied lives no longer than before."""
    dtype = near.op.dtype if near.op is not None else "bf16"
    return elementwise("aten.copy_", numel, near, tensors, (), dtype)
