"""The page of a job: its figures, ten of its lives over days, and how long all of them take."""

from __future__ import annotations

from typing import Any

from ...datasets.counts import counted
from ..html import colours
from ..html.charts import bars, curve, figure, hover, round_number, titled
from ..html.page import Card, Figure, Page, PageSection, drawn_table, notes_sections
from ..report.view import time_text
from .answer import LifeSpread, PlanReport
from .failures import DAY_S
from .shown import causes, checkpoints, headline, parts, spreads


def page(report: PlanReport) -> Page:
    """Everything the page shows."""
    return Page(
        title=f"{report.model}: the whole training job",
        subtitle=headline(report),
        facts=(f"interruptions: {report.rates_from}", f"{counted(report.lives, 'life', 'lives')}, seed {report.seed}"),
        cards=tuple(cards(report)),
        sections=(
            PageSection(
                "lives",
                "Lives of the job",
                "Left: ten lives; a line falls back where work is lost. Right: how many days all lives take.",
                (
                    Figure("Progress of ten lives", {"": progress(report)}, half=True),
                    Figure("Days of all lives", {"": days(report)}, half=True),
                    drawn_table(spreads(report)),
                ),
            ),
            PageSection(
                "time",
                "Where the time goes",
                "Shares of the mean life, and what interrupts it.",
                (drawn_table(parts(report)), drawn_table(causes(report))),
            ),
            PageSection("checkpoints", "Checkpoints", "", (drawn_table(checkpoints(report)),)),
            *notes_sections(report.notes),
        ),
    )


def cards(report: PlanReport) -> list[Card]:
    """Headlines: the median, and what most lives lie between."""
    cards_shown = [card("Days", report.days, "{:,.3g}"), card("GPU-hours", report.gpu_hours, "{:,.0f}")]
    if report.cost is not None:
        cards_shown.append(card("Price", report.cost, "{:,.0f}"))
    if report.kwh is not None:
        cards_shown.append(card("kWh", report.kwh, "{:,.0f}"))
    if report.co2_kg is not None:
        cards_shown.append(card("CO2, kg", report.co2_kg, "{:,.0f}"))
    cards_shown.append(card("Goodput", report.goodput, "{:.1%}"))
    return cards_shown


def card(title: str, spread: LifeSpread, form: str) -> Card:
    """A figure as a card."""
    between = f"{form.format(spread.p10)} to {form.format(spread.p90)}"
    return Card(title, (("P50", form.format(spread.p50)),), (("P10 to P90", between),))


def progress(report: PlanReport) -> dict[str, Any]:
    """Tokens over days of a few lives, a mark where each is interrupted."""
    lines, marks = [], []
    for number, trace in enumerate(report.traces):
        xs, ys = [moment / DAY_S for moment in trace.moments_s], [tokens / 1e9 for tokens in trace.tokens]
        line = curve(xs, ys, "blue", {"width": 1}, hoverinfo="text")
        count = counted(len(trace.interruptions), "interruption")
        line["hovertext"] = hover(f"life {number + 1}", count, f"{line['x'][-1]:.4g} days")
        places = {axis: [line[axis][at] for at in trace.interruptions] for axis in "xy"}
        lines.append(line)
        marks.append({**line, **places, "mode": "markers", "marker": {"color": colours.css("red"), "size": 4}})
    axes = {"xaxis": titled("days", rangemode="tozero"), "yaxis": titled("billion tokens", rangemode="tozero")}
    return figure([*lines, *marks], 340, **axes)


def days(report: PlanReport) -> dict[str, Any]:
    """How many lives take how many days."""
    lefts, counts = zip(*report.histogram, strict=True)
    width = lefts[1] - lefts[0]
    hints = [
        hover(f"{start:.4g} to {start + width:.4g} days", f"{count / report.lives:.1%} of the lives")
        for start, count in zip(lefts, counts, strict=True)
    ]
    centres = [round_number(start + width / 2) for start in lefts]
    shares = [count / report.lives * 100.0 for count in counts]
    return figure(
        [bars("", colours.css("blue"), centres, shares, hints, orientation="v")],
        340,
        bargap=0.05,
        xaxis=titled(f"days (half of the lives take {time_text(1e6 * report.days.p50 * DAY_S)} or less)"),
        yaxis=titled("% of the lives"),
    )
