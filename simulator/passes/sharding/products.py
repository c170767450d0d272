"""What of every op is left to one tensor rank, and of products here: of Linears, forward and backward, heads, experts.

A weight cut by columns gives shared features and makes of its input's gradient a sum; one cut by rows makes sums of
shared features and gives their gradients as shares. Few heads of keys and values are held by several ranks.
"""

from __future__ import annotations

import re
from fractions import Fraction

from ....datasets.ops import Op
from ...graph import Node
from ..rewriting.split import share
from . import adapters
from .linears import Heads
from .shards import COLUMN, EXPERT_SUM, FEATURES, GRADIENT_SUM, REPLICATED, ROW, TABLE, TOKENS, VOCAB, WHOLE
from .sharing import Sharing
from .work import Limit, RankWork


def shared(sharing: Sharing, position: int, node: Node) -> RankWork:
    """One rank's share of a node, at a position of its section, whose operands are summed."""
    kind = node.kind
    if kind == "gemm":
        return _product(sharing, position, node)
    if kind in ("grouped_gemm", "fused_moe"):
        return _experts(sharing, node)
    return sharing.no_product(node)


def _product(sharing: Sharing, position: int, node: Node) -> RankWork:
    op, shards = node.work, sharing.shards
    weights = _weights(sharing, node, op)
    inputs = [t for t in node.reads if not shards.weight[t]]
    if not weights:
        sharing.note_sources(node)
        if op.batch == 1 and any(shards.thin[t] for t in inputs):
            return adapters.weight_gradient(sharing, node, op)
        return _batch(sharing, node, op) if op.batch > 1 else _weight_gradient(sharing, node, op, inputs)
    if node.source.startswith("fused.absorb"):
        return _absorb(sharing, node, op, weights)
    if node.phase == "backward":
        if shards.thin[weights[0]]:
            return adapters.input_gradient(sharing, node, op)
        return _input_gradient(sharing, node, op, weights, inputs)
    if any(shards.thin[t] for t in inputs):
        return adapters.second_product(sharing, node, op, weights)
    shared = next((t for t in inputs if shards.kind[t] == FEATURES), None)
    if shared is not None:
        sharing.limits[Limit(op.k, "features between two products")] = None
        sharing.cuts[_module(node)] = ROW
        return _rows(sharing, position, node, op, weights, shards.share(shared))
    cut = int(shards.cut[weights[0]])
    if not cut:
        cut, heads = sharing.flow.cut(position)
        _know(sharing, heads, op)
    sharing.cuts[_module(node)] = cut
    return _columns(sharing, node, op, weights, inputs, cut)


def _weights(sharing: Sharing, node: Node, op: Op) -> list[int]:
    """The weights that a product multiplies by, without its biases."""
    weights: list[int] = []
    total = 0
    weights_read = [t for t in node.reads if sharing.shards.weight[t]]
    for tensor in sorted(weights_read, key=lambda t: -int(sharing.shards.numel[t])):
        if total < op.n * op.k:
            weights.append(tensor)
            total += int(sharing.shards.numel[tensor])
    return weights


def _know(sharing: Sharing, heads: Heads | None, op: Op) -> None:
    """Learn from the heads that a product's columns belong to; few keys and values are held by several ranks."""
    if heads is None:
        return
    sharing.queries = heads.queries
    sharing.limits[Limit(heads.queries, "attention heads")] = None
    keys = key_heads(op.n, heads)
    if keys == heads.queries:
        return
    sharing.limits[Limit(keys, "heads of keys and values", few=True)] = None
    if keys < sharing.tp and sharing.tp % keys == 0:
        dims = heads.key_dim, heads.value_dim
        sharing.shards.widths |= {keys * dim: Fraction(keys) for dim in dims}
        if op.n > heads.queries * heads.key_dim:
            local = heads.queries * heads.key_dim // sharing.tp + sum(dims)
            sharing.shards.widths[op.n] = Fraction(op.n, local)


def _rows(sharing: Sharing, position: int, node: Node, op: Op, weights: list[int], parts: Fraction) -> RankWork:
    for weight in weights:
        sharing.cut(weight, ROW, FEATURES, parts)
    if sharing.exchange and sharing.flow.adapts(position):
        return adapters.first_product(sharing, node, op, parts)
    return sharing.summed(share(op, "k", parts, uneven=True), node, parts)


def _columns(sharing: Sharing, node: Node, op: Op, weights: list[int], inputs: list[int], cut: int) -> RankWork:
    shards = sharing.shards
    if cut == REPLICATED:
        for weight in weights:
            sharing.cut(weight, REPLICATED, WHOLE, 1)
        return sharing.by_tokens(node) if sharing.top(node) == TOKENS else RankWork(op)
    kind = VOCAB if cut == TABLE else FEATURES
    parts = Fraction(op.n, -(-op.n // sharing.tp)) if cut == TABLE else shards.widths.get(op.n, Fraction(sharing.tp))
    for tensor in node.reads:
        if not shards.weight[tensor]:
            continue
        rows = op.k if tensor in weights else 1
        shares = parts if cut == TABLE else shards.of_width(tensor, rows)
        sharing.cut(tensor, cut, kind, shares)
    for tensor in node.writes:
        shares = parts if cut == TABLE or len(node.writes) == 1 else shards.of_width(tensor, op.m)
        shards.mark(sharing.section, tensor, kind, shares, tensor in node.reads)
    gathers = sharing.to_gather(inputs)
    return RankWork(share(op, "n", parts, uneven=True), gathers, parts=parts)


def _input_gradient(sharing: Sharing, node: Node, op: Op, weights: list[int], inputs: list[int]) -> RankWork:
    shards = sharing.shards
    cut, parts = int(shards.cut[weights[0]]), shards.together(weights)
    if cut in (COLUMN, TABLE):
        return sharing.summed(share(op, "k", parts, uneven=True), node, parts)
    if cut == ROW:
        sharing.mark(node, parts)
        gathers = sharing.to_gather(inputs)
        return RankWork(share(op, "n", parts, uneven=True), gathers, parts=parts)
    return sharing.by_tokens(node) if sharing.top(node) == TOKENS else RankWork(op)


def _weight_gradient(sharing: Sharing, node: Node, op: Op, inputs: list[int]) -> RankWork:
    shards = sharing.shards
    cut = [t for t in inputs if shards.kind[t] >= FEATURES]
    if cut:
        parts = shards.together(cut)
        width = sum(int(shards.numel[t]) for t in cut) // op.k
        axis = "m" if (op.m == width != op.n) or (inputs[0] in cut and op.n != width) or op.m == op.n == width else "n"
        axis = "n" if op.m == op.n and inputs[0] not in cut else axis
        biases = _biases(sharing, node, op)
        unshared = biases if sharing.cuts.get(_module(node)) == ROW else set()
        for tensor in (t for t in node.writes if t not in unshared):
            rows = 1 if tensor in biases else op.n if axis == "m" else op.m
            shares = parts if len(node.writes) - len(biases) == 1 else shards.of_width(tensor, rows)
            shards.mark(sharing.section, tensor, int(shards.kind[cut[0]]), shares, tensor in node.reads)
        gathers = sharing.to_gather(inputs)
        return RankWork(share(op, axis, parts, uneven=True), gathers, parts=parts)
    if any(shards.kind[t] == TOKENS for t in inputs):
        shared = share(op, "tokens", sharing.tp, uneven=True)
        return RankWork(shared, pending=dict.fromkeys(node.writes, GRADIENT_SUM), parts=Fraction(sharing.tp))
    return RankWork(op)


def _biases(sharing: Sharing, node: Node, op: Op) -> set[int]:
    """What a product for weights' gradients makes besides: sums over tokens, the gradients of biases."""
    several, least = len(node.writes) > 1, 2 * max(op.m, op.n)
    return {t for t in node.writes if several and sharing.shards.numel[t] < least}


def _batch(sharing: Sharing, node: Node, op: Op) -> RankWork:
    """Products of heads: attention in the pieces that it is made of."""
    top = sharing.top(node)
    if top == TOKENS:
        return sharing.by_tokens(node)
    if top == WHOLE:
        return RankWork(op)
    sharing.mark(node, sharing.tp)
    gathers = sharing.to_gather(node.reads)
    return RankWork(share(op, "batch", sharing.tp, uneven=True), gathers, parts=Fraction(sharing.tp))


def _absorb(sharing: Sharing, node: Node, op: Op, weights: list[int]) -> RankWork:
    """Queries or results times each head's own part of a projection, as latent attention decodes."""
    sharing.limits[Limit(op.batch, "attention heads")] = None
    for weight in weights:
        sharing.cut(weight, COLUMN, FEATURES, sharing.tp)
    sharing.mark(node, sharing.tp)
    return RankWork(share(op, "batch", sharing.tp), parts=Fraction(sharing.tp))


def _experts(sharing: Sharing, node: Node) -> RankWork:
    """Experts' products: whole, on this rank's own tokens, or their inner width shared by expert-tensor ranks."""
    op, shards, degree = node.work, sharing.shards, sharing.expert_parts
    weights = [t for t in node.reads if shards.weight[t]]
    for tensor in (*weights, *(t for t in node.writes if sharing.draft.role(t) == "gradient")):
        sharing.expert[list(sharing.section.ids(tensor))] = True
    if degree == 1:
        local = sharing.top(node) == TOKENS
        if weights and local:
            return sharing.by_tokens(node)
        return RankWork(share(op, "tokens", sharing.tp, uneven=True) if local else op)
    if op.kind == "fused_moe":
        for weight in weights:
            sharing.cut(weight, COLUMN, FEATURES, degree)
        gathers = sharing.to_gather(node.reads)
        work = sharing.summed(share(op, "features", degree), node, Fraction(degree), EXPERT_SUM)
        return RankWork(work.op, gathers, work.pending, expert=True)
    if sharing.sequence and sharing.token_shares > 1:
        op = share(op, "tokens", sharing.token_shares, uneven=True)
    return _expert_product(sharing, node, op, weights, degree)


def _expert_product(sharing: Sharing, node: Node, op: Op, weights: list[int], degree: int) -> RankWork:
    shards, backward = sharing.shards, node.phase == "backward"
    inputs = [t for t in node.reads if t not in weights]
    cut = next((t for t in inputs if shards.kind[t] == FEATURES), None)
    gathers = tuple(t for t in inputs if shards.kind[t] == TOKENS and _rows_of(sharing, t, op))
    if not weights:
        axis = "k" if cut == inputs[0] else "n"
        sharing.mark(node, degree)
        return RankWork(share(op, axis, degree, uneven=True), gathers, parts=Fraction(degree), expert=True)
    if cut is not None:
        if not backward:
            sharing.limits[Limit(op.k, "features of an expert", "tp" if degree == sharing.tp else "etp")] = None
            sharing.cut(weights[0], ROW, FEATURES, degree)
        return sharing.summed(share(op, "k", degree, uneven=True), node, Fraction(degree), EXPERT_SUM)
    if not backward:
        sharing.cut(weights[0], COLUMN, FEATURES, degree)
        for bias in weights[1:]:
            sharing.cut(bias, COLUMN, FEATURES, degree)
    for tensor in node.writes:
        shards.mark(sharing.section, tensor, FEATURES, degree * sharing.token_shares if sharing.sequence else degree)
    return RankWork(share(op, "n", degree, uneven=True), gathers, parts=Fraction(degree), expert=True)


def _rows_of(sharing: Sharing, tensor: int, op: Op) -> bool:
    """Whether a tensor holds rows of an expert product, not the numbers of them."""
    return int(sharing.shards.numel[tensor]) >= min(op.n, op.k)


def _module(node: Node) -> str:
    """The module of a node, the same for all layers."""
    return re.sub(r"\d+", "*", node.path)


def key_heads(width: int, heads: Heads) -> int:
    """Heads of keys and values that a product of ``width`` columns makes, before any are repeated for attention."""
    queries = heads.queries * heads.key_dim
    if width == queries or not heads.key_dim:
        return heads.keys if heads.keys != heads.queries else heads.queries
    if width < queries:
        dim = heads.key_dim if width % heads.key_dim == 0 else heads.value_dim
        return width // dim if width % dim == 0 and heads.queries % (width // dim) == 0 else heads.queries
    keys, remainder = divmod(width - queries, heads.key_dim + heads.value_dim)
    return keys if keys and not remainder and heads.queries % keys == 0 else heads.queries
