"""Links of a fabric as sections of a page: coloured by load, the fullest over time, what faults do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import colours, units
from .charts import figure, hover, rounded
from .page import Cell, Column, Figure, Legend, PageSection, Part, Picture, Table

HUES = ("blue", "orange", "green", "red", "purple", "cyan", "brown", "pink", "lime", "indigo")


def links_section(links: Mapping[str, Any], svg: str, whole: str = "the step") -> PageSection | None:
    """The fabric coloured by load over the ``whole``, its fullest links, and what faults do."""
    if not svg and not links.get("hot_links"):
        return None
    text = (
        f"How much of each link's capacity {whole} uses, from blue to red and thicker with load. Point at a link for "
        "its name and share."
    )
    if links.get("contention_s", 0.0) > 0:
        text += f" Sharing links costs {units.duration(links['contention_s'] * 1e6)} of {whole}."
    parts: list[Part] = [Picture("The fabric by load", svg)] if svg else []
    fullest = links.get("hot_links", ())
    if fullest:
        most = max(each["busy"] for each in fullest)
        columns = (
            Column("link", words=True),
            Column("as full", "links of its kind, itself too"),
            Column("busy", "share of its capacity"),
            Column("peak", "in its fullest hundredth of the time"),
        )
        listed = [
            (
                Cell(each["link"]),
                Cell(units.count(each["alike"])),
                Cell(units.share(each["busy"]), bar=each["busy"] / most),
                Cell(units.share(each["peak"])),
            )
            for each in fullest
        ]
        parts.append(Table("Fullest links", columns, listed))
    if links.get("faults_study"):
        parts += _study(links["faults_study"], whole)
    return PageSection("links", "The network", text, tuple(parts))


def _study(study: Mapping[str, Any], whole: str) -> list[Part]:
    """How many samples take how much longer with faults, and the places that matter most."""
    reached = [each for each in study["samples"] if each is not None]
    count = len(study["samples"])
    shares = [(place + 1) / count for place in range(len(reached))]
    curve = {
        "type": "scatter",
        "mode": "lines+markers",
        "line": {"shape": "hv", "color": colours.css("red"), "width": 1.5},
        "marker": {"size": 4},
        "x": [rounded(each) for each in reached],
        "y": [rounded(100.0 * share) for share in shares],
        "hovertext": [
            hover(f"{share:.0%} of samples", f"take at most {each:.3f} times as long")
            for share, each in zip(shares, reached, strict=True)
        ],
        "hoverinfo": "text",
    }
    axes = {"xaxis": {"ticksuffix": "\u00a0x"}, "yaxis": {"ticksuffix": "\u00a0%", "range": [0, 102]}}
    title = f"{whole.capitalize()} with faults, {study['trials']} samples"
    columns = Column("share of samples", words=True), Column("time", f"times {whole} without these faults")
    rows = [(Cell(name), Cell(_times(value))) for name, value in study["slowdown"].items()]
    if study["partitioned"]:
        rows.append((Cell("cut off"), Cell(f"{study['partitioned']} of {count}")))
    most = max([each["slowdown"] - 1.0 for each in study["critical"] if each["slowdown"]], default=0.0)
    bars = [1.0 if each["slowdown"] is None else (each["slowdown"] - 1.0) / (most or 1.0) for each in study["critical"]]
    worst = [
        (Cell(each["where"]), Cell(_times(each["slowdown"]), bar=bar))
        for each, bar in zip(study["critical"], bars, strict=True)
    ]
    critical = Column("link or node", words=True), Column("time", "mean of its samples")
    drawn = (
        [Figure(f"{title}: how many take at most so long", {"": figure([curve], height=260, **axes)})]
        if reached
        else []
    )
    return [*drawn, Table(title, columns, rows), Table("Most critical places", critical, worst)]


def _times(slowdown: float | None) -> str:
    return "cut off" if slowdown is None else f"{slowdown:.4f}x"


def time_section(network: Mapping[str, Any]) -> PageSection | None:
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
    return PageSection("time", "Links over time", text, (Figure("Load of the fullest links", {"": chart}), Legend()))
