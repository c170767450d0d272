"""Padding left out: kernels between attentions run over the tokens that are real, as EffectiveTransformer has it.

``options.real_tokens`` is their share of the batch. A fused attention runs over each sequence's own length, for
which the mean stands; attention in parts wants rectangles, so that padding comes back for its products and its softmax
(FasterTransformer, docs/bert_guide.md).
"""

from __future__ import annotations

from fractions import Fraction

from ..graph import Graph
from ..question.plan import Plan
from .rewriting.draft import Draft
from .rewriting.split import axes, share

AXES = ("tokens", "keys")


def remove_padding(graph: Graph, plan: Plan) -> Graph:
    """The graph of the real tokens alone."""
    real = plan.settings.real_tokens
    if real == 1:
        return graph
    parts = 1 / Fraction(real).limit_denominator(1 << 16)
    draft = Draft(graph)
    for _, item in draft.walk():
        op = item.node.op
        if op is None or item.node.source.startswith("unfused."):
            continue
        for axis in AXES:
            if axis in axes(op) and not (axis == "keys" and op.kind not in ("attention_prefill", "mla_prefill")):
                op = share(op, axis, parts, uneven=True)
        item.change(op=op, bytes_moved=int(op.cost.bytes))
    return draft.graph()
