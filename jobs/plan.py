"""``opcast plan``: a whole training job, as tables, JSON or a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import resolve
from .composing import STEP_ADDED, STEP_CHOICE
from .show import BadInputError, print_json, say, show_answer, wants_json
from .writing import places, write_text

if TYPE_CHECKING:
    from ..simulator.html.page import Page
    from ..simulator.report.view import ViewTable

FREE_CHOICE, ADDED = STEP_CHOICE, ("faults", "fault_draw", *STEP_ADDED)


def run(config: dict[str, Any]) -> int:
    """Live through the job and print what came of it; returns the exit code."""
    from ..simulator.job.page import page
    from ..simulator.job.picture import draw_job
    from ..simulator.job.shown import headline, tables

    return answer("plan", config, "is no training job", page, draw_job, headline, tables)


def answer(
    verb: str,
    config: dict[str, Any],
    refused: str,
    page: Callable[[Any], Page],
    draw: Callable[[Any], str],
    headline: Callable[[Any], str],
    tables: Callable[[Any], Sequence[ViewTable]],
) -> int:
    """Ask the workbench by its method of this name, write what is asked for, and print; returns the exit code.

    ``refused`` says what is wrong with a workload that does not train.
    """
    as_json = wants_json(config)
    if (kind := config["workload"].get("kind")) != "train":
        raise BadInputError(f"workload={kind} {refused}: take workload=train")
    files = places(config, "report", "picture")
    report = getattr(resolve.bench(config), verb)(resolve.request_of(verb, config))
    if "report" in files:
        from ..simulator.html import write

        say(f"report: {write(page(report), files['report'])}")
    if "picture" in files:
        say(f"picture: {write_text('picture', files['picture'], draw(report))}")
    if as_json:
        print_json(report.to_dict())
    else:
        show_answer(headline(report), tables(report), report.notes)
    return 0
