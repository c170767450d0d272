"""``opcast compare chips``: one workload on several chips and power caps, as a table or JSON."""

from __future__ import annotations

from typing import Any

from ..datasets.loading import choice
from ..simulator.chips.answer import ChipsReport, table
from . import resolve
from .show import BadInputError, print_json, show_answer, wants_json

SUBJECT = "what"
FREE_CHOICE = {"device": "device.id", "model": "+model.path", "cluster": "+cluster.path"}
ADDED = (
    *("faults", "fault_draw", "device.", "cluster.", "stack.", "options", "prices."),
    *("precision.quantization", "precision.kv_dtype"),
)


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
