"""``opcast compare chips``: one workload on several chips and power caps, as a table or JSON."""

from __future__ import annotations

from typing import Any

from ..datasets.loading import choice
from ..simulator.chips.answer import ChipsReport, table
from . import resolve
from .composing import STEP_ADDED, STEP_CHOICE
from .show import BadInputError, print_json, show_answer, wants_json

SUBJECT = "what"
FREE_CHOICE = STEP_CHOICE
ADDED = ("faults", "fault_draw", *STEP_ADDED, "precision.kv_dtype", "prices.")


def run(config: dict[str, Any]) -> int:
    """Compare and print; returns the exit code."""
    choice(BadInputError, "what", config["what"], ("chips",))
    as_json = wants_json(config)
    report: ChipsReport = resolve.bench(config).compare_chips(resolve.request_of("compare", config))
    if as_json:
        print_json(report.to_dict())
        return 0
    show_answer("", [table(report)], report.notes)
    return 0
