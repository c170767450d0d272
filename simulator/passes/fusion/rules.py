"""The fusion rules that come along, by name, in the order they are applied.

What a framework runs as one kernel is listed in its ``conf/stack`` file. Megatron-LM and Transformer Engine fuse norms,
rotary embedding, SwiGLU, the loss, and merge products that share an input; compilers fuse whatever is pointwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from ....datasets.loading import nearest
from ....datasets.ops import Op
from ...question.plan import PlanError
from ...trace.workload import TOGETHER
from ..custom import called, load
from .biases import biases_apart
from .bookkeeping import accumulate, compute_once, skip_fills
from .kernels import (
    NORM,
    activation,
    added_norm,
    begins_norm,
    epilogue,
    gated,
    joint,
    loss,
    merged,
    permute,
    rotary,
    route,
    row_wise,
)
from .log_probs import log_probs_apart
from .mamba import split_scan
from .patterns import Match, Pattern, Rule
from .router import apart, on_matrix_units

ADDS = ("add", "add_")
POINTWISE = (
    *("_to_copy", "pow", "mul", "mul_", "add", "add_", "sub", "sub_", "rsub", "neg", "div", "div_", "rsqrt", "sqrt"),
    *("exp", "tanh", "sigmoid", "silu", "gelu", "relu", "silu_backward", "gelu_backward", "tanh_backward"),
    *("sigmoid_backward", "threshold_backward", "clone", "copy_", "copy", "cat", "where", "masked_fill", "fill"),
    *("slice_backward", "clamp", "clamp_min", "reciprocal", "square", "native_dropout", "native_dropout_backward"),
)
REDUCTIONS = ("mean", "sum", "var", "amax", "linalg_vector_norm")
LAYER = r"(^|\.)\d+(\.|$)"
NORM_OR_LAYER = rf"{NORM}|(^|\.)\d+$|(^|\.)output$"  # encoders add before they normalise, in modules of that name
COMPILED = (
    *(*POINTWISE, *REDUCTIONS, "tanh", "pow", "_softmax", "_log_softmax", "_softmax_backward_data"),
    *("_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "bernoulli_", "ones_like", "zeros_like"),
    *("native_layer_norm", "native_layer_norm_backward", "embedding", "constant_pad_nd", "le", "gt", "ne", "eq"),
)
MLP = r"mlp|ffn|feed_forward|expert"


def _merge(name: str, path: str) -> Rule:
    """One product in place of several that share an input; where adapters stand beside them, of the frozen weights.

    What adapters add to the gradient of the input goes into the same product then, which it lengthens by a hundredth.
    """
    return Rule(
        name,
        (
            Pattern(("gemm.nt",), partial(merged, "n"), path=rf"{path}(\.base)?$", siblings=True),
            Pattern(("gemm.nn", *ADDS), partial(merged, "k"), ("gemm.nn",), rf"{path}(\.base|\.lora_a)?$", "backward"),
            Pattern(("gemm.tn",), partial(merged, "m"), path=rf"{path}$", phase="backward", siblings=True),
        ),
        remakes=False,
    )


TURNS = (*POINTWISE, "sum", "zeros_like", "new_zeros")
NORM_MEMBERS = (*POINTWISE, *REDUCTIONS)
ACTIVATION = (
    *("mul", "pow", "add", "add_", "tanh", "gelu"),
    *("erf", "tanh_backward", "gelu_backward", "cat", "relu", "_to_copy"),
)
DROPOUT = ("bernoulli_", "div_", "mul", *ADDS, "native_dropout", "native_dropout_backward")
ROUTER = (
    *(*NORM_MEMBERS, "_softmax", "_softmax_backward_data", "bitwise_not", "topk", "gather", "scatter"),
    *("scatter_", "new_zeros", "zeros_like", "zeros", "scatter_add_"),
)
SORTS = (
    *("sort", "argsort", "floor_divide", "index", "_to_copy", "histc"),
    *("bincount", "cumsum", "arange", "clone", "expand"),
)
PERMUTE = (
    *(*SORTS, "index_put_", "_index_put_impl_", "new_zeros", "mul", "sum", "index_add_", "zeros_like", "div", "view"),
)
GATES = r"(gate|router)(\.\w+)?$"


Form = tuple[tuple[str, ...], Callable[[Match], Op | None], tuple[str, ...]]  # members, kernel, needs


def _both(forward: Form, backward: Form | None = None, **settings: Any) -> tuple[Pattern, Pattern]:
    """A pattern for each direction, otherwise alike; the same one for both unless told."""
    return Pattern(*forward, **settings), Pattern(*backward or forward, phase="backward", **settings)


def _norm(name: str, *needs: str) -> Rule:
    kernels = partial(row_wise, name), partial(row_wise, f"{name}_backward")
    ahead, back = (NORM_MEMBERS, kernels[0], needs), (NORM_MEMBERS, kernels[1], ("sum",))
    return Rule(name, _both(ahead, back, path=NORM, siblings=True, module=True))


def _cross_entropy(name: str, casts: tuple[str, ...], in_place: bool) -> Rule:
    ends, last = ("_log_softmax", "nll_loss_forward"), "_log_softmax_backward_data"
    members, back = (*casts, *ends), ("nll_loss_backward", last, *casts)
    forward = Pattern(members, partial(loss, "cross_entropy", ends[0]), ends)
    kernel = partial(loss, "cross_entropy_backward", last)
    return Rule(name, (forward, Pattern(back, kernel, back[:2], phase="backward", in_place=in_place)), lets_go=True)


ADD_NORM = _both(
    ((*NORM_MEMBERS, "native_layer_norm"), added_norm, ("add",)),
    ((*NORM_MEMBERS, "native_layer_norm_backward"), added_norm, ("add_",)),
    path=NORM_OR_LAYER,
    grow=True,
    siblings=True,
    updates=True,
)
GATED = ("silu_backward", "mul", "cat")

SHIPPED: tuple[Rule, ...] = (
    Rule("int_bookkeeping", rewrite=compute_once),
    Rule("zero_fill", rewrite=skip_fills),
    Rule("gradient_accumulation", rewrite=accumulate),
    Rule("add_norm", ADD_NORM),
    Rule("residual_norm", (replace(ADD_NORM[0], first=begins_norm),)),
    _norm("rms_norm", "rsqrt", "mean"),
    _norm("layer_norm", "sub", "mean"),
    Rule(
        "silu_mul",
        _both(
            (("silu", "mul"), partial(gated, "silu_mul", "silu"), ("silu", "mul")),
            (GATED, partial(gated, "silu_mul_backward", "silu_backward"), GATED[:2]),
            path=MLP,
            siblings=True,
        ),
    ),
    Rule(
        "gelu",
        _both(
            (ACTIVATION, partial(activation, ""), ()),
            (ACTIVATION, partial(activation, "_backward"), ()),
            path=MLP,
            siblings=True,
        ),
    ),
    Rule(
        "rope",
        _both(
            (TURNS, rotary, ("mul",)),
            path=r"attn|attention",
            reads=r"rotary|rope",
            module=True,
            siblings=True,
            grow=True,
        ),
    ),
    Rule(
        "softcap",
        _both(
            (("div", "tanh", "mul"), joint, ("tanh",)),
            (("div", "tanh_backward", "mul"), joint, ("tanh_backward",)),
            grow=True,
        ),
    ),
    Rule("dropout_add", _both((DROPOUT, joint, ("mul",)), path="drop|^[^.]*(\\.[^.]*)*\\.\\d+$", grow=True)),
    Rule(
        "moe",
        (
            *_both((ROUTER, route, ("topk",)), (ROUTER, joint, ()), path=GATES, siblings=True, grow=True),
            *_both((PERMUTE, permute, ()), path="expert", siblings=True, grow=True, updates=True),
        ),
        remakes=False,
    ),
    Rule("bias_apart", rewrite=biases_apart),
    Rule("router", rewrite=on_matrix_units),
    Rule("router_apart", rewrite=apart),
    Rule("log_probs_apart", rewrite=log_probs_apart),
    Rule("mamba", rewrite=split_scan),
    _cross_entropy("cross_entropy", ("_to_copy",), False),
    _cross_entropy("cross_entropy_in_place", ("_to_copy",), True),
    _cross_entropy("cross_entropy_fp32", (), True),
    Rule(
        "bias",
        (
            Pattern(("gemm.nt", "gemm.nn", *ADDS), epilogue, ADDS[1:], module=True),
            Pattern(("gemm.tn", "sum"), epilogue, ("gemm.tn", "sum"), phase="backward", siblings=True, module=True),
        ),
        remakes=False,
    ),
    _merge("latent_down", r"\.(q_a_proj|kv_a_proj_with_mqa)"),
    *(_merge(name, path) for name, path in TOGETHER.items()),
    Rule("pointwise", _both((COMPILED, joint, ()), grow=True, siblings=True, updates=True)),
)


def _custom_rules(name: str) -> list[Rule]:
    """The rules that a user's function returns; PlanError where it fails or returns something else."""
    what = f"fusion rule {name!r}"
    function = load(name, "fusion rule")

    def made() -> list[Any]:
        result = function()
        return list(result) if isinstance(result, Iterable) else [result]

    rules = called(made, f"{what}: calling it without arguments")
    other = [type(rule).__name__ for rule in rules if not isinstance(rule, Rule)]
    if other or not rules:
        raise PlanError(f"{what} returned {', '.join(other) or 'nothing'}, not a Rule or several")
    return rules


def rules_named(names: Iterable[str]) -> tuple[Rule, ...]:
    """Rules by name: the user's own (``module:function``) first, then the shipped ones in their order.

    ``name@layers`` is a rule for the repeated layers alone: what surrounds them stays eager.

    PlanError names a rule that does not exist and the nearest one that does.
    """
    shipped = {rule.name: rule for rule in SHIPPED}
    custom: list[Rule] = []
    scopes: dict[str, str] = {}
    for spelling in names:
        name, _, where = spelling.partition("@")
        if where not in ("", "layers"):
            raise PlanError(f"stack.fusion: {spelling!r} is limited to {where!r}; take {name}@layers or {name}")
        if ":" in name:
            custom += _custom_rules(name)
        elif name in shipped:
            scopes[name] = LAYER if where else ""
        else:
            raise PlanError(f"stack.fusion: no rule {name!r}; {nearest(name, shipped, 'known:')}")
    return (*custom, *(_limit_to(rule, scopes[rule.name]) for rule in SHIPPED if rule.name in scopes))


def _limit_to(rule: Rule, within: str) -> Rule:
    patterns = tuple(replace(pattern, within=within) for pattern in rule.patterns)
    return replace(rule, patterns=patterns) if within else rule
