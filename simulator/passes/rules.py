"""The fusion rules that come along, by name, in the order they are applied.

What a framework runs as one kernel is listed in its ``conf/stack`` file. Megatron-LM and Transformer Engine fuse norms,
rotary embedding, SwiGLU, the loss, and merge products that share an input; compilers fuse whatever is pointwise.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from ...datasets.ops import Op, make_op
from ..plan import PlanError
from .custom import load
from .patterns import Match, Pattern, Rule

ADDS = ("add", "add_")
POINTWISE = (
    *("_to_copy", "pow", "mul", "mul_", "add", "add_", "sub", "sub_", "rsub", "neg", "div", "div_", "rsqrt", "sqrt"),
    *("exp", "tanh", "sigmoid", "silu", "gelu", "relu", "silu_backward", "gelu_backward", "tanh_backward"),
    *("sigmoid_backward", "threshold_backward", "clone", "copy_", "copy", "cat", "where", "masked_fill", "fill"),
    *("slice_backward", "clamp", "clamp_min", "reciprocal", "square", "native_dropout", "native_dropout_backward"),
)
REDUCTIONS = ("mean", "sum", "var", "amax", "linalg_vector_norm")
NORM = r"norm|(^|\.)ln(_|\.|$|\d)|layernorm"
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


NORM_MEMBERS = (*POINTWISE, *REDUCTIONS)

SHIPPED: tuple[Rule, ...] = (
    Rule(
        "rms_norm",
        (
            Pattern(NORM_MEMBERS, _rows("rms_norm"), ("rsqrt",), NORM, siblings=True, module=True),
            Pattern(NORM_MEMBERS, _rows("rms_norm_backward"), ("sum",), NORM, "backward", True, True),
        ),
    ),
    Rule(
        "silu_mul",
        (
            Pattern(("silu", "mul"), _gated("silu_mul", "silu"), ("silu", "mul"), MLP),
            Pattern(
                ("silu_backward", "mul", "cat"),
                _gated("silu_mul_backward", "silu_backward"),
                ("silu_backward", "mul"),
                MLP,
                "backward",
                siblings=True,
            ),
        ),
    ),
    Rule(
        "rope",
        (
            Pattern(POINTWISE, _rope, ("mul",), r"attn|attention", siblings=True, reads=r"rotary|rope"),
            Pattern(POINTWISE, _rope, ("mul",), r"attn|attention", "backward", siblings=True, reads=r"rotary|rope"),
        ),
    ),
    _cross_entropy("cross_entropy", ("_to_copy",), False),
    _cross_entropy("cross_entropy_in_place", ("_to_copy",), True),
    _cross_entropy("cross_entropy_fp32", (), True),
    _merge("qkv", r"\.(q|k|v|query|key|value)(_proj|_lin)?$"),
    _merge("gate_up", r"\.(gate_proj|up_proj|w1|w3)$"),
    Rule(
        "pointwise",
        (
            Pattern(NORM_MEMBERS, _joint, run=True),
            Pattern(NORM_MEMBERS, _joint, phase="backward", run=True),
        ),
    ),
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
