"""The kernels that fusion rules put in the place of nodes: functions from a match to an op, or to None to decline.

Dimensions come from what was matched: rows and columns of the mean inside a norm, the width of an activation, the sum
of the widths of merged products. A kernel that no kind of op describes better is ``elementwise`` over its largest
tensor, with as many inputs as make up the bytes that it truly reads.
"""

from __future__ import annotations

from ....datasets.ops import KINDS, Op, make_op
from ...graph import Node
from ..rewriting.draft import Draft
from .patterns import Match, matches_path

NORM = r"norm|(^|\.)ln(_|\.|$|\d)|layernorm"
HEADED = ("attention", "sparse_attention")  # kinds whose heads rotary embeddings turn


def row_wise(kind: str, match: Match) -> Op | None:
    """A row-wise kernel over the rows that a mean or sum of the match runs over."""
    means = [n.work for n in match.nodes if n.kind == "reduce" and n.work.inner == 1]
    rows = max(means, key=lambda op: op.outer * op.length, default=None)
    if rows is None:
        return None
    dtype, out_dtype = match.formats()
    return make_op(kind, rows=rows.outer, cols=rows.length, dtype=dtype, out_dtype=out_dtype)


def gated(kind: str, name: str, match: Match) -> Op | None:
    """An activation and its product with the gate's other half: an element of each row of node ``name``."""
    node = match.find(name)
    if node is None or node.kind != "elementwise":
        return None
    cols = node.work.run or _width(match)
    rows = max(node.work.numel // cols, 1)
    return make_op(kind, rows=rows, cols=node.work.numel // rows, dtype=node.work.dtype, out_dtype=node.work.out_dtype)


def _width(match: Match) -> int:
    """Elements of a row where the nodes do not say: those of one token, judged by the section's products."""
    ops = [i.node.op for i in match.section.items if i.node.op is not None]
    sizes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((op.m, op.k), (op.n, op.m, op.k)) for op in ops if op.kind == "gemm"
    ]
    sizes += [((op.tokens,), (op.n, op.k)) for op in ops if op.kind == "grouped_gemm"]
    numel = max(n.work.numel for n in match.nodes if n.kind == "elementwise")
    for heights, widths in sizes:
        for rows in heights:
            if numel % rows == 0 and numel // rows in widths:
                return numel // rows
    return numel


def rotary(match: Match) -> Op | None:
    """Queries and keys turned in one kernel; heads are counted by the elements that come out."""
    attention = next((i.node.work for i in match.section.items if i.node.kind.startswith(HEADED)), None)
    if attention is None:
        return None
    tokens, width = attention.batch * attention.seq_q, attention.head_dim
    turned = sum(match.elements(t) for t in match.results)
    dtype, out_dtype = match.formats()
    heads = max(turned // (tokens * width), 1)
    return make_op("rope", dtype, out_dtype, tokens=tokens, heads=heads, head_dim=width)


def loss(kind: str, name: str, match: Match) -> Op | None:
    node = match.find(name)
    if node is None or node.op is None:
        return None
    dtype, out_dtype = match.formats()
    dtype = out_dtype if kind.endswith("backward") else dtype
    return make_op(kind, tokens=node.op.rows, vocab=node.op.cols, dtype=dtype, out_dtype=dtype)


def merged(dim: str, match: Match) -> Op | None:
    """Products merged along one dimension; the others must agree."""
    products = [n.work for n in match.nodes if n.kind == "gemm"]
    if len(products) < 2:
        return None
    merged = products[0].replace(**{dim: sum(getattr(op, dim) for op in products)})
    same = all(op.replace(**{dim: getattr(merged, dim)}) == merged for op in products)
    return merged if same else None


def joint(match: Match) -> Op | None:
    """One pass over the largest tensor: every true input read once, every true output written once."""
    numel = max(match.elements(t) for t in (*match.inputs, *match.outputs))
    main = match.largest(match.results)
    if match.elements(main) * 2 <= numel:
        main = match.largest(match.inputs)
    numel, dtype, out_dtype = match.elements(main), *match.formats()
    sample = make_op("elementwise", numel=numel, inputs=1, dtype=dtype, out_dtype=out_dtype)
    one = sample.cost.read_bytes
    total = sum(int(match.draft.sizes[t]) for t in (*match.inputs, *match.outputs))
    return sample.replace(inputs=max(int((total - sample.cost.write_bytes) // one), 0))


def adds_residual(node: Node) -> bool:
    """Whether a node adds to the residual stream, outside of norms."""
    return node.source.endswith(("add", "add_")) and not matches_path(NORM, node.path)


def begins_norm(draft: Draft, node: Node) -> bool:
    """Whether one kernel for an add and the norm behind it can begin with a node: the add, or what weights become."""
    return adds_residual(node) or all(draft.role(t) in ("weight", "frozen") for t in node.reads)


def added_norm(match: Match) -> Op | None:
    """A norm that adds the residual stream on its way in (forward) or out (backward): nothing else hangs on it."""
    norms = [n.op for n in match.nodes if n.op is not None and KINDS[n.op.kind].purpose == "norm"]
    backward = match.nodes[0].phase == "backward"
    inner = norms[0] if norms else row_wise("rms_norm_backward" if backward else "rms_norm", match)
    carried = any(t in match.outputs for t in match.inputs) if backward else any(map(adds_residual, match.nodes))
    if inner is None or len(norms) > 1 or not carried:
        return None
    return joint(match)


def activation(direction: str, match: Match) -> Op | None:
    """GELU in one kernel, or, where a second full-size input is multiplied in, a gated one (GeGLU)."""
    if not any(matches_path("tanh|gelu|erf|relu", n.source) for n in match.nodes):
        return None
    main = match.largest(match.results)
    size = match.elements(main)
    cols = _width(match) if match.find("elementwise") else size
    wide = [t for t in match.inputs if match.elements(t) >= size]
    rows = max(size // cols, 1)
    gated = len(wide) > (2 if direction else 1)
    dtype, out_dtype = match.formats()
    kind = ("silu_mul" if gated else "gelu") + direction
    return make_op(kind, rows=rows, cols=size // rows, dtype=dtype, out_dtype=out_dtype)


def epilogue(match: Match) -> Op | None:
    """The one product of the match, whose epilogue adds or sums a bias."""
    products = [n for n in match.nodes if n.kind == "gemm"]
    if len(products) != 1:
        return None
    extra = [t for t in match.inputs if t not in products[0].reads]
    result = max(match.elements(t) for t in products[0].writes)
    return products[0].op if all(match.elements(t) * 16 <= result for t in extra) else None


def route(match: Match) -> Op | None:
    """Scores to chosen experts and their weights: experts of the widest choice, k of the last."""
    choices = [n.work for n in match.nodes if n.kind == "moe_route"]
    if not choices:
        return None
    return choices[-1].replace(experts=max(op.experts for op in choices), kernels="fused")


def permute(match: Match) -> Op | None:
    """Rows to experts or back: by which side of the kernel is as wide as all copies."""
    moves = [n.work for n in match.nodes if n.kind == "moe_permute"]
    if not moves:
        return None
    move = max(moves, key=lambda op: op.tokens * op.topk * op.hidden)
    copies, hidden = move.tokens * move.topk, move.hidden
    into = max(match.elements(t) for t in match.inputs) // hidden
    out = max(match.elements(t) for t in match.results) // hidden
    tokens, direction = (into, "permute") if out >= copies > into else (out, "unpermute")
    if not tokens or copies % tokens:
        return move
    return move.replace(tokens=tokens, topk=copies // tokens, direction=direction)
