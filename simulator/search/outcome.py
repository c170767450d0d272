"""What a search has found so far: rows with their figures, and how many points were left out for which reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..question.canonical import RequestError
from .expressions import Columns, Expression
from .result import Left

Row = dict[str, Any]
OK = "evaluated"  # the status of a row that was timed
At = Callable[[int], Row]


@dataclass
class SearchOutcome:
    """Rows, why points were left out, and those of them that were listed: where they are, and why."""

    rows: list[Row] = field(default_factory=list)
    pruned: dict[str, Left] = field(default_factory=dict)
    listed: list[tuple[At, int, str, str]] = field(default_factory=list)

    def leave(self, reason: str, example: Mapping[str, Any], why: str, count: int = 1) -> None:
        """Note points that are left out for a reason; the first of them is its example."""
        entry = self.pruned.get(reason) or Left(0, dict(example), why)
        self.pruned[reason] = Left(entry.count + count, entry.example, entry.why)

    def leave_all(self, reason: str, places: np.ndarray, at: At, why: Callable[[int], str]) -> None:
        """Note the points at some places that are left out for a reason."""
        for position in places.tolist():
            self.listed.append((at, position, reason, why(position)))
        if len(places):
            first = int(places[0])
            self.leave(reason, at(first), why(first), len(places))

    def add(self, rows: Sequence[Row], axes: Sequence[str]) -> None:
        """Note rows; those that were not timed are left out for their status."""
        self.rows += rows
        for row in rows:
            if row["status"] != OK:
                self.leave(row["status"], {name: row[name] for name in axes}, row["why"])

    def left(self) -> list[Row]:
        """Rows of the points that were listed and left out."""
        return [{**at(position), "status": reason, "why": why} for at, position, reason, why in self.listed]

    @property
    def timed(self) -> list[Row]:
        """Rows that were simulated in full."""
        return [row for row in self.rows if row["status"] == OK]

    @property
    def count(self) -> int:
        """Points that were left out."""
        return sum(entry.count for entry in self.pruned.values())


def after_rules(rules: Sequence[Expression], columns: Columns, at: At, outcome: SearchOutcome) -> np.ndarray:
    """Whether points meet all rules [points]; those that do not are noted. RequestError where none does."""
    count = len(next(iter(columns.values())))
    passing = np.ones(count, dtype=bool)
    for rule in rules:
        holds = rule.holds(columns)
        if not holds.any():
            raise RequestError(f"the space is empty: none of {count:,} points meets the rule {rule.text!r}")
        outcome.leave_all(f"rule: {rule.text}", np.flatnonzero(passing & ~holds), at, lambda _: "it does not hold")
        passing &= holds
        if not passing.any():
            raise RequestError(f"the space is empty: no point meets {rule.text!r} and the rules before it")
    return passing


def fitting_together(
    requirements: Mapping[str, np.ndarray], count: int, noun: str
) -> tuple[np.ndarray, dict[str, int]]:
    """Whether combinations meet all requirements [combinations], and how many of them each one left out.

    RequestError where nothing is left, with the requirement that no combination met, or that left out the last.
    """
    passing = np.ones(count, dtype=bool)
    left_out: dict[str, int] = {}
    for what, holds in requirements.items():
        lost = int((passing & ~holds).sum())
        if lost:
            left_out[what] = lost
        passing &= holds
        if not passing.any():
            raise RequestError(f"the space is empty: of {count:,} {noun} none is left after: {what}")
    return passing, left_out
