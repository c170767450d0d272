"""Rules and constraints of a user as expressions, such as ``tp * pp <= 16 or recompute == 'full'``.

An expression is parsed by Python's ``ast``, every node of it must be of a few known kinds, and it is worked out over
whole columns of points by numpy. Nothing of it is ever run as Python.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np

from ...datasets.loading import nearest
from ..question.canonical import RequestError

Columns = Mapping[str, np.ndarray]
LONGEST = 500  # characters of an expression
DEEPEST = 30  # nodes within each other
ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
WHAT = "names, numbers, words in quotes, + - * / // %, comparisons, in [..], and, or, not"


@dataclass(frozen=True)
class Expression:
    """A checked expression: its text, its tree and the names that it reads."""

    text: str
    tree: ast.expr
    names: frozenset[str]

    def holds(self, columns: Columns) -> np.ndarray:
        """Where it is true [points]. RequestError where its parts cannot be compared or reckoned with."""
        try:
            with np.errstate(all="ignore"):
                value = _value(self.tree, columns)
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(f"{self.text!r} cannot be worked out: {error}") from None
        count = len(next(iter(columns.values())))
        return np.broadcast_to(np.asarray(value), (count,)).astype(bool)


def parse(text: str, columns: Sequence[str], setting: str) -> Expression:
    """The expression of a text. RequestError for what is none, or reads a name that is none of ``columns``."""
    if not isinstance(text, str) or not text.strip() or len(text) > LONGEST:
        raise RequestError(f"{setting}={str(text)[:60]!r} must be an expression, such as 'tp <= 8'")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise RequestError(f"{setting}: {text!r} is no expression; write {WHAT}") from None
    _check(tree, text, setting, 0)
    names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    for name in sorted(names):
        if name not in columns:
            raise RequestError(f"{setting}: {text!r} has an unknown name {name!r}; {nearest(name, columns)}")
    return Expression(text, tree, names)


def _check(node: ast.AST, text: str, setting: str, depth: int) -> None:
    """RequestError for a node of another kind than the few that are known."""
    parts: Sequence[ast.AST] = ()
    allowed = depth <= DEEPEST
    if isinstance(node, ast.BoolOp):
        parts = node.values
    elif isinstance(node, ast.UnaryOp):
        allowed, parts = allowed and isinstance(node.op, (ast.Not, ast.USub)), [node.operand]
    elif isinstance(node, ast.BinOp):
        allowed, parts = allowed and type(node.op) in ARITHMETIC, [node.left, node.right]
    elif isinstance(node, ast.Compare):
        allowed = allowed and all(type(op) in COMPARISONS or isinstance(op, (ast.In, ast.NotIn)) for op in node.ops)
        parts = [node.left, *node.comparators]
    elif isinstance(node, (ast.List, ast.Tuple)):
        parts = node.elts
    elif isinstance(node, ast.Constant):
        allowed = allowed and isinstance(node.value, (bool, int, float, str))
    else:
        allowed = allowed and isinstance(node, ast.Name)
    if not allowed:
        raise RequestError(f"{setting}: {text!r} holds what rules cannot ({_shown(node)}); write {WHAT}")
    for child in parts:
        _check(child, text, setting, depth + 1)


def _shown(node: ast.AST) -> str:
    return ast.unparse(node)[:40] if isinstance(node, ast.expr) else type(node).__name__


def _value(node: ast.expr, columns: Columns) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return columns[node.id]
    if isinstance(node, ast.BoolOp):
        join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
        return reduce(join, [np.asarray(_value(operand, columns)).astype(bool) for operand in node.values])
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand, columns)
        return np.logical_not(value) if isinstance(node.op, ast.Not) else np.negative(value)
    if isinstance(node, ast.BinOp):
        return ARITHMETIC[type(node.op)](_value(node.left, columns), _value(node.right, columns))
    assert isinstance(node, ast.Compare)
    sides = [node.left, *node.comparators]
    both = [_compared(op, *pair, columns) for op, pair in zip(node.ops, pairwise(sides), strict=True)]
    return reduce(np.logical_and, both)


def _compared(op: ast.cmpop, first: ast.expr, right: ast.expr, columns: Columns) -> Any:
    value = _value(first, columns)
    if not isinstance(op, (ast.In, ast.NotIn)):
        return COMPARISONS[type(op)](value, _value(right, columns))
    if not isinstance(right, (ast.List, ast.Tuple)):
        raise TypeError("`in` needs a list, such as tp in [4, 8]")
    matches = np.asarray(False)
    for choice in right.elts:
        matches = np.logical_or(matches, value == _value(choice, columns))
    return np.logical_not(matches) if isinstance(op, ast.NotIn) else matches


def contradiction(expressions: Sequence[Expression]) -> tuple[str, str] | None:
    """Two expressions of which no value can meet both, as simple comparisons of a name with a number show it."""
    least: dict[str, tuple[float, bool, str]] = {}
    most: dict[str, tuple[float, bool, str]] = {}
    for expression in expressions:
        for name, sign, bound in _simple(expression.tree):
            limit = bound, isinstance(sign, (ast.Lt, ast.Gt)), expression.text
            if isinstance(sign, (ast.Gt, ast.GtE, ast.Eq)):
                least[name] = max(least.get(name, limit), limit, key=lambda at: (at[0], at[1]))
            if isinstance(sign, (ast.Lt, ast.LtE, ast.Eq)):
                most[name] = min(most.get(name, limit), limit, key=lambda at: (at[0], not at[1]))
    for name in least.keys() & most.keys():
        low, high = least[name], most[name]
        if low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1])):
            return low[2], high[2]
    return None


def ceilings(expressions: Sequence[Expression], name: str) -> list[tuple[str, float]]:
    """The texts and figures of those that let a name be no more than a figure."""
    upper = (ast.Lt, ast.LtE, ast.Eq)
    return [
        (expression.text, most)
        for expression in expressions
        for limited, sign, most in _simple(expression.tree)
        if limited == name and isinstance(sign, upper)
    ]


FLIPPED: dict[type, type] = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE, ast.Eq: ast.Eq}


def _simple(tree: ast.expr) -> list[tuple[str, ast.cmpop, float]]:
    """The comparisons of a name with a number that must hold for the whole to hold."""
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        return [limits for operand in tree.values for limits in _simple(operand)]
    if not isinstance(tree, ast.Compare):
        return []
    sides, limits = [tree.left, *tree.comparators], []
    for op, near, far in zip(tree.ops, sides, sides[1:], strict=False):
        if isinstance(near, ast.Name) and (bound := _number(far)) is not None:
            limits.append((near.id, op, bound))
        elif isinstance(far, ast.Name) and (bound := _number(near)) is not None and type(op) in FLIPPED:
            limits.append((far.id, FLIPPED[type(op)](), bound))
    return limits


def _number(node: ast.expr) -> float | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    is_number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
    return float(node.value) if is_number else None  # type: ignore[attr-defined]
