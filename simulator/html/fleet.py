"""Sections of the page of served traffic about a fleet: replicas of two kinds, and those that come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..report.served import ServingReport, TimeSpread
from . import units
from .charts import LEGEND, RIGHT, curve, figure, titled
from .page import Cell, Column, Figure, PageSection, Part, Table

KIND_TIMES = tuple((time, part) for time in ("ttft", "tpot") for part in ("p50", "p99"))
REPLICAS = {  # what an autoscaler saw: its name there -> (what it is, colour)
    "ready": ("serve", "blue"),
    "starting": ("start", "orange"),
    "draining": ("drain", "purple"),
    "down": ("are down", "red"),
}
ARRIVING = {"requests_per_s": ("requests/s", "green")}
LOAD = {"waiting": ("wait", "red"), "outstanding": ("not ended", "teal")}
TARGET_TIMES = "ttft_ms", "tpot_ms"


def kinds_section(report: ServingReport) -> PageSection | None:
    """What each of two kinds of replicas served and cost; None where all are alike."""
    if not report.kinds:
        return None
    rows = [
        (Cell(name, hint=kind["device"]), Cell(units.count(kind["replicas"])), Cell(units.count(kind["devices"])),
         Cell(units.count(kind["completed"])), Cell(units.count(kind["output_tokens"])),
         *(Cell(units.duration(kind[f"{time}_ms"][part] * 1e3)) for time, part in KIND_TIMES),
         Cell(units.share(kind["utilisation"]), bar=kind["utilisation"]),
         Cell(units.share(kind["kv_peak"]), bar=kind["kv_peak"]),
         Cell(units.three_digits(kind["cost_per_million_tokens"]) if kind["price"] else ""))
        for name, kind in report.kinds.items()
    ]  # fmt: skip
    numbers = ("replicas", "GPUs", "served", "output tokens", "TTFT p50", "p99", "TPOT p50", "p99", "busy")
    columns = (Column("kind", words=True), *map(Column, (*numbers, "most KV memory", "price of a million tokens")))
    text = "Replicas of two kinds in one pool: the router chooses between them."
    return PageSection("kinds", "Kinds of replicas", text, (Table("Kinds", columns, rows),))


def fleet_section(report: ServingReport) -> PageSection | None:
    """Replicas that came and went over time, and what failed; None where none did."""
    if not report.fleet:
        return None
    parts: list[Part] = []
    if report.fleet_over_time:
        parts = [
            Figure("Replicas, and requests that come", {"": fleet_curves(report, REPLICAS, ARRIVING)}),
            Figure("Requests that wait, and those not ended", {"": fleet_curves(report, {}, LOAD)}),
        ]
    names = ("GPU-hours", "price", "replicas on average", "starts", "failures", "time down", "requests", "tokens lost")
    fleet = report.fleet
    hours = units.three_digits(fleet["gpu_hours"]), units.three_digits(fleet["price"]) if fleet["price"] else ""
    counts = (units.count(fleet[name]) for name in ("starts", "failures"))
    lost = (units.count(fleet[name]) for name in ("lost_requests", "lost_tokens"))
    mean = units.three_digits(fleet["mean_replicas"])
    row = tuple(map(Cell, (*hours, mean, *counts, units.share(fleet["down_share"]), *lost)))
    parts.append(Table("Replicas that came and went", tuple(map(Column, names)), [row]))
    if without := report.without_failures:
        runs = (("with failures", vars(report)), ("without", without))
        rows = [
            (Cell(name), Cell(units.share(run["slo_attainment"]), bar=run["slo_attainment"]),
             Cell(units.three_digits(run["goodput"])), *(Cell(units.duration(ms * 1e3)) for ms in p99(run)))
            for name, run in runs
        ]  # fmt: skip
        heads = ("had all targets", "goodput, requests/s", "TTFT p99", "TPOT p99")
        parts.append(Table("Failures", (Column("", words=True), *map(Column, heads)), rows))
    text = "Replicas start, drain before they stop, fail and come back. A price is of the time that GPUs are on."
    return PageSection("fleet", "Fleet", text, tuple(parts))


def p99(run: Mapping[str, Any]) -> tuple[float, float]:
    """The 99th percentiles of TTFT and TPOT of a run, in milliseconds."""
    ttft, tpot = ((run[name].to_dict() if isinstance(run[name], TimeSpread) else run[name]) for name in TARGET_TIMES)
    return ttft["p99"], tpot["p99"]


def fleet_curves(
    report: ServingReport, stacked: Mapping[str, tuple[str, str]], beside: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    """What an autoscaler saw over time: some of it stacked in steps, some as lines (on the right axis, if both)."""
    rows = report.fleet_over_time
    times = [row["s"] / 3600 for row in rows]
    data = []
    steps = {"shape": "hv", "width": 0.5}
    for figures, line, more in ((stacked, steps, {"stackgroup": "replicas"}), (beside, {}, {})):
        for name, (what, hue) in figures.items():
            right = bool(stacked) and not more
            hint = f"%{{y:.3g}} {what} at %{{x:.3g}} h<extra></extra>"
            entry = {"name": what, "yaxis": "y2" if right else "y", "hovertemplate": hint}
            data.append(curve(times, [row[name] for row in rows], hue, line, **more, **entry))
    right_axis = {"yaxis2": titled("requests/s", **RIGHT)} if stacked else {}
    left = titled("replicas" if stacked else "requests", rangemode="tozero")
    return figure(data, 300, **LEGEND, xaxis=titled("hours"), yaxis=left, **right_axis)
