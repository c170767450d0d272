"""``opcast posttrain``: post-training phase by phase, as tables, JSON or a page."""

from __future__ import annotations

from typing import Any

from . import resolve
from .composing import STEP_ADDED, STEP_CHOICE
from .show import BadInputError, print_json, say, show_answer, wants_json
from .writing import places, write_text

FREE_CHOICE, ADDED = STEP_CHOICE, ("faults", "fault_draw", *STEP_ADDED)


def run(config: dict[str, Any]) -> int:
    """Simulate the phases and print them; returns the exit code."""
    as_json = wants_json(config)
    if (kind := config["workload"].get("kind")) != "train":
        raise BadInputError(f"workload={kind} trains nothing: take workload=train")
    files = places(config, "report", "picture")
    report = resolve.bench(config).posttrain(resolve.request_of("posttrain", config))
    if "report" in files:
        from ..simulator.html import write
        from ..simulator.post_training.page import page

        say(f"report: {write(page(report), files['report'])}")
    if "picture" in files:
        from ..simulator.post_training.picture import draw_phases

        say(f"picture: {write_text('picture', files['picture'], draw_phases(report))}")
    if as_json:
        print_json(report.to_dict())
    else:
        from ..simulator.post_training.shown import headline, tables

        show_answer(headline(report), tables(report), report.notes)
    return 0
