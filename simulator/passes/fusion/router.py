"""Routers on matrix units: products that a model writes in fp32, as Transformer Engine runs them.

DeepSeek's gates multiply in fp32 so that logits do not round. Megatron-Core's router takes the 16-bit operands with an
fp32 result in the forward pass, and TF32, which all fp32 products of Transformer Engine are, in the backward pass
(``RouterGatingLinearFunction``). Experts' outputs, weighted in fp32 by the model, are summed in their own 16 bits
there: the weights went into the activation before.
"""

from __future__ import annotations

import re

import numpy as np

from ...graph import Node
from ..rewriting.draft import Draft, Section

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
                short = _short(draft, section)
                op = op.replace(dtype=short, out_dtype=short) if short else op
            else:
                continue
            item.compute(op)
            changed = True
    return changed


def _before_cast(draft: Draft, node: Node, makers: dict[int, Node]) -> str:
    """The 16-bit dtype that a product's operands were cast from; empty where they were not."""
    sources = {draft.dtype(r) for t in node.reads if t in makers for r in makers[t].reads}
    return next(iter(sources & {"bf16", "fp16"}), "")


def _short(draft: Draft, section: Section) -> str:
    """The 16-bit dtype that experts multiply in, in this section; empty where they do not."""
    found = {
        item.node.op.dtype
        for item in section.items
        if item.node.op is not None and item.node.op.kind == "grouped_gemm" and EXPERTS.search(item.node.path)
    }
    return next(iter(found & {"bf16", "fp16"}), "")
