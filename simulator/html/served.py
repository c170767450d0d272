"""The page of a search over ways to serve: the front of speed against use, the ranked table, one change of the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import colours, units
from .charts import figure, hover, rounded
from .page import Card, Cell, Column, Figure, Page, PageSection, Part, Table
from .search import TIES, left_section, sensitivity_section

AXES = {  # figures that a picture may have as an axis -> heading
    "tokens_per_s_per_gpu": "output tokens/s per GPU",
    "tokens_per_s_per_user": "output tokens/s per user",
    "tokens_per_s": "output tokens/s",
    "goodput": "requests/s that have all of slo",
    "ttft_ms": "TTFT, ms",
    "tpot_ms": "TPOT, ms",
    "e2e_ms": "end to end, ms",
    "cost_per_million_tokens": "cost of a million tokens",
    "devices": "GPUs",
}
Row = Mapping[str, Any]
Named = Callable[[Row], str]


def page(found: Mapping[str, Any], rows: Sequence[Row], plotted: Sequence[str], named: Named) -> Page:
    """Everything the page shows of a search's plain values and all its ``rows``.

    ``plotted`` are the figures of its objectives, ``named`` says a way to serve in short.
    """
    best = found["best"][0]
    made = [front_section(found, rows, plotted, named), best_section(found, named), sensitivity_section(found)]
    return Page(
        title=f"{found['model']}: the best of {units.count(found['points'])} ways to serve",
        subtitle=f"{named(best)}, on {units.count(best['devices'])} GPUs",
        facts=(
            f"ranked by {found['objectives'][0]}",
            f"{units.count(found['evaluated'])} looked at, {units.count(found['pruned'])} left out",
            *found["constraints"],
        ),
        cards=tuple(cards(found)),
        sections=(*(section for section in made if section is not None), left_section(found, named)),
    )


def cards(found: Mapping[str, Any]) -> list[Card]:
    """Headlines of the best way to serve."""
    best = found["best"][0]
    return [
        Card("For GPUs", (("tokens/s each", units.count(best["tokens_per_s_per_gpu"])),)),
        Card("For users", (("tokens/s each", f"{best['tokens_per_s_per_user']:.1f}"),)),
        Card("First token", (("", units.duration(best["ttft_ms"] * 1e3)),), (("mean, in steady state", ""),)),
        Card("Ties", (("", units.count(found["ties"])),), (("of others", "as good within the noise floor"),)),
    ]


def front_section(
    found: Mapping[str, Any], rows: Sequence[Row], plotted: Sequence[str], named: Named
) -> PageSection | None:
    """All points and the front of the first two objectives; None with one objective."""
    pair = [*dict.fromkeys(name for name in plotted if name in AXES)][:2][::-1]
    if len(pair) < 2:
        return None
    kinds = {"together": ("one pool", "green"), "apart": ("pools apart", "violet")}
    data = [
        dots(said, [row for row in rows if row["pools"] == pools], pair, named, {"size": 6, "opacity": 0.4})
        | {"marker": {"size": 6, "opacity": 0.4, "color": colours.css(colour)}}
        for pools, (said, colour) in kinds.items()
    ]
    line = {"mode": "lines+markers", "line": {"color": colours.css("blue"), "width": 1.5, "dash": "dot"}}
    front = sorted(found["pareto"], key=lambda row: row[pair[0]])
    data.append(dots("front", front, pair, named, {"size": 9, "color": colours.css("blue")}) | line)
    star = {"size": 13, "symbol": "star", "color": colours.css("orange")}
    data.append(dots("best", found["best"][:1], pair, named, star))
    axes = {f"{axis}axis": {"title": {"text": AXES[name]}} for axis, name in zip("xy", pair, strict=True)}
    text = (
        "Each point is a way to serve; point at one for its settings. No other is as good in all objectives as one of "
        "the front and better in one of them, among those that give users what they expect."
    )
    legend = {"orientation": "h", "y": 1.08}
    parts: list[Part] = [Figure("All ways to serve", {"": figure(data, 460, **axes, showlegend=True, legend=legend)})]
    return PageSection("front", "The front", text, tuple(parts))


def dots(name: str, rows: Sequence[Row], pair: Sequence[str], named: Named, marker: dict[str, Any]) -> dict[str, Any]:
    """Points of a picture, with what pointing at one says."""
    x, y = ([rounded(row[each]) for row in rows] for each in pair)
    hints = [
        hover(
            named(row),
            f"{row['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU, {row['tokens_per_s_per_user']:.1f} a user",
            f"TTFT {row['ttft_ms']:,.0f} ms, TPOT {row['tpot_ms']:.1f} ms, {row['requests_per_s']:.2f} requests/s",
        )
        for row in rows
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": x,
        "y": y,
        "marker": marker,
        "text": hints,
        "hovertemplate": "%{text}<extra></extra>",
    }


def best_section(found: Mapping[str, Any], named: Named) -> PageSection:
    """The best ways to serve, each with its times and why it is better than the next."""
    most = max(row["tokens_per_s_per_gpu"] for row in found["best"])
    columns = (
        Column(""),
        Column("way to serve", words=True),
        Column("GPUs"),
        Column("tokens/s/GPU"),
        Column("tokens/s/user"),
        Column("TTFT"),
        Column("TPOT"),
        Column("requests/s"),
        Column("KV", "share of the KV memory that is in use on average"),
        Column("tie", "with the row before", words=True),
        Column("better than the next", words=True),
    )
    rows = [
        (
            Cell(str(row["rank"])),
            Cell(named(row)),
            Cell(str(row["devices"])),
            Cell(units.count(row["tokens_per_s_per_gpu"]), bar=row["tokens_per_s_per_gpu"] / most),
            Cell(f"{row['tokens_per_s_per_user']:.1f}"),
            Cell(units.duration(row["ttft_ms"] * 1e3)),
            Cell(units.duration(row["tpot_ms"] * 1e3)),
            Cell(f"{row['requests_per_s']:.2f}"),
            Cell(f"{row['kv_share']:.0%}"),
            Cell(row["tie"], tone="fair" if row["tie"] else "", hint=TIES[row["tie"]]),
            Cell(row["reason"]),
        )
        for row in found["best"]
    ]
    text = "Ways to serve from best to worst. A tie says that nobody can tell a row from the one before it."
    return PageSection("best", "The best", text, (Table("Best ways to serve", columns, rows),))
