"""What a person is shown of a job, as tables for a terminal and a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...datasets.counts import counted
from ..report.view import ViewColumn, ViewTable, time_text
from .answer import LifeSpread, PlanReport

ROWS = {  # of the first table: what a figure is called -> the figure, whether an empty row is left out
    "days": "days",
    "GPU-hours": "gpu_hours",
    "price": "cost",
    "kWh": "kwh",
    "CO2, kg": "co2_kg",
    "goodput, %": "goodput",
    "interruptions": "interruptions",
    "hours of work done twice": "lost_hours",
    "hours down": "down_hours",
}


def headline(report: PlanReport) -> str:
    """One line of what is asked."""
    layout = f" ({', '.join(report.layout)})" if report.layout else ""
    steps = f"{counted(report.steps, 'step')} of {time_text(1e6 * report.step_time_s)}"
    unfit = " (does not fit)" if report.step is not None and not report.step.fits else ""
    return f"{report.model} on {report.devices:,} x {report.device}{layout}: {report.tokens:.4g} tokens, {steps}{unfit}"


def tables(report: PlanReport) -> list[ViewTable]:
    """What came of the lives, where the time goes, what interrupts, and the checkpoints."""
    return [spreads(report), parts(report), causes(report), checkpoints(report)]


def spreads(report: PlanReport) -> ViewTable:
    """Each figure with what one, five and nine of ten lives stay below."""
    return spread_table(
        f"{counted(report.lives, 'life', 'lives')} of the job", report, ROWS, ("P10", "P50", "P90", "mean")
    )


def spread_table(caption: str, report: Any, figures: Mapping[str, str], columns: Sequence[str]) -> ViewTable:
    """Figures of a report by what they are called, each with some figures of its spread; those that are known."""
    rows = []
    for title, name in figures.items():
        spread: LifeSpread | None = getattr(report, name)
        if spread is not None:
            times = 100.0 if title.endswith("%") else 1.0
            rows.append([title, *(times * getattr(spread, column.lower()) for column in columns)])
    return ViewTable(caption, [ViewColumn(""), *(ViewColumn(name, "figure") for name in columns)], rows)


def parts(report: PlanReport) -> ViewTable:
    """Where the time of the mean life goes; the shares add up to 1."""
    rows = [[name, report.days.mean * share, share] for name, share in report.parts.items() if share > 0.0]
    columns = [ViewColumn("part"), ViewColumn("days", "hundredths"), ViewColumn("share", "share", bar=True)]
    return ViewTable("where the time goes", columns, rows)


def causes(report: PlanReport) -> ViewTable:
    """What interrupts the mean life, and how often: as counted in all lives."""
    rows = [[name.replace("_", " "), count] for name, count in report.causes.items()]
    columns = [ViewColumn("what interrupts"), ViewColumn("times in the mean life", "tenths", bar=True)]
    often = "" if report.mtbf_hours is None else f", one in {time_text(3600e6 * report.mtbf_hours)}"
    return ViewTable(f"interruptions ({report.rates_from}{often})", columns, rows)


def checkpoints(report: PlanReport) -> ViewTable:
    """What checkpoints cost, and how often they are best written."""
    saved = report.checkpoint
    rows: list[Sequence[str]] = [
        ("size", f"{saved.size_gb:,.4g} GB"),
        ("written", f"{counted(saved.count, 'time')}, every {time_text(60e6 * saved.interval_minutes)} of training"),
        ("training waits for each", time_text(1e6 * saved.blocking_s)),
        ("until it can be read", time_text(1e6 * (saved.blocking_s + saved.durable_s))),
        ("a restart reads it in", time_text(1e6 * saved.load_s)),
        ("store", f"{saved.write_gbps:,.4g} GB/s in, {saved.read_gbps:,.4g} GB/s out"),
    ]
    if saved.daly_minutes is not None:
        rows.append(("best interval by Daly's formula", time_text(60e6 * saved.daly_minutes)))
    if saved.best_minutes is not None:
        rows.append(("best interval by simulation", time_text(60e6 * saved.best_minutes)))
    return ViewTable("checkpoints", [ViewColumn(""), ViewColumn("", "words")], rows)
