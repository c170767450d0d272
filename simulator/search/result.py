"""The answer of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..report.display import display_html
from ..report.step import plain
from ..report.view import ViewColumn, ViewTable, time_text
from .objectives import KNOWN


@dataclass(frozen=True)
class Left:
    """Points that were left out for one reason: how many, one of them, and what it says of it."""

    count: int
    example: Mapping[str, Any]
    why: str


@dataclass(frozen=True)
class SearchReport:
    """The best points of a space. ``evaluated`` were simulated in full, ``pruned`` left out (``pruned_by``: why).

    ``best`` are rows from best to worst by the first objective, each with its ``rank``, the ``tie`` with the one before
    it (``noise``, ``interval`` or empty) and the ``reason`` why it is better than the next; ``pareto`` the rows that no
    other beats in all objectives; ``sensitivity`` what a change of one axis of the best costs; ``measure_next`` what
    would settle ties. ``chips`` are the best rows of each cluster where several are searched. ``rows`` are all that was
    found, and ``slo_named`` whether users expect anything, for pictures and tables; JSON has them not.
    """

    model: str
    sampler: str
    objectives: tuple[str, ...]
    constraints: tuple[str, ...]
    axes: Mapping[str, list[Any]]
    combinations: int
    points: int
    left_out: Mapping[str, int]
    evaluated: int
    pruned: int
    pruned_by: Mapping[str, Left]
    best: tuple[Mapping[str, Any], ...]
    pareto: tuple[Mapping[str, Any], ...]
    ties: int
    sensitivity: tuple[Mapping[str, Any], ...]
    measure_next: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]
    wall_time_s: float
    rows: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    chips: tuple[Mapping[str, Any], ...] = ()
    slo_named: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; of all rows the best and those of the front are in it."""
        return plain(self, drop=("rows", "slo_named"))

    def _repr_html_(self) -> str:
        facts = [
            ("points", f"{self.points:,}"),
            ("looked at", f"{self.evaluated:,}"),
            ("left out", f"{self.pruned:,}"),
            ("tied with the best", f"{self.ties:,}"),
            ("took", time_text(1e6 * self.wall_time_s)),
        ]
        names = [KNOWN[name].figure for name in self.objectives]
        heads = ("", *self.axes, *(figure for figure in names if self.best and figure in self.best[0]), "tie", "reason")
        rows = [
            [str(row["rank"]), *(_cell(row.get(name, "")) for name in heads[1:-2]), row["tie"], row["reason"]]
            for row in self.best
        ]
        title = f"{self.model}: best by {self.objectives[0]}"
        view = ViewTable("", [ViewColumn(head) for head in heads], rows)
        return display_html(title, facts, view, " ".join(self.notes))

    def to_pandas(self) -> Any:
        """All rows that were found as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame([dict(row) for row in self.rows])


def _cell(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
