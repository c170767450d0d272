"""``opcast posttrain``: post-training phase by phase, as tables, JSON or a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..simulator.post_training.answer import PostTrainReport
from . import resolve
from .show import BadInputError, print_json, say, show, wants_json
from .writing import check_place, write_text

FREE_CHOICE = {"device": "device.id", "model": "+model.path", "cluster": "+cluster.path"}
ADDED = ("faults", "fault_draw", "device.", "cluster.", "stack.", "options", "precision.quantization")


def run(config: dict[str, Any]) -> int:
    """Simulate the phases and print them; returns the exit code."""
    as_json = wants_json(config)
    if (kind := config["workload"].get("kind")) != "train":
        raise BadInputError(f"workload={kind} trains nothing: take workload=train")
    for name in ("report", "picture"):
        if config[name]:
            check_place(name, Path(str(config[name])))
    report = resolve.bench(config).posttrain(resolve.request_of("posttrain", config))
    if config["report"]:
        from ..simulator.post_training.page import write_page

        say(f"report: {write_page(report, Path(str(config['report'])))}")
    if config["picture"]:
        from ..simulator.post_training.picture import draw_phases

        say(f"picture: {write_text('picture', Path(str(config['picture'])), draw_phases(report))}")
    if as_json:
        print_json(report.to_dict())
    else:
        show_phases(report)
    return 0


def show_phases(report: PostTrainReport) -> None:
    """The report as tables."""
    from ..simulator.post_training.shown import headline, tables

    say(headline(report))
    for each in tables(report):
        show(each)
    for note in report.notes:
        say(note)
