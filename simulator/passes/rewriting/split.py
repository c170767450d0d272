"""What one of several ranks does of an op that they share: its dimensions, divided along a named axis.

Each kind of op says which of its dimensions lie along which axis (:class:`opcast.datasets.vocabulary.Dim`); here stand
those whose layout decides it. A dimension's own name is an axis too.

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
    axes_of_kind = KINDS[op.kind].axes
    by_layout = {"gemm": _GEMM, "grouped_gemm": _GROUPED}.get(op.kind)
    if by_layout is not None:
        return {**axes_of_kind, **by_layout[LAYOUT.choices[op.layout]]}
    return _reduction_axes(op) if op.kind == "reduce" else axes_of_kind


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
    dims = axes(op).get(axis, ()) or ((axis,) if axis in KINDS[op.kind].names else ())
    if not dims:
        raise PlanError(f"{op.kind} has no {axis} to share out; it has {', '.join(axes(op)) or 'nothing to share'}")
    divide = _largest if uneven else _exactly(op, axis)
    changes: dict[str, int | str] = {}
    for dim in dims:
        size = getattr(op, dim)
        few = dim in ("heads_kv", "groups") and size < parts and parts % size == 0
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


def _reduction_axes(op: Op) -> Axes:
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
