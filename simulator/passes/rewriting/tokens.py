"""Who works on tokens: one rank's share of everything in a graph that grows with the length of sequences.

Found by dataflow. What is made from token ids, or as long as a sequence out of nothing (positions), goes along tokens;
so does what an op makes of it, unless the op sums over tokens (a weight's gradient). Weights, their gradients and the
optimizer's state never do.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from ....datasets.ops import KINDS, LAYOUT, Op
from ...graph import ACTIVATION, BUFFER, CACHE, INPUT, Node
from .draft import Draft, Item, Section
from .split import axes, share

ALONG = (ACTIVATION, INPUT, CACHE)
WHOLE = ("attention", "scan")  # purposes of ops that see all tokens of a sequence: others share them out


def share_tokens(draft: Draft, length: int, parts: int | Fraction) -> None:
    """Divide ops and tensors along tokens in place. Attention is left as it is; its tensors are divided.

    ``length`` is that of one sequence: whatever lies along tokens is a multiple of it. So are caches of a prompt's keys
    and values that an engine's attention fills by itself.
    """
    along = (draft.roles == INPUT) & (draft.elements(np.arange(len(draft.sizes))) % length == 0)
    for section, item in draft.walk():
        share_item(draft, section, item, along, length, parts)
        if item.node.op is not None and KINDS[item.node.op.kind].purpose in WHOLE:
            for tensor in item.node.reads:
                along[section.ids(tensor)] |= draft.roles[tensor] == CACHE
    share = 1 / Fraction(parts)
    draft.sizes[along] = -(-draft.sizes[along] * share.numerator // share.denominator)


def share_item(
    draft: Draft, section: Section, item: Item, along: np.ndarray, length: int, parts: int | Fraction
) -> None:
    """Divide a node's op along tokens, if it works on them, and note in ``along`` which of its tensors lie so.

    A fraction below one makes work grow. ``along`` flags tensors by id.
    """
    node, op = item.node, item.node.op
    if not _works_on_tokens(draft, node, along, length):
        return
    dim = token_dim(op, length) if op is not None else ""
    sees_all = op is not None and KINDS[op.kind].purpose in WHOLE
    if op is None:
        item.change(bytes_moved=int(node.bytes_moved / parts))
    elif dim and not sees_all:
        shared = share(op, dim, parts, uneven=isinstance(parts, Fraction))
        item.compute(shared)
    if op is None or dim or sees_all:
        for tensor in node.writes:
            if _lies_along(draft, tensor, op, length):
                along[section.ids(tensor)] = True


def token_dim(op: Op, length: int) -> str:
    """The dimension of an op that runs along tokens: a multiple of ``length``; empty when none is."""
    if op.kind == "reduce":
        candidates: tuple[str, ...] = ("outer", "length", "inner")
    else:
        candidates = axes(op).get("tokens", ())
    return next((dim for dim in candidates if getattr(op, dim) % length == 0), "")


def _works_on_tokens(draft: Draft, node: Node, along: np.ndarray, length: int) -> bool:
    """Whether a node reads something along tokens, or makes it out of constants alone."""
    if node.phase == "optimizer":
        return False
    if any(along[t] for t in node.touches):
        return True
    constant = all(draft.roles[t] == BUFFER for t in node.reads)
    return constant and node.op is not None and bool(token_dim(node.op, length))


def _lies_along(draft: Draft, tensor: int, op: Op | None, length: int) -> bool:
    if draft.roles[tensor] not in ALONG or (op is not None and _sums_over_tokens(op, length)):
        return False
    size = float(draft.elements(np.array([tensor]))[0])
    if op is not None and KINDS[op.kind].purpose == "norm" and KINDS[op.kind].backward and size < op.rows * op.cols:
        return False  # gradients of the norm's own weights
    return size >= length and size % length == 0


def _sums_over_tokens(op: Op, length: int) -> bool:
    if op.kind in ("gemm", "grouped_gemm"):
        return LAYOUT.choices[op.layout] == "tn"
    return op.kind == "embedding_backward" or (op.kind == "reduce" and op.outer == 1 and op.length % length == 0)
