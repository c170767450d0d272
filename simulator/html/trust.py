"""How far a step's answer can be trusted, and what it costs: a section of its page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..report.answer import InferenceReport, StepReport
from . import units
from .page import Cell, Column, PageSection, Part, Piece, StackedBar, Table

HUES = {
    "measured": "green",
    "interpolated": "blue",
    "extrapolated": "orange",
    "analytical": "purple",
    "bytes": "grey",
}
WORDS = (
    "Time is measured (this very op), interpolated (a predictor inside what it has seen), extrapolated (outside of it) "
    "or analytical (physics). The operators below lean most of the time on what nobody measured on this device."
)


def trust_section(report: StepReport | InferenceReport) -> PageSection | None:
    """Shares of time by source, what to measure next, chances, energy and cost; None where nothing is known."""
    if not report.trust:
        return None
    pieces = tuple(
        Piece(name, units.share(share), share, HUES.get(name, "brown"))
        for name, share in report.trust.items()
        if share >= 5e-4
    )
    parts: list[Part] = [StackedBar("Time that is", pieces), *figures(report)]
    if report.measure_next:
        parts.append(missing_table(report))
    return PageSection("trust", "How far to trust it", WORDS, tuple(parts))


def figures(report: StepReport | InferenceReport) -> list[Table]:
    """Quantiles, the chance of running out of memory, power, energy and cost."""
    unit = 1e6 if isinstance(report, StepReport) else 1e3
    rows = [(name, units.duration(value * unit)) for name, value in report.quantiles.items()]
    if report.p_oom is not None:
        rows.append(("P(out of memory)", units.share(report.p_oom)))
    if report.power_w:
        rows.append(("power of a device (estimate)", f"{report.power_w:,.0f} W"))
    if report.energy_j:
        rows.append(("energy of the step (estimate)", f"{report.energy_j:,.0f} J"))
        rows.append(("of this by measured watts", units.share(report.energy_measured)))
    if report.cost is not None:
        rows.append(("cost of the step, in the currency of the price", f"{report.cost:,.4g}"))
        tokens = f"{report.cost_per_million_tokens or 0:,.4g}"
        rows.append(("cost of a million tokens, in the currency of the price", tokens))
    if not rows:
        return []
    return [Table("Chances and costs", (Column("", words=True), Column("")), [(Cell(a), Cell(b)) for a, b in rows])]


def missing_table(report: StepReport | InferenceReport) -> Table:
    """The ops whose measurement would help most."""
    largest_share = report.measure_next[0].share or 1.0
    rows = [
        (
            Cell(str(measurement.op["kind"])),
            Cell(shape(measurement.op)),
            Cell(units.duration(measurement.time_s * 1e6)),
            Cell(units.share(measurement.share), bar=measurement.share / largest_share),
        )
        for measurement in report.measure_next
    ]
    columns = (Column("op", words=True), Column("shape", words=True), Column("time"), Column("share"))
    return Table("To be measured next", columns, rows)


def shape(op: Mapping[str, Any]) -> str:
    """The dimensions of an op in a line."""
    return " ".join(f"{name}={value}" for name, value in op.items() if name != "kind" and value not in ("same", 0))
