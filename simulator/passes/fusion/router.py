"""Routers on matrix units: products that a model writes in fp32, as Transformer Engine runs them.

DeepSeek's gates multiply in fp32 so that logits do not round. Megatron-Core's router takes the 16-bit operands with an
fp32 result in the forward pass, and TF32, which all fp32 products of Transformer Engine are, in the backward pass
(``RouterGatingLinearFunction``). Experts' outputs, weighted in fp32 by the model, are summed in their own 16 bits
there: the weights went into the activation before.
"""

from __future__ import annotations

import re

import numpy as np

from ....datasets.ops import make_op
from ...graph import Node
from ..rewriting.draft import Draft, Item, Section
from ..rewriting.match import find, insert
from ..rewriting.nodes import kernel

# Tensors of [tokens, experts] in fp32 that go through memory around the selections: forward a copy and its random
# numbers (forced balance), sigmoid, bias, mask, probabilities and map scattered into zeros, and the same once more for
# the loss that balances; backward the gradients of those
AROUND, AROUND_BACKWARD, SELECTIONS = 32, 12, 3

GATE = re.compile(r"(^|\.)(gate|router)(\.\w+)?$")
EXPERTS = re.compile(r"(^|\.)experts(\.|$)")


def on_matrix_units(draft: Draft, released: np.ndarray) -> bool:
    """Fp32 products of routers in 16 bits (forward) and TF32 (backward); rows of experts moved in 16 bits."""
    changed = False
    for section in draft.sections:
        makers = {t: item.node for item in section.items for t in item.node.writes}
        for item in section.items:
            op, node = item.node.op, item.node
            if op is None or op.dtype != "fp32" or node.phase not in ("forward", "backward"):
                continue
            if op.kind == "gemm" and GATE.search(node.path):
                short = _before_cast(draft, node, makers) if node.phase == "forward" else ""
                op = op.replace(dtype=short or "tf32", out_dtype="fp32")
            elif op.kind == "moe_permute" and EXPERTS.search(node.path):
                short = _expert_dtype(draft, section)
                op = op.replace(dtype=short, out_dtype=short) if short else op
            else:
                continue
            item.compute(op)
            changed = True
    return changed


def apart(draft: Draft, released: np.ndarray) -> bool:
    """Routers that rule ``moe`` made, in torch's own kernels (Megatron-Core without ``moe_router_fusion``).

    ``megatron/core/transformer/moe/moe_utils.py``: ``group_limited_topk`` selects twice, even of one group, and
    ``compute_routing_scores_for_aux_loss`` once more.
    """
    changed = False
    for section in draft.sections:
        for item in [gate for gate in section.items if GATE.search(gate.node.path)]:
            op, node = item.node.op, item.node
            if op is None or node.source != "fused.moe":
                continue
            if op.kind == "moe_route" and node.phase == "forward":
                chosen = op.replace(kernels="topk")
                added = [kernel(chosen, "aten.topk", node, node.writes, node.writes)] * SELECTIONS
                added.append(_move_scores(op.tokens * op.experts, AROUND, node))
            elif op.kind == "elementwise" and node.phase == "backward":
                added = [_move_scores(op.numel, AROUND_BACKWARD, node)]
            else:
                continue
            insert(section, section.place(item) + 1, map(Item, added))
            changed = True
    return changed


def _move_scores(numel: int, tensors: int, beside: Node) -> Node:
    op = make_op("elementwise", numel=numel, inputs=tensors - 1, dtype="fp32")
    return kernel(op, "fused.pointwise", beside, beside.writes, beside.writes)


def _before_cast(draft: Draft, node: Node, makers: dict[int, Node]) -> str:
    """The 16-bit dtype that a product's operands were cast from; empty where they were not."""
    sources = {draft.dtype(r) for t in node.reads if t in makers for r in makers[t].reads}
    return next(iter(sources & {"bf16", "fp16"}), "")


def _expert_dtype(draft: Draft, section: Section) -> str:
    """The 16-bit dtype that experts multiply in, in this section; empty where they do not."""
    products = [item.node for item in find(section, ("grouped_gemm",)) if EXPERTS.search(item.node.path)]
    dtypes = {node.work.dtype for node in products}
    return next(iter(dtypes & {"bf16", "fp16"}), "")
