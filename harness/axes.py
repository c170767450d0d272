"""Axes of a campaign: how the shapes of an entry are written down, and how they are drawn.

A value of an entry is one of

``4096`` or ``nt``
    a constant,
``[1, 16, 256]``
    the values of the axis,
``{log2: [64, 8192, 8]}``
    eight values from 64 to 8192, evenly spaced in the logarithm,
``{low: 1, high: 4096, align: tokens}``
    log-uniform draws (``sample: 12`` gives their number where the entry is no joint sample),
``"=heads_q // _group"``
    a formula over other axes of the entry; an axis whose name starts with ``_`` serves formulas only.

A key ``heads_q, head_dim`` with a list of pairs is one axis of several dims.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

POWER_OF_TWO = 0
MOST_CASES = 200_000  # of a campaign, which takes days; and values of an axis
MOST_TRIED = 20 * MOST_CASES  # combinations of which limits may leave few
LONGEST_FORMULA = 500  # characters

# Shares of the alignments that draws get. Kernels treat multiples of 128, 64 and 8 and odd sizes differently, and
# models use them in about these proportions: hidden sizes are mostly multiples of 128, token counts are anything.
ALIGNMENTS: Mapping[str, tuple[tuple[int, float], ...]] = {
    "width": ((128, 0.45), (64, 0.20), (8, 0.20), (2, 0.05), (1, 0.10)),
    "tokens": ((POWER_OF_TWO, 0.30), (64, 0.15), (8, 0.15), (1, 0.40)),
    "any": ((1, 1.0),),
}

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: Mapping[str, Callable[..., Any]] = {"min": min, "max": max}


class AxisError(ValueError):
    """An axis or formula that makes no sense. The message quotes it and says what would."""


@dataclass(frozen=True)
class Axis:
    """One or more dims that vary together: ``values`` to choose from, or the range ``low`` to ``high`` to draw from."""

    names: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...] = ()
    low: int = 0
    high: int = 0
    alignments: tuple[tuple[int, float], ...] = ()
    sample: int = 0

    def points(self, random: Random) -> Sequence[tuple[Any, ...]]:
        """The values of the axis in a product or a zip; AxisError for a range without ``sample``."""
        if self.values:
            return self.values
        if not self.sample:
            raise AxisError(f"axis {', '.join(self.names)} is a range: give it `sample`, or the entry")
        return self.draws(self.sample, random)

    def draws(self, count: int, random: Random) -> list[tuple[Any, ...]]:
        """``count`` values in random order, covering evenly: each value, or each slice of the range, in turn."""
        if self.values:
            rounds = [random.sample(self.values, len(self.values)) for _ in range(-(-count // len(self.values)))]
            return list(itertools.chain.from_iterable(rounds))[:count]
        slices = [(i + random.random()) / count for i in range(count)]
        random.shuffle(slices)
        return [(self._between(share, random),) for share in slices]

    def _between(self, share: float, random: Random) -> int:
        raw = self.low * (self.high / self.low) ** share
        multiples, weights = zip(*self.alignments, strict=True)
        return align(raw, random.choices(multiples, weights)[0], self.low, self.high)


def align(value: float, multiple: int, low: int, high: int) -> int:
    """The multiple (or power of two) nearest to ``value``, in [low, high]; half the multiple where none is near."""
    if multiple == POWER_OF_TWO:
        rounded = 2 ** round(math.log2(value))
    else:
        while multiple > 1 and value < 2 * multiple:
            multiple //= 2
        rounded = round(value / multiple) * multiple
    return rounded if low <= rounded <= high else min(max(round(value), low), high)


def parse_axis(key: str, value: Any) -> Axis:
    """One axis as an entry writes it; AxisError when it is malformed."""
    names = tuple(name.strip() for name in key.split(","))
    if isinstance(value, Mapping):
        return _parse_range(names, value)
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not values:
        raise AxisError(f"axis {key!r} has no values")
    if len(names) == 1:
        return Axis(names, tuple((v,) for v in values))
    tuples = tuple(tuple(v) if isinstance(v, Sequence) and not isinstance(v, str) else (v,) for v in values)
    for item in tuples:
        if len(item) != len(names):
            raise AxisError(f"axis {key!r} needs lists of {len(names)} values, not {list(item)}")
    return Axis(names, tuples)


def _parse_range(names: tuple[str, ...], value: Mapping[str, Any]) -> Axis:
    text = f"axis {', '.join(names)}: {dict(value)}"
    if len(names) > 1:
        raise AxisError(f"{text}: only one dim can be a range")
    if set(value) == {"log2"}:
        low, high, steps = _integers(text, value["log2"], 3)
        spaced = [low * (high / low) ** (i / max(steps - 1, 1)) for i in range(steps)]
        return Axis(names, tuple((v,) for v in dict.fromkeys(round(s) for s in spaced)))
    unknown = set(value) - {"low", "high", "align", "sample"}
    if unknown or not {"low", "high"} <= set(value):
        raise AxisError(f"{text} is neither {{log2: [low, high, steps]}} nor {{low, high, align, sample}}")
    sample = value.get("sample", 0)
    low, high, _ = _integers(text, [value["low"], value["high"], sample or 1], 3)
    return Axis(names, (), low, high, _alignments(text, value.get("align", "width")), sample)


def _integers(text: str, values: Any, count: int) -> tuple[int, ...]:
    positive = [isinstance(v, int) and not isinstance(v, bool) and 1 <= v < 2**62 for v in values]
    if len(positive) != count or not all(positive) or values[1] < values[0]:
        raise AxisError(f"{text} needs integers of at least 1, low before high")
    if values[2] > MOST_CASES:
        raise AxisError(f"{text} has {values[2]:,} values, more than the {MOST_CASES:,} cases of a campaign")
    return tuple(values)


def _alignments(text: str, value: Any) -> tuple[tuple[int, float], ...]:
    if isinstance(value, int) and value >= 1:
        return ((value, 1.0),)
    if isinstance(value, str) and value in ALIGNMENTS:
        return ALIGNMENTS[value]
    raise AxisError(f"{text}: align is a multiple or one of {', '.join(ALIGNMENTS)}")


# --- formulas ------------------------------------------------------------------------------------------


def is_formula(value: Any) -> bool:
    """Whether an entry's value is a formula over its other axes."""
    return isinstance(value, str) and value.startswith("=")


def evaluate(formula: str, names: Mapping[str, Any]) -> Any:
    """The value of ``+ - * // % min max``, comparisons, ``and``, ``or``, ``not`` over names and constants."""
    if len(formula) > LONGEST_FORMULA:
        raise AxisError(f"{formula[:40]}… is longer than the {LONGEST_FORMULA} characters of a formula")
    try:
        return _value(ast.parse(formula.lstrip("= "), mode="eval").body, names)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # of odd signs, or nested too deep
        if isinstance(error, AxisError):
            raise
        raise AxisError(f"{formula!r} is no formula") from None
    except (ZeroDivisionError, TypeError) as error:
        raise AxisError(f"{formula!r}: {error} (with {dict(names)})") from None


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in names:
            return names[node.id]
        case ast.Name():
            raise AxisError(f"formula names {node.id!r}, which is none of {', '.join(names)}")
        case ast.BinOp() if type(node.op) in _BINARY:
            left_side, right = _value(node.left, names), _value(node.right, names)
            if isinstance(left_side, str) or isinstance(right, str):
                raise TypeError("words have no arithmetic")
            return _BINARY[type(node.op)](left_side, right)
        case ast.BoolOp():
            values = [bool(_value(value, names)) for value in node.values]
            return all(values) if isinstance(node.op, ast.And) else any(values)
        case ast.UnaryOp(op=ast.Not()):
            return not _value(node.operand, names)
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS and not node.keywords:
            return _CALLS[name](*(_value(argument, names) for argument in node.args))
        case ast.Compare() if all(type(op) in _COMPARE for op in node.ops):
            terms = [_value(term, names) for term in (node.left, *node.comparators)]
            checks = zip(node.ops, itertools.pairwise(terms), strict=True)
            return all(_COMPARE[type(op)](*pair) for op, pair in checks)
    raise AxisError(f"{ast.unparse(node)!r} is not allowed in a formula")


# --- entries -------------------------------------------------------------------------------------------


def combine(axes: Sequence[Axis], random: Random, zipped: bool) -> Iterator[dict[str, Any]]:
    """Every combination of the axes' points, or with ``zipped`` their points side by side (constants repeat)."""
    columns = [axis.points(random) for axis in axes]
    count = 1 if zipped else math.prod(map(len, columns))
    if count > MOST_TRIED:
        raise AxisError(f"{count:,} combinations are more than {MOST_TRIED:,}: give the entry `sample`")
    if not zipped:
        yield from (_merge(axes, row) for row in itertools.product(*columns))
        return
    lengths = {len(column) for column in columns if len(column) > 1}
    if len(lengths) > 1:
        sizes = ", ".join(f"{'/'.join(a.names)}: {len(c)}" for a, c in zip(axes, columns, strict=True) if len(c) > 1)
        raise AxisError(f"zipped axes must have as many values each, not {sizes}")
    count = max(lengths, default=1)
    for i in range(count):
        yield _merge(axes, [column[i % len(column)] for column in columns])


def joint_draws(axes: Sequence[Axis], count: int, random: Random) -> Iterator[dict[str, Any]]:
    """``count`` joint draws that cover every axis evenly (a Latin hypercube), then endless independent ones."""
    columns = [axis.draws(count, random) for axis in axes]
    yield from (_merge(axes, row) for row in zip(*columns, strict=True))
    while True:
        yield _merge(axes, [axis.draws(1, random)[0] for axis in axes])


def _merge(axes: Sequence[Axis], row: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    return {
        name: value
        for axis, values in zip(axes, row, strict=True)
        for name, value in zip(axis.names, values, strict=True)
    }
