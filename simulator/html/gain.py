"""The page of ``opcast data gain``: what measuring made better, by kind of op and by step."""

from __future__ import annotations

from ..report.view import ViewTable
from .page import Page, PageSection, drawn_table

KINDS = (
    "Median error of one op. Before: without these rows. After: predictors trained with them, on rows that were left "
    "out. Inside: how many rows lie in the 90 % interval."
)
STEPS = "The same questions without these rows and with them. The interval is meant to hold 90 % of the truths."


def page(store: str, facts: tuple[str, ...], kinds: ViewTable, steps: ViewTable) -> Page:
    """The page of what became better by kind and, where there are any, by step (``jobs.gain``)."""
    sections = [PageSection("kinds", "Kinds of op", KINDS, (drawn_table(kinds, ""),))]
    if steps.rows:
        sections.append(PageSection("steps", "Steps", STEPS, (drawn_table(steps),)))
    return Page("What became better", store, facts, (), tuple(sections))
