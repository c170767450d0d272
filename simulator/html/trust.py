"""How far a step's answer can be trusted, and what it costs: a section of its page."""

from __future__ import annotations

from ..report.answer import InferenceReport, StepReport
from ..report.view import ViewColumn, ViewTable, dims_text
from . import units
from .page import PageSection, Piece, StackedBar, drawn_table

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
    tables = [drawn_table(table) for table in (figures(report), missing_table(report)) if table.rows]
    return PageSection("trust", "How far to trust it", WORDS, (StackedBar("Time that is", pieces), *tables))


def figures(report: StepReport | InferenceReport) -> ViewTable:
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
    return ViewTable("Chances and costs", [ViewColumn("", "words"), ViewColumn("")], rows)


def missing_table(report: StepReport | InferenceReport) -> ViewTable:
    """The ops whose measurement would help most."""
    rows = [
        [missing.op["kind"], dims_text(missing.op), missing.time_s, missing.share] for missing in report.measure_next
    ]
    columns = ViewColumn("op", "words"), ViewColumn("shape", "words"), ViewColumn("time", "seconds", bar=True)
    return ViewTable("To be measured next", [*columns, ViewColumn("share", "share")], rows)
