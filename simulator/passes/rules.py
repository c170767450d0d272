"""The fusion rules that come along, by name, in the order they are applied.

What a framework runs as one kernel is listed in its ``conf/stack`` file. Megatron-LM and Transformer Engine fuse norms,
rotary embedding, SwiGLU, the loss, and merge products that share an input; compilers fuse whatever is pointwise.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from ...datasets.ops import Op, make_op
from ..plan import PlanError
from .bookkeeping import accumulate, compute_once, skip_fills
from .custom import load
from .patterns import Match, Pattern, Rule, matches_path

ADDS = ("add", "add_")
POINTWISE = (
    *("_to_copy", "pow", "mul", "mul_", "add", "add_", "sub", "sub_", "rsub", "neg", "div", "div_", "rsqrt", "sqrt"),
    *("exp", "tanh", "sigmoid", "silu", "gelu", "relu", "silu_backward", "gelu_backward", "tanh_backward"),
    *("sigmoid_backward", "threshold_backward", "clone", "copy_", "copy", "cat", "where", "masked_fill", "fill"),
    *("slice_backward", "clamp", "clamp_min", "reciprocal", "square", "native_dropout", "native_dropout_backward"),
)
REDUCTIONS = ("mean", "sum", "var", "amax", "linalg_vector_norm")
NORM = r"norm|(^|\.)ln(_|\.|$|\d)|layernorm"
NORM_OR_LAYER = rf"{NORM}|(^|\.)\d+$"
COMPILED = (
    *(*POINTWISE, *REDUCTIONS, "tanh", "pow", "_softmax", "_log_softmax", "_softmax_backward_data"),
    *("_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "bernoulli_", "ones_like", "zeros_like"),
    *("native_layer_norm", "native_layer_norm_backward", "embedding", "constant_pad_nd", "le", "gt", "ne", "eq"),
)
MLP = r"mlp|ffn|feed_forward|expert"


# --- kernels: from a match to an op ----------------------------------------------------------------------


def _rows(kind: str) -> Callable[[Match], Op | None]:
    """A row-wise kernel over the rows that a mean or sum of the match runs over."""

    def kernel(match: Match) -> Op | None:
        means = [n.op for n in match.nodes if n.op is not None and n.op.kind == "reduce" and n.op.inner == 1]
        rows = max(means, key=lambda op: op.outer * op.length, default=None)
        if rows is None:
            return None
        dtype, out_dtype = match.formats()
        return make_op(kind, rows=rows.outer, cols=rows.length, dtype=dtype, out_dtype=out_dtype)

    return kernel


def _gated(kind: str, whole: str) -> Callable[[Match], Op | None]:
    """An activation and its product with the gate's other half: one element of every row of ``whole``'s."""

    def kernel(match: Match) -> Op | None:
        node = match.find(whole)
        if node is None or node.op is None or node.op.kind != "elementwise":
            return None
        cols = node.op.run or _width(match)
        rows = max(node.op.numel // cols, 1)
        return make_op(kind, rows=rows, cols=node.op.numel // rows, dtype=node.op.dtype, out_dtype=node.op.out_dtype)

    return kernel


def _width(match: Match) -> int:
    """Elements of a row where the nodes do not say: those of one token, judged by the section's products."""
    gemms = [i.node.op for i in match.section.items if i.node.op is not None and i.node.op.kind == "gemm"]
    numel = max(n.op.numel for n in match.nodes if n.op is not None and n.op.kind == "elementwise")
    for op in gemms:
        for rows in (op.m, op.k):
            if numel % rows == 0 and numel // rows in (op.n, op.m, op.k):
                return numel // rows
    return numel


def _rope(match: Match) -> Op | None:
    """Queries and keys turned in one kernel; heads are counted by the elements that come out."""
    attention = next(
        (i.node.op for i in match.section.items if i.node.op is not None and i.node.op.kind.startswith("attention")),
        None,
    )
    if attention is None:
        return None
    tokens, width = attention.batch * attention.seq_q, attention.head_dim
    turned = sum(match.elements(t) for t in match.results)
    dtype, out_dtype = match.formats()
    return make_op(
        "rope",
        tokens=tokens,
        heads=max(turned // (tokens * width), 1),
        head_dim=width,
        dtype=dtype,
        out_dtype=out_dtype,
    )


def _loss(kind: str, part: str) -> Callable[[Match], Op | None]:
    def kernel(match: Match) -> Op | None:
        node = match.find(part)
        if node is None or node.op is None:
            return None
        dtype, made = match.formats()
        dtype = made if kind.endswith("backward") else dtype
        return make_op(kind, tokens=node.op.rows, vocab=node.op.cols, dtype=dtype, out_dtype=dtype)

    return kernel


def _merged(dim: str) -> Callable[[Match], Op | None]:
    """Products merged along one dimension; the others must agree."""

    def kernel(match: Match) -> Op | None:
        products = [n.op for n in match.nodes if n.op is not None and n.op.kind == "gemm"]
        if len(products) < 2:
            return None
        merged = products[0].replace(**{dim: sum(getattr(op, dim) for op in products)})
        same = all(op.replace(**{dim: getattr(merged, dim)}) == merged for op in products)
        return merged if same else None

    return kernel


def _joint(match: Match) -> Op | None:
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


def _added_norm(match: Match) -> Op | None:
    """A norm that adds the residual stream on its way in (forward) or out (backward): nothing else hangs on it."""
    norms = [n.op for n in match.nodes if n.op is not None and "norm" in n.op.kind]
    adds = [n for n in match.nodes if n.source.endswith(("add", "add_")) and not matches_path(NORM, n.path)]
    backward = match.nodes[0].phase == "backward"
    inner = norms[0] if norms else _rows("rms_norm_backward" if backward else "rms_norm")(match)
    if inner is None or len(norms) > 1 or not (adds or backward):
        return None
    return _joint(match)


def _activation(direction: str) -> Callable[[Match], Op | None]:
    """GELU in one kernel, or, where a second full-size input is multiplied in, a gated one (GeGLU)."""

    def kernel(match: Match) -> Op | None:
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

    return kernel


def _epilogue(match: Match) -> Op | None:
    """The one product of the match, whose epilogue adds or sums a bias."""
    products = [n for n in match.nodes if n.op is not None and n.op.kind == "gemm"]
    if len(products) != 1:
        return None
    extra = [t for t in match.inputs if t not in products[0].reads]
    result = max(match.elements(t) for t in products[0].writes)
    return products[0].op if all(match.elements(t) * 16 <= result for t in extra) else None


def _route(match: Match) -> Op | None:
    """Scores to chosen experts and their weights: experts of the widest choice, k of the last."""
    choices = [n.op for n in match.nodes if n.op is not None and n.op.kind == "moe_route"]
    if not choices:
        return None
    return choices[-1].replace(experts=max(op.experts for op in choices))


def _permute(match: Match) -> Op | None:
    """Rows to experts or back: by which side of the kernel is as wide as all copies."""
    moves = [n.op for n in match.nodes if n.op is not None and n.op.kind == "moe_permute"]
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


# --- the rules -------------------------------------------------------------------------------------------


def _merge(name: str, path: str) -> Rule:
    return Rule(
        name,
        (
            Pattern(("gemm.nt",), _merged("n"), path=path, siblings=True),
            Pattern(("gemm.nn", *ADDS), _merged("k"), ("gemm.nn",), path, "backward"),
            Pattern(("gemm.tn",), _merged("m"), path=path, phase="backward", siblings=True),
        ),
        remakes=False,
    )


def _cross_entropy(name: str, casts: tuple[str, ...], in_place: bool) -> Rule:
    ahead = (*casts, "_log_softmax", "nll_loss_forward")
    back = ("nll_loss_backward", "_log_softmax_backward_data", *casts)
    forward = Pattern(ahead, _loss("cross_entropy", "_log_softmax"), ("_log_softmax", "nll_loss_forward"))
    backward = Pattern(
        back,
        _loss("cross_entropy_backward", "_log_softmax_backward_data"),
        ("_log_softmax_backward_data", "nll_loss_backward"),
        phase="backward",
        in_place=in_place,
    )
    return Rule(name, (forward, backward), lets_go=True)


TURNS = (*POINTWISE, "sum", "zeros_like", "new_zeros")
NORM_MEMBERS = (*POINTWISE, *REDUCTIONS)
ACTIVATION = (
    "mul",
    "pow",
    "add",
    "add_",
    "tanh",
    "gelu",
    "erf",
    "tanh_backward",
    "gelu_backward",
    "cat",
    "relu",
    "_to_copy",
)
DROPOUT = ("bernoulli_", "div_", "mul", *ADDS, "native_dropout", "native_dropout_backward")
ROUTER = (
    *NORM_MEMBERS,
    "_softmax",
    "_softmax_backward_data",
    "bitwise_not",
    "topk",
    "gather",
    "scatter",
    "scatter_",
    "new_zeros",
    "zeros_like",
    "zeros",
    "scatter_add_",
)
SORTS = (
    "sort",
    "argsort",
    "floor_divide",
    "index",
    "_to_copy",
    "histc",
    "bincount",
    "cumsum",
    "arange",
    "clone",
    "expand",
)
PERMUTE = (
    *SORTS,
    "index_put_",
    "_index_put_impl_",
    "new_zeros",
    "mul",
    "sum",
    "index_add_",
    "zeros_like",
    "div",
    "view",
)
GATES = r"(gate|router)(\.\w+)?$"


def _both(
    forward: tuple[tuple[str, ...], Callable[[Match], Op | None], tuple[str, ...]],
    backward: tuple[tuple[str, ...], Callable[[Match], Op | None], tuple[str, ...]],
    **settings: object,
) -> tuple[Pattern, Pattern]:
    """A pattern for each direction, otherwise alike."""
    ahead = Pattern(*forward, **settings)  # type: ignore[arg-type]
    return ahead, Pattern(*backward, phase="backward", **settings)  # type: ignore[arg-type]


SHIPPED: tuple[Rule, ...] = (
    Rule("int_bookkeeping", rewrite=compute_once),
    Rule("zero_fill", rewrite=skip_fills),
    Rule("gradient_accumulation", rewrite=accumulate),
    Rule(
        "add_norm",
        _both(
            ((*NORM_MEMBERS, "native_layer_norm"), _added_norm, ("add",)),
            ((*NORM_MEMBERS, "native_layer_norm_backward"), _added_norm, ("add_",)),
            path=NORM_OR_LAYER,
            grow=True,
            siblings=True,
            updates=True,
        ),
    ),
    Rule(
        "rms_norm",
        _both(
            (NORM_MEMBERS, _rows("rms_norm"), ("rsqrt", "mean")),
            (NORM_MEMBERS, _rows("rms_norm_backward"), ("sum",)),
            path=NORM,
            siblings=True,
            module=True,
        ),
    ),
    Rule(
        "layer_norm",
        _both(
            (NORM_MEMBERS, _rows("layer_norm"), ("sub", "mean")),
            (NORM_MEMBERS, _rows("layer_norm_backward"), ("sum",)),
            path=NORM,
            siblings=True,
            module=True,
        ),
    ),
    Rule(
        "silu_mul",
        _both(
            (("silu", "mul"), _gated("silu_mul", "silu"), ("silu", "mul")),
            (("silu_backward", "mul", "cat"), _gated("silu_mul_backward", "silu_backward"), ("silu_backward", "mul")),
            path=MLP,
            siblings=True,
        ),
    ),
    Rule(
        "gelu",
        _both((ACTIVATION, _activation(""), ()), (ACTIVATION, _activation("_backward"), ()), path=MLP, siblings=True),
    ),
    Rule(
        "rope",
        _both(
            (TURNS, _rope, ("mul",)),
            (TURNS, _rope, ("mul",)),
            path=r"attn|attention",
            siblings=True,
            module=True,
            grow=True,
            reads=r"rotary|rope",
        ),
    ),
    Rule(
        "softcap",
        _both(
            (("div", "tanh", "mul"), _joint, ("tanh",)),
            (("div", "tanh_backward", "mul"), _joint, ("tanh_backward",)),
            grow=True,
        ),
    ),
    Rule(
        "dropout_add",
        _both(
            (DROPOUT, _joint, ("mul",)), (DROPOUT, _joint, ("mul",)), path="drop|^[^.]*(\\.[^.]*)*\\.\\d+$", grow=True
        ),
    ),
    Rule(
        "moe",
        (
            *_both((ROUTER, _route, ("topk",)), (ROUTER, _joint, ()), path=GATES, siblings=True, grow=True),
            *_both(
                (PERMUTE, _permute, ()), (PERMUTE, _permute, ()), path="expert", siblings=True, grow=True, updates=True
            ),
        ),
        remakes=False,
    ),
    _cross_entropy("cross_entropy", ("_to_copy",), False),
    _cross_entropy("cross_entropy_in_place", ("_to_copy",), True),
    _cross_entropy("cross_entropy_fp32", (), True),
    Rule(
        "bias",
        (
            Pattern(("gemm.nt", "gemm.nn", *ADDS), _epilogue, ADDS[1:], module=True),
            Pattern(("gemm.tn", "sum"), _epilogue, ("gemm.tn", "sum"), phase="backward", siblings=True, module=True),
        ),
        remakes=False,
    ),
    _merge("qkv", r"\.(q|k|v|query|key|value)(_proj|_lin)?$"),
    _merge("gate_up", r"\.(gate_proj|up_proj|w1|w3)$"),
    Rule("pointwise", _both((COMPILED, _joint, ()), (COMPILED, _joint, ()), grow=True, siblings=True, updates=True)),
)


def rules_named(names: Iterable[str]) -> tuple[Rule, ...]:
    """Rules by name: the user's own (``module:function``) first, then the shipped ones in their order.

    PlanError names a rule that does not exist and the nearest one that does.
    """
    known = {rule.name: rule for rule in SHIPPED}
    own: list[Rule] = []
    wanted = set()
    for name in names:
        if ":" in name:
            made = load(name, "fusion rule")()
            own += [made] if isinstance(made, Rule) else list(made)
        elif name in known:
            wanted.add(name)
        else:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise PlanError(f"stack.fusion: no rule {name!r}; {hint}")
    return (*own, *(rule for rule in SHIPPED if rule.name in wanted))
