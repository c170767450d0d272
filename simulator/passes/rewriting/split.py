"""What one of several ranks does of an op that they share: its dimensions, divided along a named axis.

One table says, by kind of op, which dimensions lie along which axis. Axes are ``tokens``, ``batch``, ``heads``,
``features_in`` and ``features_out`` of a layer's weights (``features`` where an op has one width only), ``experts``,
``vocab``, ``keys`` (positions that queries attend to) and ``elements`` (whatever an op without shape works on). A
dimension's own name is an axis too.

Products are those of a Linear whose weight is stored [out, in]: ``nt`` runs it, ``nn`` is the gradient of its input,
``tn`` that of its weight. Where weights are stored [in, out], ``nn`` and ``nt`` change places: name ``n`` and ``k``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache

from ....datasets.ops import KINDS, LAYOUT, Op
from ...question.plan import PlanError

Axes = Mapping[str, tuple[str, ...]]

_ATTENTION: Axes = {
    "batch": ("batch",),
    "heads": ("heads_q", "heads_kv"),
    "tokens": ("seq_q",),
    "keys": ("seq_kv",),
}
_MLA: Axes = {"batch": ("batch",), "heads": ("heads",), "tokens": ("seq_q",), "keys": ("seq_kv",)}
_ROWS: Axes = {
    "tokens": ("rows",),
    "batch": ("rows",),
    "heads": ("rows",),
    "elements": ("rows",),
    "features": ("cols",),
    "features_in": ("cols",),
    "features_out": ("cols",),
    "vocab": ("cols",),
}
_TABLE: Axes = {"tokens": ("tokens",), "batch": ("tokens",), "vocab": ("vocab",), "features": ("hidden",)}
_LOSS: Axes = {"tokens": ("tokens",), "batch": ("tokens",), "vocab": ("vocab",)}
_ALL = ("tokens", "batch", "heads", "features", "features_in", "features_out", "experts", "vocab", "keys", "elements")
_NUMEL: Axes = dict.fromkeys(_ALL, ("numel",))
_BYTES: Axes = dict.fromkeys(_ALL, ("size_bytes",))
_EXCHANGE: Axes = {"tokens": ("tokens",), "batch": ("tokens",), "features": ("hidden",)}

AXES: dict[str, Axes] = {
    **dict.fromkeys(("attention_prefill", "attention_decode", "attention_backward"), _ATTENTION),
    **dict.fromkeys(("mla_prefill", "mla_decode"), _MLA),
    **dict.fromkeys(("rms_norm", "layer_norm", "softmax", "silu_mul", "gelu"), _ROWS),
    **dict.fromkeys((f"{name}_backward" for name in ("rms_norm", "layer_norm", "softmax", "silu_mul", "gelu")), _ROWS),
    "quantize": _ROWS,
    "rope": {"tokens": ("tokens",), "batch": ("tokens",), "heads": ("heads",)},
    "elementwise": _NUMEL,
    "adamw": {"elements": ("numel",)},
    "copy": _BYTES,
    "embedding": _TABLE,
    "embedding_backward": _TABLE,
    "cross_entropy": _LOSS,
    "cross_entropy_backward": _LOSS,
    "moe_route": {"tokens": ("tokens",), "batch": ("tokens",), "experts": ("experts",)},
    "moe_permute": _EXCHANGE,
    "ep_dispatch": _EXCHANGE,
    "ep_combine": _EXCHANGE,
    **{name: _BYTES for name, kind in KINDS.items() if kind.family == "collective"},
}
_GEMM: dict[str, Axes] = {
    "nt": {"tokens": ("m",), "features_out": ("n",), "features_in": ("k",)},
    "nn": {"tokens": ("m",), "features_in": ("n",), "features_out": ("k",)},
    "tn": {"features_out": ("m",), "features_in": ("n",), "tokens": ("k",)},
}
_GROUPED: dict[str, Axes] = {
    "nt": {"features_out": ("n",), "features_in": ("k",)},
    "nn": {"features_in": ("n",), "features_out": ("k",)},
    "tn": {"features_out": ("k",), "features_in": ("n",)},
}


def axes(op: Op) -> Axes:
    """The dimensions of an op along each axis that it has."""
    layout = LAYOUT.choices[op.layout] if op.kind in ("gemm", "grouped_gemm") else ""
    if op.kind == "gemm":
        return {"batch": ("batch",), "heads": ("batch",), "experts": ("batch",)} | dict(_GEMM[layout])
    if op.kind == "grouped_gemm":
        return {"tokens": ("tokens",), "experts": ("experts",)} | dict(_GROUPED[layout])
    if op.kind == "reduce":
        return _reduced(op)
    return AXES.get(op.kind, {})


@lru_cache(maxsize=65536)
def share(op: Op, axis: str, parts: int | Fraction, uneven: bool = False) -> Op:
    """One rank's op when ``parts`` ranks share it along an axis.

    Heads of keys and values that are fewer than the ranks are held by several: one each. ``uneven`` gives the largest
    share where ``parts`` does not divide; without it that is a PlanError that names the nearest degree that does. So
    is an axis that the op has not.
    """
    if parts == 1:
        return op
    if op.kind == "fused_moe":
        return _fused_moe(op, axis, parts)
    dims = (axis,) if axis in KINDS[op.kind].names else axes(op).get(axis, ())
    if not dims:
        raise PlanError(f"{op.kind} has no {axis} to share out; it has {', '.join(axes(op)) or 'nothing to share'}")
    divide = _largest if uneven else _exactly(op, axis)
    changes: dict[str, int | str] = {}
    for dim in dims:
        size = getattr(op, dim)
        few = dim == "heads_kv" and size < parts and parts % size == 0
        changes[dim] = 1 if few else divide(size, Fraction(parts))
    for run in ("run", "run_bytes"):
        if run in KINDS[op.kind].names and getattr(op, run):
            changes[run] = _run(getattr(op, run), changes[dims[0]], axis, parts)
    return op.replace(**changes)


def nearest(size: int, parts: int) -> int:
    """The degree nearest to ``parts`` that divides ``size``, the smaller of two that are as near."""
    return min((d for d in range(1, min(size, 2 * parts) + 1) if size % d == 0), key=lambda d: (abs(d - parts), d))


def _exactly(op: Op, axis: str) -> Callable[[int, Fraction], int]:
    def divide(size: int, parts: Fraction) -> int:
        shared = size / parts
        if shared.denominator != 1:
            raise PlanError(
                f"{axis} of {op.kind} are {size}, which {parts} ranks cannot share evenly; "
                f"the nearest degree that can is {nearest(size, max(1, round(parts)))}"
            )
        return int(shared)

    return divide


def _largest(size: int, parts: Fraction) -> int:
    return -(-size * parts.denominator // parts.numerator)


def _run(run: int, size: int | str, axis: str, parts: int | Fraction) -> int:
    """Contiguous elements after sharing: rows are shorter where features are shared; 0 where all is one run."""
    shorter = axis.startswith("features") and run % parts == 0
    run = int(run / parts) if shorter else run
    return run if run < int(size) else 0


def _reduced(op: Op) -> Axes:
    """What is summed over tokens keeps its features inside; what is summed over features keeps tokens outside."""
    over_features = op.inner == 1
    tokens, features = ("outer", "length") if over_features else ("outer" if op.outer > 1 else "length", "inner")
    return {
        "tokens": (tokens,),
        "batch": (tokens,),
        "heads": (tokens if over_features else features,),
        **dict.fromkeys(("features", "features_in", "features_out", "vocab"), (features,)),
        "elements": (max(("outer", "length", "inner"), key=lambda dim: int(getattr(op, dim))),),
    }


def _fused_moe(op: Op, axis: str, parts: int | Fraction) -> Op:
    degrees = {"features": "tp", "features_in": "tp", "features_out": "tp", "experts": "ep"}
    if axis in degrees:
        return op.replace(**{degrees[axis]: int(getattr(op, degrees[axis]) * parts)})
    if axis == "tokens" and op.tokens % parts == 0:
        return op.replace(tokens=int(op.tokens / parts))
    raise PlanError(f"{axis} of fused_moe cannot be shared by {parts} ranks")
