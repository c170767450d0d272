"""Which points are best: ranked by the first objective, ties declared, and the Pareto front of all objectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .expressions import Expression
from .objectives import KNOWN

EXACT = ("devices", "peak_gib")  # figures that are as they are said
Row = Mapping[str, Any]


def losses(rows: Sequence[Row], objectives: Sequence[str]) -> np.ndarray:
    """What each row has of each objective, less being better [rows, objectives]; a figure that is missing is worst."""
    loss = np.full((len(rows), len(objectives)), np.inf)
    for at, name in enumerate(objectives):
        figure, sign, *_ = KNOWN[name]
        loss[:, at] = [np.inf if row.get(figure) is None else sign * row[figure] for row in rows]
    return loss


def meeting(rows: Sequence[Row], constraints: Sequence[Expression]) -> list[Row]:
    """The rows that meet all constraints; one without the figure that is asked for does not."""
    if not rows or not constraints:
        return list(rows)
    passing = np.ones(len(rows), dtype=bool)
    for constraint in constraints:
        columns = {name: _column([row.get(name) for row in rows]) for name in constraint.names}
        passing &= constraint.holds(columns or {"": np.zeros(len(rows))})
    return [row for row, holds in zip(rows, passing.tolist(), strict=True) if holds]


def _column(values: Sequence[Any]) -> np.ndarray:
    if any(isinstance(value, str) for value in values):
        return np.array(values, dtype=object)
    return np.array([np.nan if value is None else value for value in values])


def ranked(rows: Sequence[Row], objectives: Sequence[str]) -> list[Row]:
    """The rows from best to worst: by the first objective, where that is the same by the next, else as they came."""
    loss = losses(rows, objectives)
    order = np.lexsort([np.arange(len(rows)), *loss.T[::-1]])
    return [rows[at] for at in order.tolist()]


def front(rows: Sequence[Row], objectives: Sequence[str]) -> list[Row]:
    """The rows that no other is at least as good as in all objectives and better in one, best first objective first.

    Of rows that are alike in all of them the first stays.
    """
    ordered = ranked(rows, objectives)
    return [ordered[at] for at in pareto(losses(ordered, objectives)).tolist()]


def pareto(loss: np.ndarray) -> np.ndarray:
    """Places of the rows that are not dominated, of rows in the order of their first column [rows, objectives]."""
    front: list[int] = []
    best = np.zeros((0, loss.shape[1]))
    for at, point in enumerate(loss):
        if not np.isfinite(point).all() or (best <= point).all(axis=1).any():
            continue
        front.append(at)
        best = np.vstack([best, point])
    return np.array(front, dtype=np.int64)


def dominated(lower: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Whether what a point can have at best is worse than a row that was found: in the first objective more than
    strictly, in the others at least as bad [points]; ``lower`` [points, objectives], ``rows`` [rows, objectives].
    """
    worse = np.zeros(len(lower), dtype=bool)
    for row in rows:
        worse |= (row <= lower).all(axis=1) & (row[0] < lower[:, 0])
    return worse


def tie(one: Row, other: Row, objective: str, noise_floor: float) -> str:
    """Why two rows cannot be told apart: ``noise`` (two runs of the same differ as much), ``interval`` or empty.

    Intervals of two layouts of one step share most of their error (the model, the chip, the framework), so that they
    say less of the difference than of either; a tie by ``interval`` is one that only a measurement settles.
    """
    figure = KNOWN[objective].figure
    ours, theirs = one.get(figure), other.get(figure)
    if ours is None or theirs is None:
        return ""
    if abs(ours - theirs) <= noise_floor * max(abs(ours), abs(theirs)):
        return "noise"
    relative = [interval(row) for row in (one, other)]
    if figure in EXACT or () in relative:
        return ""
    (low, high), (their_low, their_high) = relative
    overlap = max(ours * low, theirs * their_low) <= min(ours * high, theirs * their_high)
    return "interval" if overlap else ""


def interval(row: Row) -> tuple[float, ...]:
    """Low and high of a row's times by their value; empty where nothing is known of it."""
    if "low" in row:
        return row["low"], row["high"]
    return (row["low_s"] / row["step_time_s"], row["high_s"] / row["step_time_s"]) if "low_s" in row else ()
