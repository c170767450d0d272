"""``opcast serving caps``: joules of an output token against latency under power caps, as a table or a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..simulator.serving.caps import ServedCap, caps_values, serving_caps
from ..simulator.serving.caps_picture import CapPoint, draw_caps
from .questions import as_list
from .serving_tables import time_ms
from .show import BadInputError, print_json, say, table
from .simulate import CURRENCY
from .writing import write_text

if TYPE_CHECKING:
    from ..simulator.question.serving import ServingRequest
    from ..simulator.serving.capacity import Apply
    from ..simulator.workbench import Workbench

HEADS = ("cap, W", "TTFT p50", "p90", "TPOT p50", "p90", "tokens/s", "slo", "W a GPU", "J a token", "with all")


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
    costs = [row.report.cost_per_million_tokens for row in rows]
    priced = any(cost is not None for cost in costs)
    lines = [
        (*shown(row), *(["" if cost is None else f"{cost:,.4g}"] if priced else []), mark(row))
        for row, cost in zip(rows, costs, strict=True)
    ]
    heads = (*HEADS, *(["cost of 1M"] if priced else []), "")
    table("joules of an output token against latency, milliseconds", heads, lines)
    if priced:
        say(f"`cost of 1M` is of a million output tokens, {CURRENCY}")
    if not node_w or pue == 1.0:
        say("`with all` has no hosts without node_w=…, and no cooling without pue=…")
    for note in dict.fromkeys(note for row in rows for note in row.report.notes):
        say(note)
    return 0


def shown(row: ServedCap) -> tuple[str, ...]:
    """A row for a person."""
    report = row.report
    return (
        "" if row.cap_w is None else f"{row.cap_w:g}",
        *(time_ms(value) for spread in (report.ttft_ms, report.tpot_ms) for value in (spread.p50, spread.p90)),
        f"{report.output_tokens_per_s:,.0f}",
        f"{report.slo_attainment:.1%}",
        f"{report.power_w:.0f}",
        f"{row.gpu_joules:.3g}",
        f"{row.joules:.3g}",
    )


def mark(row: ServedCap) -> str:
    """Whether no other cap is better in both, or the traffic is too much for it."""
    return "front" if row.front else "overload" if row.report.overload else ""
