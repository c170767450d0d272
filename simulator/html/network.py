"""The page of transfers on the links of a cluster: how long, over which links, how full they are when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...datasets.counts import counted
from ..network.picture import draw_svg
from ..report.answer import OpPrediction
from ..report.link_tables import transfer_table
from . import units
from .links import links_section, time_section
from .page import Card, Page, PageSection, drawn_table


def page(prediction: OpPrediction) -> Page:
    """Everything the page shows of a prediction whose ``network`` says what links did."""
    network, single = prediction.network, len(prediction.network.get("transfers", ())) == 1
    links = links_section(
        network, draw_svg(*prediction.placed) if prediction.placed else "", "the transfer" if single else "all of it"
    )
    candidates = transfers_section(network), links, time_section(network)
    faults = [fault["where"] for fault in network.get("faults", ())]
    facts = (str(network.get("topology", "")), f"{network['fidelity']}, {units.count(network.get('links'))} links")
    return Page(
        title=title(prediction),
        subtitle=f"on {prediction.device}, simulated",
        facts=(*facts, *([f"with faults at {', '.join(faults)}"] if faults else [])),
        cards=tuple(cards(prediction)),
        sections=tuple(section for section in candidates if section is not None),
        caption="",
    )


def title(prediction: OpPrediction) -> str:
    """What was asked, in a few words."""
    if prediction.op["kind"] == "transfers":
        return counted(prediction.op["count"], "transfer")
    size = units.with_prefix(prediction.op["size_bytes"], "B")
    return f"{prediction.op['kind']}: {size} over {counted(prediction.op['ranks'], 'device')}"


def cards(prediction: OpPrediction) -> list[Card]:
    """Headlines: time and bandwidth."""
    interval = (
        "interval",
        f"{units.duration_range(prediction.low_us, prediction.high_us)} ({prediction.coverage:.0%})",
    )
    cards_shown = [
        Card("Time", (("", units.duration(prediction.latency_us)),), (interval, ("answered by", prediction.engine)))
    ]
    if "busbw_gbps" in prediction.network:
        rate = units.with_prefix(prediction.network["busbw_gbps"] * 1e9, "B/s")
        lines = (
            ("algbw", units.with_prefix(prediction.network["algbw_gbps"] * 1e9, "B/s")),
            ("algorithm", str(prediction.network.get("algorithm", ""))),
        )
        cards_shown.append(Card("Bus bandwidth", (("", rate),), lines))
    if "stretch" in prediction.network:
        text = "times as long as on a switch that never blocks"
        cards_shown.append(Card("Stretch", (("", f"{prediction.network['stretch']:.3f}"),), (("", text),)))
    return cards_shown


def transfers_section(network: Mapping[str, Any]) -> PageSection | None:
    """Each transfer with its times and bandwidths."""
    if not (table := transfer_table(network)).rows:
        return None
    text = "When each transfer starts and ends, all sharing the links."
    return PageSection("transfers", "Transfers", text, (drawn_table(table, "Transfers"),))
