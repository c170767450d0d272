"""The frozen split of published rows by their source: one half to choose mechanisms on, one that nobody looks into.

A source is in the half that a hash of its name says: it was drawn once, on 2026-11-26, and no later choice can move it.
The name of the table has no part in it, so that copies of a source are on the same side. A served run's source is its
model on its system (tables of them name each run apart). Rows of sources drawn as unseen had been looked at before that
day; mechanisms chosen after it are chosen on the other half.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

from .cells import Cells
from .rows import TruthTable

LOOKED_AT, UNSEEN = HALVES = ("looked_at", "unseen")


def half_of(source: str) -> str:
    """The half of :data:`HALVES` that a source is in."""
    return HALVES[sha256(source.encode()).digest()[0] % 2]


def source_of(cells: Cells, kind: str, table: str) -> str:
    """What a row's source is called: its table, where the row does not say."""
    if kind == "serving":
        model, system = (
            cells.text(name) or cells.text(other) for name, other in (("model", "model_canon"), ("gpu_canon", "gpu"))
        )
        return f"{model.rpartition('/')[2]} on {system}"
    return cells.text("source") or table


def only_half(table: TruthTable, half: str) -> TruthTable:
    """The rows of a table whose sources are in a half."""
    return replace(
        table,
        rows=tuple(row for row in table.rows if half_of(row.source) == half),
        unsupported=tuple(row for row in table.unsupported if half_of(row.source) == half),
        failed=tuple(row for row in table.failed if half_of(row.source) == half),
        by_outcome=tuple(row for row in table.by_outcome if half_of(row.source) == half),
    )
