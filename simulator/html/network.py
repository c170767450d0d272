"""The page of transfers on the links of a cluster: how long, over which links, how full they are when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..network.picture import svg
from ..report.answer import OpPrediction
from . import units
from .links import links_section, time_section
from .page import Card, Cell, Column, Page, PageSection, Table


def page(found: OpPrediction) -> Page:
    """Everything the page shows of a prediction whose ``network`` says what links did."""
    network, single = found.network, len(found.network.get("transfers", ())) == 1
    links = links_section(
        network, svg(*found.placed) if found.placed else "", "the transfer" if single else "all of it"
    )
    made = transfers_section(network), links, time_section(network)
    faults = [each["where"] for each in network.get("faults", ())]
    facts = (str(network.get("topology", "")), f"{network['fidelity']}, {units.count(network.get('links'))} links")
    return Page(
        title=title(found),
        subtitle=f"on {found.device}, simulated",
        facts=(*facts, *([f"with faults at {', '.join(faults)}"] if faults else [])),
        cards=tuple(cards(found)),
        sections=tuple(section for section in made if section is not None),
        caption="",
    )


def title(found: OpPrediction) -> str:
    """What was asked, in a few words."""
    if found.op["kind"] == "transfers":
        return f"{found.op['count']} transfers"
    return f"{found.op['kind']}: {units.scaled(found.op['size_bytes'], 'B')} over {found.op['ranks']} devices"


def cards(found: OpPrediction) -> list[Card]:
    """Headlines: time and bandwidth."""
    interval = ("interval", f"{units.between(found.low_us, found.high_us)} ({found.coverage:.0%})")
    made = [Card("Time", (("", units.duration(found.latency_us)),), (interval, ("answered by", found.engine)))]
    if "busbw_gbps" in found.network:
        rate = units.scaled(found.network["busbw_gbps"] * 1e9, "B/s")
        lines = ("algbw", units.scaled(found.network["algbw_gbps"] * 1e9, "B/s")), ("algorithm", _algorithm(found))
        made.append(Card("Bus bandwidth", (("", rate),), lines))
    if "stretch" in found.network:
        text = "times as long as on a switch that never blocks"
        made.append(Card("Stretch", (("", f"{found.network['stretch']:.3f}"),), (("", text),)))
    return made


def _algorithm(found: OpPrediction) -> str:
    return str(found.network.get("algorithm", ""))


def transfers_section(network: Mapping[str, Any]) -> PageSection | None:
    """Each transfer with its times and bandwidths."""
    rows = [
        (
            Cell(each["name"]), Cell(each["collective"]), Cell(units.count(each["ranks"])), Cell(each["algorithm"]),
            Cell(units.duration(each["start_us"])), Cell(units.duration(each["end_us"])),
            Cell(units.three(each["algbw_gbps"])), Cell(units.three(each["busbw_gbps"])),
        )
        for each in network.get("transfers", ())
    ]  # fmt: skip
    if not rows:
        return None
    columns = (
        Column("transfer", words=True), Column("collective", words=True), Column("ranks"),
        Column("algorithm", words=True), Column("start"), Column("end"),
        Column("algbw", "GB/s of the buffer"), Column("busbw", "GB/s as nccl-tests counts them"),
    )  # fmt: skip
    text = "When each transfer starts and ends, all sharing the links."
    return PageSection("transfers", "Transfers", text, (Table("Transfers", columns, rows),))
