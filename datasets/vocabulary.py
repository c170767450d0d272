"""What an operator is: the types and the registry. Import them from :mod:`.ops`, where the kinds are.

An :class:`Op` is one operator or collective with its dimensions and dtype. It is immutable, hashable and
knows no device: the harness times it, the store keys on it, predictors take it, graphs are made of it.

An :class:`OpKind` defines a family of ops: its named integer dimensions, its :class:`Cost` (FLOPs and bytes), and what
every other part of opcast has to know of it: its law, its purpose in a model, how ranks may share it. The kinds
themselves stand in :mod:`.ops`, one small function each.

Cost functions work on plain integers and on numpy arrays alike, so that a million ops are costed in one
call: :func:`cost_columns`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from .dtypes import canonical_dtype, itemsize, product_dtype, weight_itemsize
from .near import did_you_mean, meant


class OpError(ValueError):
    """A malformed op: unknown kind or dimension, a bad value. The message says what and what to do."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What an op must do at the least: floating-point operations, and bytes moved to and from memory.

    ``unit`` is the execution unit that bounds the arithmetic: ``tensor`` (matrix cores), ``vector``
    (ordinary FMA lanes), ``network`` (links; ``read_bytes`` is then what one rank sends) or ``host``.
    """

    flops: Any
    read_bytes: Any
    write_bytes: Any
    unit: str = "vector"

    @property
    def bytes(self) -> Any:
        return self.read_bytes + self.write_bytes


FAMILIES = (
    *("gemm", "attention", "linear_attention", "norm", "pointwise", "gather", "moe", "optimizer", "copy"),
    *("collective", "expert_parallel", "host"),
)
PRODUCTS = ("gemm", "attention", "linear_attention", "moe")  # families that multiply matrices
COSTS = 4096  # ops whose costs are remembered
EVERY_AXIS = (
    *("tokens", "batch", "heads", "features", "features_in", "features_out"),
    *("experts", "vocab", "keys", "elements"),
)
USUAL_AXES: Mapping[str, tuple[str, ...]] = {
    "rows": ("tokens", "batch", "heads", "elements"),
    "cols": ("features", "features_in", "features_out", "vocab"),
    "tokens": ("tokens", "batch"),
    "hidden": ("features",),
    "vocab": ("vocab",),
    "experts": ("experts",),
    "batch": ("batch",),
    "heads": ("heads",),
    "heads_q": ("heads",),
    "heads_kv": ("heads",),
    "seq_q": ("tokens",),
    "seq_kv": ("keys",),
    "numel": EVERY_AXIS,
    "size_bytes": EVERY_AXIS,
}


@dataclass(frozen=True, slots=True)
class Dim:
    """A named integer dimension. One with ``choices`` is stored as the index of the chosen name.

    ``along`` are the axes of a model that it lies along, which ranks may share: ``tokens``, ``batch``, ``heads``,
    ``features_in`` and ``features_out`` of a layer's weights (``features`` where an op has one width only),
    ``experts``, ``vocab``, ``keys`` (positions that queries attend to), ``elements`` (whatever an op without shape
    works on). None = those usual for its name (:data:`USUAL_AXES`).

    ``of_backend`` is a dimension of which every backend runs one value (:func:`.kernels.value_of`): predictors, which
    are of one backend, do not see it, and rows that were written before it was there have their backend's.
    """

    name: str
    low: int = 1
    default: int | None = None
    choices: tuple[str, ...] = ()
    help: str = ""
    along: tuple[str, ...] | None = None
    of_backend: bool = False

    def parse(self, kind: str, value: object) -> int:
        """An integer from what a user wrote; OpError when it is no integer, no known choice or too small."""
        if self.choices and isinstance(value, str) and not value.lstrip("-").isdigit():
            if value not in self.choices:
                near = meant(value, self.choices)
                raise OpError(f"{kind}.{self.name}={value!r} is not one of {', '.join(self.choices)}{near}")
            return self.choices.index(value)
        if isinstance(value, bool):
            if self.choices != ("no", "yes"):
                raise OpError(f"{kind}.{self.name}={str(value).lower()} is not an integer")
            value = int(value)
        try:
            number = int(value)  # type: ignore[call-overload]
            exact = number == float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            raise OpError(f"{kind}.{self.name}={value!r} is not an integer") from None
        if not exact or abs(number) >= 2**62:
            raise OpError(f"{kind}.{self.name}={value!r} is not an integer below 2^62")
        high = len(self.choices) - 1 if self.choices else None
        if number < self.low or (high is not None and number > high):
            bounds = f"at least {self.low}" if high is None else f"from {self.low} to {high}"
            raise OpError(f"{kind}.{self.name}={number} must be {bounds}")
        return number


@dataclass(frozen=True, slots=True)
class OpKind:
    """The definition of a family of ops.

    - ``family``: which ops learn, are corrected and are checked alike, one of :data:`FAMILIES`.
    - ``purpose``: what it is for in a model, where that is finer than the family: passes and pages go by it.
      ``norm`` has weights of its own, one a column, and needs whole rows; ``softmax`` and ``loss`` need whole rows;
      ``activation`` and ``pointwise`` do not. Empty = the family.
    - ``law``: the analytical law of its time, by name (``models.analytical.LAWS``). Empty = ``rows`` for what has rows
      and columns, else the law of the kind's own name.
    - ``statistics``: numbers of each row that ranks sum when they share its columns.

    The kind of a backward pass is named after its forward kind: ``rms_norm_backward``.
    """

    name: str
    dims: tuple[Dim, ...]
    cost: Callable[[Any], Cost]
    family: str
    doc: str
    purpose: str = ""
    law: str = ""
    statistics: int = 0
    names: tuple[str, ...] = field(init=False)
    axes: Mapping[str, tuple[str, ...]] = field(init=False, hash=False)  # dims along each axis that ranks may share

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(dim.name for dim in self.dims))
        object.__setattr__(self, "purpose", self.purpose or self.family)
        object.__setattr__(self, "law", self.law or ("rows" if self.row_wise else self.name))
        axes: dict[str, tuple[str, ...]] = {}
        for dim in self.dims:
            for axis in USUAL_AXES.get(dim.name, ()) if dim.along is None else dim.along:
                axes[axis] = (*axes.get(axis, ()), dim.name)
        object.__setattr__(self, "axes", axes)

    @property
    def row_wise(self) -> bool:
        """Whether it works on the rows of a matrix: it has dims ``rows`` and ``cols``."""
        return {"rows", "cols"} <= set(self.names)

    @property
    def backward(self) -> bool:
        """Whether it is the backward pass of another kind."""
        return self.name.endswith("_backward")

    @property
    def collective(self) -> bool:
        """Whether several ranks run it together."""
        return self.family in ("collective", "expert_parallel")

    def usual_output(self, dtype: str) -> str:
        """The output format of an op that names none: that of the input, but of products of small floats bf16."""
        return product_dtype(dtype) if self.family in PRODUCTS else dtype

    def op(self, /, dtype: str = "bf16", out_dtype: str | None = None, **dims: object) -> Op:
        """One op of this kind. Missing dims take their default; OpError names what is wrong."""
        unknown = [name for name in dims if name not in self.names]
        if unknown:
            guess = meant(unknown[0], self.names)
            raise OpError(f"{self.name} has no dimension {unknown[0]!r}{guess} (it has {', '.join(self.names)})")
        values = []
        for dim in self.dims:
            value = dims.get(dim.name, dim.default)
            if value is None:
                raise OpError(f"{self.name} needs {dim.name!r} (dimensions: {', '.join(self.names)})")
            values.append(dim.parse(self.name, value))
        for name, dtype_name in (("dtype", dtype), ("out_dtype", out_dtype or dtype)):
            if not isinstance(dtype_name, str):
                raise OpError(
                    f"{self.name}.{name}={'null' if dtype_name is None else dtype_name} must be a dtype, such as bf16"
                )
        try:
            dtype = canonical_dtype(dtype)
            out = canonical_dtype(out_dtype) if out_dtype else self.usual_output(dtype)
        except ValueError as error:
            raise OpError(str(error)) from None
        return Op(self.name, tuple(values), dtype, out)


@dataclass(frozen=True, slots=True, order=True)
class Op:
    """One operator or collective. ``dims`` follow the order of the kind's dimensions.

    Build one with :func:`make_op`, which checks it; attributes give the dims by name (``op.m``).
    """

    kind: str
    dims: tuple[int, ...]
    dtype: str
    out_dtype: str

    def __getattr__(self, name: str) -> int:
        if name.startswith("__") or name not in KINDS[self.kind].names:
            raise AttributeError(f"{self.kind} op has no dimension {name!r}")
        return self.dims[KINDS[self.kind].names.index(name)]

    @property
    def cost(self) -> Cost:
        """FLOPs and bytes of this op."""
        return _cost(self)

    def replace(self, **changes: int | str) -> Op:
        """This op with some dims (or ``dtype``/``out_dtype``) changed, checked again."""
        fields: dict[str, Any] = dict(zip(KINDS[self.kind].names, self.dims, strict=True))
        fields.update(dtype=self.dtype, out_dtype=self.out_dtype)
        return make_op(self.kind, **(fields | changes))

    def to_dict(self) -> dict[str, object]:
        """Kind, dims (choices by name) and dtypes, ready for JSON."""
        out: dict[str, object] = {"kind": self.kind}
        for dim, value in zip(KINDS[self.kind].dims, self.dims, strict=True):
            out[dim.name] = dim.choices[value] if dim.choices else value
        return out | {"dtype": self.dtype, "out_dtype": self.out_dtype}

    def __str__(self) -> str:
        parts = []
        for dim, value in zip(KINDS[self.kind].dims, self.dims, strict=True):
            if value != dim.default:
                parts.append(f"{dim.name}={dim.choices[value] if dim.choices else value}")
        out = "" if self.out_dtype == self.dtype else f"->{self.out_dtype}"
        return f"{self.kind}[{' '.join(parts)} {self.dtype}{out}]"


KINDS: dict[str, OpKind] = {}


def kind(name: str) -> OpKind:
    """The definition of a kind; OpError names the nearest known one."""
    try:
        return KINDS[name]
    except (KeyError, TypeError):
        hint = did_you_mean(name, KINDS, f"known: {', '.join(KINDS)}")
        raise OpError(f"unknown op {name!r}; {hint}") from None


def make_op(kind_name: str, dtype: str = "bf16", out_dtype: str | None = None, **dims: object) -> Op:
    """One checked op: ``make_op("gemm", m=4096, n=4096, k=4096, dtype="bf16")``."""
    return kind(kind_name).op(dtype, out_dtype, **dims)


def define(
    *dims: Dim | str, family: str, purpose: str = "", law: str = "", statistics: int = 0
) -> Callable[[Callable[[Any], Cost]], OpKind]:
    """Register the decorated cost function as a kind of its own name.

    ``dims`` are names (an integer of at least 1 without default) or :class:`Dim`; the rest is said in
    :class:`OpKind`. The function takes a namespace with every dim, ``itemsize``, ``weight_itemsize`` and
    ``out_itemsize``; its docstring gives formula and source. ValueError for a name that is taken or an unknown family.
    """
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is not one of {', '.join(FAMILIES)}")

    def register(function: Callable[[Any], Cost]) -> OpKind:
        kind = OpKind(
            name=function.__name__,
            dims=tuple(Dim(dim) if isinstance(dim, str) else dim for dim in dims),
            cost=function,
            family=family,
            doc=inspect.getdoc(function) or "",
            purpose=purpose,
            law=law,
            statistics=statistics,
        )
        if kind.name in KINDS:
            raise ValueError(f"op kind {kind.name!r} is defined twice")
        KINDS[kind.name] = kind
        _cost.cache_clear()
        return kind

    return register


@dataclass(frozen=True)
class OpColumns:
    """n ops of one kind and format: ``columns`` holds an array [n] for each dim; ``out_dtype`` None is ``dtype``.

    ``cache`` says whether inputs lie in the last-level cache as far as they fit (``warm``) or not (``cold``).
    """

    kind: str
    columns: Mapping[str, np.ndarray]
    dtype: str
    out_dtype: str | None = None
    cache: str = "warm"

    @property
    def cost(self) -> Cost:
        """What the ops move and compute, in arrays [n]."""
        return cost_columns(self.kind, self.columns, self.dtype, self.out_dtype)

    def take(self, rows: np.ndarray) -> OpColumns:
        """Those at some places, or where a mask [n] is set."""
        return replace(self, columns={name: np.asarray(values)[rows] for name, values in self.columns.items()})


def cost_columns(kind_name: str, columns: Mapping[str, np.ndarray], dtype: str, out_dtype: str | None = None) -> Cost:
    """Cost of many ops of one kind and dtype: ``columns`` holds one array per dim; so does the result."""
    definition = kind(kind_name)
    arrays = [np.asarray(columns[name], dtype=np.float64) for name in definition.names]
    return definition.cost(_namespace(definition, arrays, dtype, out_dtype or dtype))


def iterate_groups(ops: list[Op]) -> Iterator[tuple[str, str, str, np.ndarray, dict[str, np.ndarray]]]:
    """Ops by (kind, dtype, out_dtype): their positions in the list, and their dims as int64 columns."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for position, op in enumerate(ops):
        groups.setdefault((op.kind, op.dtype, op.out_dtype), []).append(position)
    for (kind_name, dtype, out_dtype), positions in groups.items():
        table = np.array([ops[p].dims for p in positions], dtype=np.int64).reshape(len(positions), -1)
        columns = {name: table[:, i] for i, name in enumerate(KINDS[kind_name].names)}
        yield kind_name, dtype, out_dtype, np.array(positions), columns


@lru_cache(maxsize=COSTS)
def _cost(op: Op) -> Cost:
    return KINDS[op.kind].cost(_namespace(KINDS[op.kind], op.dims, op.dtype, op.out_dtype))


def _namespace(definition: OpKind, values: Any, dtype: str, out_dtype: str) -> SimpleNamespace:
    dims = dict(zip(definition.names, values, strict=True))
    return SimpleNamespace(
        **dims, itemsize=itemsize(dtype), weight_itemsize=weight_itemsize(dtype), out_itemsize=itemsize(out_dtype)
    )
