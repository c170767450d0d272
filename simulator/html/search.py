"""The page of a search: the Pareto picture, the ranked table, what one change of the best costs, what was left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import colours, units
from .charts import figure, hover, rounded
from .page import Card, Cell, Column, Figure, Note, Page, PageSection, Part, Table

AXES = {  # figures that a picture may have as an axis -> (heading, factor)
    "step_time_s": ("step time, s", 1.0),
    "tokens_per_s": ("tokens/s", 1.0),
    "tokens_per_s_per_gpu": ("tokens/s per GPU", 1.0),
    "mfu": ("MFU, %", 100.0),
    "cost": ("cost of a step", 1.0),
    "energy_j": ("energy of a step, MJ", 1e-6),
    "peak_gib": ("peak memory, GiB", 1.0),
    "devices": ("GPUs", 1.0),
}
PARTS = ("compute_s", "exposed_comm_s", "bubble_s", "optimizer_s", "host_s")
TIES = {"noise": "two runs of one recipe differ as much", "interval": "only a measurement tells them apart", "": ""}
Row = Mapping[str, Any]
Named = Callable[[Row], str]


def page(found: Mapping[str, Any], rows: Sequence[Row], plotted: Sequence[str], named: Named) -> Page:
    """Everything the page shows of a search's plain values and all its ``rows``.

    ``plotted`` are the figures of its objectives, ``named`` says a row's layout in short.
    """
    best = found["best"][0]
    made = [pareto_section(found, rows, plotted, named), best_section(found, named), sensitivity_section(found)]
    return Page(
        title=f"{found['model']}: the best of {units.count(found['points'])} layouts",
        subtitle=f"{named(best)}, dp={best['dp']} on {units.count(best['devices'])} GPUs",
        facts=(
            f"ranked by {found['objectives'][0]}",
            f"{units.count(found['evaluated'])} simulated, {units.count(found['pruned'])} left out",
            *found["constraints"],
        ),
        cards=tuple(cards(found)),
        sections=(*(section for section in made if section is not None), left_section(found, named)),
    )


def cards(found: Mapping[str, Any]) -> list[Card]:
    """Headlines of the best layout."""
    best, after = found["best"][0], found["best"][1:2]
    span = ("interval", units.between(best["low_s"] * 1e6, best["high_s"] * 1e6))
    rate = units.count(best["tokens_per_s_per_gpu"])
    gap = after[0]["step_time_s"] / best["step_time_s"] - 1 if after else 0.0
    next_one = (("the next one", f"{gap * 100:+.1f} %"),) if after else ()
    alike = ("of others", "as good within the noise floor")
    return [
        Card("Step time", (("", units.duration(best["step_time_s"] * 1e6)),), (span, *next_one)),
        Card("Tokens/s per GPU", (("", rate),), (("MFU", units.share(best["mfu"])),)),
        Card("Peak memory", (("", units.gib(best["peak_gib"])),)),
        Card("Ties", (("", units.count(found["ties"])),), (alike,)),
    ]


def pareto_section(
    found: Mapping[str, Any], rows: Sequence[Row], plotted: Sequence[str], named: Named
) -> PageSection | None:
    """All points that were simulated and the front of the first two objectives; None with one objective."""
    pair = [*dict.fromkeys(name for name in plotted if name in AXES)][:2]
    if len(pair) < 2:
        return None
    timed = [
        row for row in rows if row.get("step_time_s") is not None and all(row.get(name) is not None for name in pair)
    ]
    front = found["pareto"]
    data = [
        _dots("simulated", timed, pair, named, {"size": 6, "color": "var(--muted)", "opacity": 0.45}),
        _dots("front", front, pair, named, {"size": 9, "color": colours.css("blue")}),
        _dots("best", found["best"][:1], pair, named, {"size": 13, "symbol": "star", "color": colours.css("orange")}),
    ]
    data[1] |= {"mode": "lines+markers", "line": {"color": colours.css("blue"), "width": 1.5, "dash": "dot"}}
    axes = {f"{axis}axis": {"title": {"text": AXES[name][0]}} for axis, name in zip("xy", pair, strict=True)}
    legend = {"orientation": "h", "y": 1.08}
    text = (
        "Each point is a layout that was simulated; point at one for its settings. No other layout is as good in all "
        "objectives as one of the front (blue) and better in one of them."
    )
    parts: list[Part] = [Figure("All layouts", {"": figure(data, 460, **axes, showlegend=True, legend=legend)})]
    return PageSection("front", "The front", text, tuple(parts))


def _dots(name: str, rows: Sequence[Row], pair: Sequence[str], named: Named, marker: dict[str, Any]) -> dict[str, Any]:
    x, y = ([rounded(row[each] * AXES[each][1]) for row in rows] for each in pair)
    hints = [hover(named(row), f"step {units.duration(row['step_time_s'] * 1e6)}", *_lines(row)) for row in rows]
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


def _lines(row: Row) -> list[str]:
    return [
        f"MFU {units.share(row['mfu'])}, {units.gib(row['peak_gib'])}",
        f"bubble {units.duration(row['bubble_s'] * 1e6)}, exposed {units.duration(row['exposed_comm_s'] * 1e6)}",
    ]


def best_section(found: Mapping[str, Any], named: Named) -> PageSection:
    """The best layouts, each with what its step is made of and why it is better than the next."""
    most = max(row["step_time_s"] for row in found["best"])
    columns = (
        Column(""),
        Column("layout", words=True),
        Column("step"),
        Column("MFU"),
        Column("GiB", "peak memory of the fullest stage"),
        Column("compute"),
        Column("exposed", "communication during which nothing computes"),
        Column("bubble", "waiting in the pipeline"),
        Column("tie", "with the row before", words=True),
        Column("better than the next", words=True),
    )
    rows = [
        (
            Cell(str(row["rank"])),
            Cell(f"{named(row)} dp={row['dp']}"),
            Cell(units.duration(row["step_time_s"] * 1e6), bar=row["step_time_s"] / most),
            Cell(units.share(row["mfu"])),
            Cell(f"{row['peak_gib']:.1f}"),
            *(Cell(units.duration(row[name] * 1e6)) for name in PARTS[:3]),
            Cell(row["tie"], tone="fair" if row["tie"] else "", hint=TIES[row["tie"]]),
            Cell(row["reason"]),
        )
        for row in found["best"]
    ]
    text = "Layouts from best to worst. A tie says that nobody can tell a row from the one before it."
    parts: list[Part] = [Table("Best layouts", columns, rows)]
    if found["measure_next"]:
        wanted = tuple(
            f"{' '.join(f'{k}={v}' for k, v in each['op'].items() if v not in ('same', 0))}: differs by "
            f"{units.duration(each['difference_s'] * 1e6)}"
            for each in found["measure_next"]
        )
        parts.append(Note("Measuring these would help to tell the tied ones apart:", wanted))
    return PageSection("best", "The best", text, tuple(parts))


def sensitivity_section(found: Mapping[str, Any]) -> PageSection | None:
    """What one change of the best costs, those that can run first."""
    if not found["sensitivity"]:
        return None
    costs = [each["cost"] for each in found["sensitivity"] if each["cost"] is not None]
    most = max([*costs, 0.01])
    rows = [
        (
            Cell(f"{each['axis']} = {each['value']}"),
            Cell(str(each["instead_of"])),
            Cell("" if each["cost"] is None else f"{each['cost']:+.1%}", bar=max(each["cost"] or 0.0, 0.0) / most),
            Cell(each["why"] or each["status"], tone="" if each["cost"] is not None else "poor"),
        )
        for each in found["sensitivity"]
    ]
    columns = Column("change", words=True), Column("instead of"), Column("costs"), Column("why", words=True)
    text = "The best layout with one setting changed by one step, and what that costs in the first objective."
    return PageSection("around", "One change", text, (Table("Around the best", columns, rows),))


def left_section(found: Mapping[str, Any], named: Named) -> PageSection:
    """Which points were left out before they were timed, and which combinations never were points."""
    columns = (
        Column("because of", words=True),
        Column("points"),
        Column("such as", words=True),
        Column("which", words=True),
    )
    rows = [
        (Cell(name), Cell(units.count(each["count"])), Cell(named(each["example"])), Cell(each["why"]))
        for name, each in found["pruned_by"].items()
    ]
    parts: list[Part] = [Table("Left out", columns, rows)] if rows else [Note("Nothing was left out.")]
    unfit = tuple(f"{units.count(count)}: {what}" for what, count in found["left_out"].items())
    if unfit:
        parts.append(Note("Combinations that do not fit together, by the first requirement they miss:", unfit))
    text = f"{units.count(found['combinations'])} combinations of the axes are {units.count(found['points'])} layouts."
    return PageSection("left", "What was left out", text, tuple(parts))
