"""``opcast posttrain``: post-training phase by phase, as tables, JSON or a page."""

from __future__ import annotations

from typing import Any

from . import plan

FREE_CHOICE, ADDED = plan.FREE_CHOICE, plan.ADDED


def run(config: dict[str, Any]) -> int:
    """Simulate the phases and print them; returns the exit code."""
    from ..simulator.post_training.page import page
    from ..simulator.post_training.picture import draw_phases
    from ..simulator.post_training.shown import headline, tables

    return plan.answer("posttrain", config, "trains nothing", page, draw_phases, headline, tables)
