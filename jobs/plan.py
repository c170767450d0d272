"""``opcast plan``: a whole training job, as tables, JSON or a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..simulator.job.answer import PlanReport
from . import resolve
from .show import BadInputError, print_json, say, show, wants_json
from .writing import check_place, write_text

FREE_CHOICE = {"device": "device.id", "model": "+model.path", "cluster": "+cluster.path"}
ADDED = ("faults", "fault_draw", "device.", "cluster.", "stack.", "options", "precision.quantization")


def run(config: dict[str, Any]) -> int:
    """Live through the job and print what came of it; returns the exit code."""
    as_json = wants_json(config)
    if (kind := config["workload"].get("kind")) != "train":
        raise BadInputError(f"workload={kind} is no training job: take workload=train")
    for name in ("report", "picture"):
        if config[name]:
            check_place(name, Path(str(config[name])))
    report = resolve.bench(config).plan(resolve.request_of("plan", config))
    if config["report"]:
        from ..simulator.job.page import write_page

        say(f"report: {write_page(report, Path(str(config['report'])))}")
    if config["picture"]:
        from ..simulator.job.picture import draw_job

        say(f"picture: {write_text('picture', Path(str(config['picture'])), draw_job(report))}")
    if as_json:
        print_json(report.to_dict())
    else:
        show_plan(report)
    return 0


def show_plan(report: PlanReport) -> None:
    """The report as tables."""
    from ..simulator.job.shown import headline, tables

    say(headline(report))
    for each in tables(report):
        show(each)
    for note in report.notes:
        say(note)
