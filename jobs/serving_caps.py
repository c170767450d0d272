"""``opcast serving caps``: joules of an output token against latency under power caps, as a table or a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..simulator.report.view import CURRENCY
from ..simulator.serving.caps import caps_table, caps_values, serving_caps
from ..simulator.serving.caps_picture import CapPoint, draw_caps
from .questions import as_list
from .show import BadInputError, print_json, say, show
from .writing import write_text

if TYPE_CHECKING:
    from ..simulator.question.serving import ServingRequest
    from ..simulator.serving.capacity import Apply
    from ..simulator.workbench import Workbench


def run(config: Mapping[str, Any], request: ServingRequest, bench: Workbench, apply: Apply, as_json: bool) -> int:
    """Serve under each cap and print; returns the exit code."""
    node_w, pue = config["node_w"], config["pue"]
    rows = serving_caps(request, as_list(config["power_caps_w"]), node_w, pue, bench, apply)
    if config["picture"]:
        model = "served traffic" if request.step is None else getattr(request.step.model, "name", request.step.model)
        if not all(row.report.tpot_ms.count for row in rows):
            raise BadInputError("picture= draws TPOT, and answers of one token have none: leave it out")
        title = f"{model}: the same traffic under power caps"
        points = [
            CapPoint(f"{row.cap_w:g} W" if row.cap_w else "no cap", row.report.tpot_ms.p90, row.joules, row.front)
            for row in rows
        ]
        say(f"picture: {write_text('picture', Path(str(config['picture'])), draw_caps(title, points))}")
    if as_json:
        print_json(caps_values(rows, node_w, pue))
        return 0
    show(caps_table(rows))
    if any(row.report.cost_per_million_tokens is not None for row in rows):
        say(f"`cost of 1M` is of a million output tokens, {CURRENCY}")
    if not node_w or pue == 1.0:
        say("`with all` has no hosts without node_w=…, and no cooling without pue=…")
    for note in dict.fromkeys(note for row in rows for note in row.report.notes):
        say(note)
    return 0
