"""Links of a fabric as sections of a page: coloured by load, the fullest over time, what faults do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...datasets.counts import counted
from ..report.link_tables import critical_table, fullest_table, slowdown_table
from . import units
from .charts import curve, figure, hover
from .page import Figure, Legend, PageSection, Part, Picture, drawn_table

HUES = ("blue", "orange", "green", "red", "purple", "cyan", "brown", "pink", "lime", "indigo")


def links_section(links: Mapping[str, Any], svg: str, subject: str = "the step") -> PageSection | None:
    """The fabric coloured by its load over the ``subject`` (as a sentence names it), its fullest links, its faults."""
    if not svg and not links.get("hot_links"):
        return None
    text = (
        f"How much of each link's capacity {subject} uses, from blue to red and thicker with load; the scale says what "
        "red is. Point at a link for its name and share."
    )
    if "apart_s" in links:
        text += (
            " All communication is on these links at once, as in RAPID-LLM's flattened mode. With links of its own for "
            f"each, as in its hierarchical mode, {subject} takes {units.duration(links['apart_s'] * 1e6)}."
        )
    if links.get("contention_s", 0.0) > 0:
        text += f" Sharing links costs {units.duration(links['contention_s'] * 1e6)} of {subject}."
    parts: list[Part] = [Picture("The fabric by load", svg)] if svg else []
    if links.get("hot_links"):
        parts.append(drawn_table(fullest_table(links, subject), "Fullest links"))
    if links.get("faults_study"):
        parts += _fault_study(links["faults_study"], subject)
    return PageSection("links", "The network", text, tuple(parts))


def _fault_study(study: Mapping[str, Any], subject: str) -> list[Part]:
    """How many samples take how much longer with faults, and the places that matter most."""
    slowdowns = [sample for sample in study["samples"] if sample is not None]
    count = len(study["samples"])
    shares = [(index + 1) / count for index in range(len(slowdowns))]
    hints = [
        hover(f"{share:.0%} of samples", f"take at most {slowdown:.3f} times as long")
        for share, slowdown in zip(shares, slowdowns, strict=True)
    ]
    marks = {"mode": "lines+markers", "marker": {"size": 4}, "hovertext": hints, "hoverinfo": "text"}
    steps = curve(slowdowns, [100.0 * share for share in shares], "red", {"shape": "hv"}, **marks)
    axes = {"xaxis": {"ticksuffix": "\u00a0x"}, "yaxis": {"ticksuffix": "\u00a0%", "range": [0, 102]}}
    title = f"{subject.capitalize()} with faults, {counted(study['trials'], 'sample')}"
    pictures = (
        [Figure(f"{title}: how many take at most so long", {"": figure([steps], height=260, **axes)})]
        if slowdowns
        else []
    )
    return [
        *pictures,
        drawn_table(slowdown_table(study, subject), title),
        drawn_table(critical_table(study), "Most critical places"),
    ]


def time_section(network: Mapping[str, Any]) -> PageSection | None:
    """How full the fullest links are over time."""
    over_time = network.get("over_time", {})
    if not over_time.get("links"):
        return None
    divisor, unit = units.duration_unit(
        over_time["span_us"] * max(len(shares_of_link) for shares_of_link in over_time["links"].values())
    )
    data = [
        curve(
            [at * over_time["span_us"] / divisor for at in range(len(shares))],
            [100.0 * share for share in shares],
            hue,
            {"shape": "hv"},
            legendgroup=name,
            meta={"name": name, "place": index},
            hovertext=[hover(name, f"{share:.0%} busy") for share in shares],
            hoverinfo="text",
        )
        for index, (hue, (name, shares)) in enumerate(zip(HUES, over_time["links"].items(), strict=False))
    ]
    axes = {"xaxis": {"ticksuffix": f"\u00a0{unit}"}, "yaxis": {"ticksuffix": "\u00a0%", "rangemode": "tozero"}}
    chart = figure(data, height=320, **axes)
    text = "Share of its capacity that each of the fullest links carries, from the first byte to the last."
    return PageSection("time", "Links over time", text, (Figure("Load of the fullest links", {"": chart}), Legend()))
