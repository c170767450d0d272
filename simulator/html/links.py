"""Links of a fabric as sections of a page: coloured by load, the fullest over time, what faults do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import colours, units
from .charts import figure, hover, rounded
from .page import Cell, Column, Figure, Legend, Picture, Section, Table

HUES = ("blue", "orange", "green", "red", "purple", "cyan", "brown", "pink", "lime", "indigo")


def links_section(links: Mapping[str, Any], svg: str, whole: str = "the step") -> Section | None:
    """The fabric coloured by load over the ``whole``, its fullest links, and what faults do."""
    if not svg and not links.get("hot_links"):
        return None
    text = (
        f"How much of each link's capacity {whole} uses, from blue to red and thicker with load. Point at a link for "
        "its name and share."
    )
    if links.get("contention_s", 0.0) > 0:
        text += f" Sharing links costs {units.duration(links['contention_s'] * 1e6)} of {whole}."
    parts: list[Picture | Table] = [Picture("The fabric by load", svg)] if svg else []
    fullest = links.get("hot_links", ())
    if fullest:
        most = max(each["busy"] for each in fullest)
        columns: tuple[Column, ...] = (Column("link", words=True), Column("busy", "share of its capacity"))
        listed: list[tuple[Cell, ...]] = [
            (Cell(each["link"]), Cell(units.share(each["busy"]), bar=each["busy"] / most)) for each in fullest
        ]
        if all("peak" in each for each in fullest):
            columns = (*columns, Column("peak", "in its fullest hundredth of the time"))
            listed = [(*row, Cell(units.share(each["peak"]))) for row, each in zip(listed, fullest, strict=True)]
        parts.append(Table("Fullest links", columns, listed))
    study = links.get("faults_study")
    if study:
        columns = Column("share of samples", words=True), Column("time", f"times {whole} without these faults")
        rows = [(Cell(name), Cell(f"{value:.4f}x")) for name, value in study["slowdown"].items()]
        parts.append(Table(f"{whole.capitalize()} with faults, {study['trials']} samples", columns, rows))
        rows = [(Cell(each["where"]), Cell(f"{each['slowdown']:.4f}x")) for each in study["critical"]]
        parts.append(
            Table("Most critical links", (Column("link", words=True), Column("time", "mean of its samples")), rows)
        )
    return Section("links", "The network", text, tuple(parts))


def time_section(network: Mapping[str, Any]) -> Section | None:
    """How full the fullest links are over time."""
    over = network.get("over_time", {})
    if not over.get("links"):
        return None
    divisor, unit = units.duration_unit(over["span_us"] * max(len(each) for each in over["links"].values()))
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "line": {"shape": "hv", "color": colours.css(hue), "width": 1.5},
            "legendgroup": name,
            "meta": {"name": name, "place": place},
            "x": [rounded(at * over["span_us"] / divisor) for at in range(len(shares))],
            "y": [rounded(100.0 * share) for share in shares],
            "hovertext": [hover(name, f"{share:.0%} busy") for share in shares],
            "hoverinfo": "text",
        }
        for place, (hue, (name, shares)) in enumerate(zip(HUES, over["links"].items(), strict=False))
    ]
    axes = {"xaxis": {"ticksuffix": f"\u00a0{unit}"}, "yaxis": {"ticksuffix": "\u00a0%", "rangemode": "tozero"}}
    chart = figure(data, height=320, **axes)
    text = "Share of its capacity that each of the fullest links carries, from the first byte to the last."
    return Section("time", "Links over time", text, (Figure("Load of the fullest links", {"": chart}), Legend()))
