"""The page of ``opcast data gain``: what measuring made better, by kind of op and by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import units
from .page import Cell, Column, Page, PageSection, Table

TONES = {"better": "good", "new": "good", "no better": "poor"}


def page(store: str, kinds: Sequence[Any], steps: Sequence[Any]) -> Page:
    """The page of some gains (``jobs.gain``)."""
    better = sum(row.verdict in ("better", "new") for row in kinds)
    sections = [PageSection("kinds", "Kinds of op", KINDS, (kinds_table(kinds),))]
    if steps:
        sections.append(PageSection("steps", "Steps", STEPS, (steps_table(steps),)))
    facts = (f"{sum(row.rows for row in kinds):,} rows", f"{better} of {len(kinds)} tables are better")
    return Page("What became better", store, facts, (), tuple(sections))


KINDS = (
    "Median error of one op. Before: without these rows. After: predictors trained with them, on rows that were left "
    "out. Inside: how many rows lie in the 90 % interval."
)
STEPS = "The same questions without these rows and with them. The interval is meant to hold 90 % of the truths."


def kinds_table(kinds: Sequence[Any]) -> Table:
    """A row for each kind, backend and device."""
    most = max([row.before_ape or 0.0 for row in kinds] + [row.after_ape or 0.0 for row in kinds] + [1e-9])
    columns = (*(Column(name, words=True) for name in ("op", "backend", "device")), Column("rows"), Column("before"))
    columns = (*columns, Column("inside"), Column("after"), Column("inside"), Column("", words=True))
    rows = [
        (
            *(Cell(text) for text in (row.kind, row.backend, row.device, f"{row.rows:,}")),
            *_error(row.before_ape, row.before_coverage, most),
            *_error(row.after_ape, row.after_coverage, most),
            Cell(row.verdict, TONES.get(row.verdict, "fair")),
        )
        for row in kinds
    ]
    return Table("", columns, rows)


def steps_table(steps: Sequence[Any]) -> Table:
    """A row for each step."""
    columns = (Column("step", words=True), *(Column(name) for name in ("before", "interval", "after", "interval")))
    return Table("", columns, [(Cell(row.step), *_time(row.before_ms), *_time(row.after_ms)) for row in steps])


def _error(ape: float | None, coverage: float | None, most: float) -> tuple[Cell, Cell]:
    if ape is None or coverage is None:
        return Cell("none"), Cell("")
    return Cell(f"{ape:.1f} %", bar=ape / most), Cell(units.share(coverage))


def _time(answer: tuple[float, float, float] | None) -> tuple[Cell, Cell]:
    if answer is None:
        return Cell("no answer"), Cell("")
    value, low, high = (1e3 * seconds for seconds in answer)
    return Cell(units.duration(value)), Cell(units.duration_range(low, high))
