"""The page of a quickstart: how close predictions came on this machine, step by step and operator by operator."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..report.answer import ape
from ..report.comparison import Comparison, OpComparison, StepComparison
from ..report.view import Toned, ViewColumn, ViewTable
from . import charts, colours, units, wording
from .page import Card, Cell, Column, Figure, Legend, Note, Page, PageSection, Part, Strip, Table, drawn_table
from .sites import Errors, Site, errors_by_kind, errors_of, sites
from .timeline import timeline

ALL = "all"
WORST_SITES = 12
MAX_RUNS = 200
HOST_AND_REST = "host and the rest"


def page(comparison: Comparison) -> Page:
    """Everything the page shows."""
    ops = [op for op in comparison.ops if op.predicted_us > 0 and op.measured_us > 0]
    by_workload = {step.workload: [op for op in ops if op.workload == step.workload] for step in comparison.steps}
    candidates = [
        steps_section(comparison),
        *([agreement_section(ops, by_workload), errors_section(ops, by_workload)] if ops else []),
        breakdown_section(comparison.steps, by_workload),
        timeline_section(comparison.steps),
        predictors_section(comparison.training),
        method_section(comparison),
    ]
    return Page(
        title=f"{comparison.model}: predicted and measured",
        subtitle=f"{units.with_prefix(comparison.parameters, '')} parameters, {comparison.precision}, "
        f"on {comparison.device.get('name', 'this machine')}",
        facts=facts(comparison),
        cards=tuple(card(step) for step in comparison.steps),
        sections=tuple(section for section in candidates if section is not None),
        caption="Blue line: predicted; blue band: its interval; grey lines: the real runs.",
        glossary=wording.terms(),
    )


def facts(comparison: Comparison) -> tuple[str, ...]:
    """The machine and its software, a phrase each."""
    device, environment = comparison.device, comparison.environment
    rate = (device.get("tensor_tflops") or {}).get(comparison.precision)
    phrases = (
        ("{} threads", environment.get("threads") if device.get("vendor") == "cpu" else None),
        ("{} memory", device.get("memory_gib") and units.gib(device["memory_gib"])),
        (f"{{}} in {comparison.precision}", rate and units.with_prefix(rate * 1e12, "FLOP/s")),
        ("{} memory bandwidth", device.get("memory_gbps") and units.with_prefix(device["memory_gbps"] * 1e9, "B/s")),
        ("{} last-level cache", device.get("l2_mib") and units.gib(device["l2_mib"] / 1024)),
        ("torch {}", environment.get("torch")),
        ("CUDA {}", environment.get("cuda")),
        ("driver {}", environment.get("driver")),
        ("opcast {}", environment.get("opcast_version")),
        ("{}", environment.get("node")),
    )
    return tuple(text.format(value) for text, value in phrases if value)


def signed_error(step: StepComparison) -> float:
    """Signed error of a step in percent."""
    return (step.predicted_ms / step.measured_ms - 1.0) * 100.0


def card(step: StepComparison) -> Card:
    """A workload's headline."""
    error = signed_error(step)
    interval = f"{units.duration_range(step.low_ms * 1e3, step.high_ms * 1e3)} ({step.report.coverage:.0%})"
    runs = len(step.measured_runs_ms)
    return Card(
        title=wording.workload(step.workload),
        values=(
            ("predicted", units.duration(step.predicted_ms * 1e3)),
            ("measured", units.duration(step.measured_ms * 1e3)),
        ),
        lines=(
            ("interval", interval),
            ("real runs", f"{runs}, \u00b1 {units.percent(step.spread)}" if runs > 1 else "1"),
        ),
        verdict=f"error {units.percent(error, signed=True)}, {'inside' if step.inside else 'outside'} the interval",
        tone=colours.of_error(error),
        strip=strip(step),
    )


def strip(step: StepComparison) -> Strip:
    """Interval, prediction and real runs on one scale; runs beyond twice the slowest of nine in ten are left out."""
    runs = sorted(step.measured_runs_ms)
    runs = [run for run in runs if run <= 2.0 * runs[int(0.9 * (len(runs) - 1))]]
    runs = runs[:: math.ceil(len(runs) / MAX_RUNS)]
    low, high = min(step.low_ms, runs[0]), max(step.high_ms, runs[-1])
    pad = (high - low) * 0.06 or high * 0.1
    low, high = max(low - pad, 0.0), high + pad

    def position(value: float) -> float:
        return round((value - low) / (high - low) * 100.0, 2)

    return Strip(
        low=position(step.low_ms),
        value=position(step.predicted_ms),
        high=position(step.high_ms),
        runs=tuple(position(run) for run in runs),
        left=units.duration(low * 1e3),
        right=units.duration(high * 1e3),
        label=f"predicted {units.duration(step.predicted_ms * 1e3)}, measured {units.duration(step.measured_ms * 1e3)}",
    )


def steps_section(comparison: Comparison) -> PageSection:
    """The steps as a table, with what the cards leave out."""
    columns = (
        *(ViewColumn("step", "words"), ViewColumn("predicted", "time_ms"), ViewColumn("interval", "ms_range")),
        *(ViewColumn("measured", "time_ms"), ViewColumn("spread"), ViewColumn("runs", "count")),
        *(ViewColumn("error", "error"), ViewColumn("tokens/s", "digits"), ViewColumn("MFU", "share")),
        ViewColumn("peak memory", "bytes"),
    )
    rows = []
    for step in comparison.steps:
        report, error = step.report, signed_error(step)
        times = step.predicted_ms, (step.low_ms, step.high_ms), step.measured_ms, f"\u00b1 {units.percent(step.spread)}"
        rates = report.tokens_per_s_per_gpu, report.mfu, report.memory.peak_gib * 2**30
        toned = Toned(error, colours.of_error(error))
        rows.append([wording.workload(step.workload), *times, len(step.measured_runs_ms), toned, *rates])
    table = ViewTable("Predicted and measured steps", columns, rows)
    text = (
        "Each prediction was made from operators whose shapes are none of this model's. "
        "Measured is the median of real steps; their spread is half the way from the 10th to the 90th percentile. "
        "Tokens per second, MFU and peak memory are the predicted ones."
    )
    return PageSection("steps", "The steps", text, (drawn_table(table),))


def choices(by_workload: Mapping[str, Sequence[OpComparison]], everything: bool) -> tuple[tuple[str, str], ...]:
    """The variants a section offers: each workload that has operators, before them all together."""
    variants = [(name, name) for name, ops in by_workload.items() if ops]
    return ((ALL, "all"), *variants) if everything and len(variants) > 1 else tuple(variants)


def ops_of_variant(
    ops: Sequence[OpComparison], by_workload: Mapping[str, Sequence[OpComparison]]
) -> dict[str, Sequence[OpComparison]]:
    """The operators behind each variant."""
    every = {ALL: ops, **by_workload}
    return {name: every[name] for name, _ in choices(by_workload, everything=True)}


def agreement_section(ops: Sequence[OpComparison], by_workload: Mapping[str, Sequence[OpComparison]]) -> PageSection:
    """Predicted against measured per call site, and where the error comes from."""
    sites_of_variant = {name: sites(group) for name, group in ops_of_variant(ops, by_workload).items()}
    text = (
        "Each disc is one operator call of the model (the same call in every layer is one disc). On the line the "
        "prediction was right; above it too long, below it too short. The larger the disc, the more of the measured "
        "time it takes, so the large ones decide whether the step comes out right. The bands are \u00b110 % and "
        "\u00b125 %."
    )
    figures = (
        Figure(
            "Predicted over measured time", {n: charts.agreement(s) for n, s in sites_of_variant.items()}, half=True
        ),
        Figure(
            "Error over measured time", {n: charts.error_by_size(s) for n, s in sites_of_variant.items()}, half=True
        ),
    )
    tables = [drawn_table(worst_table(group), variant=name) for name, group in sites_of_variant.items()]
    return PageSection(
        "ops", "Operator by operator", text, (*figures, Legend(), *tables), choices(by_workload, everything=True)
    )


def worst_table(sites: Sequence[Site]) -> ViewTable:
    """The call sites that add or take most."""
    names = [ViewColumn(title, "words") for title in ("op", "where")]
    times = [ViewColumn(title, "us", "per call") for title in ("predicted", "measured")]
    adds = ViewColumn("adds", "us", "predicted minus measured, all calls together")
    rows = [
        [
            Toned(site.detail, hint=site.source),
            Toned(site.path or "the model itself", hint=f"{site.workload}, {site.phase}"),
            *(site.calls, site.predicted_us, site.measured_us),
            Toned(site.error, colours.of_error(site.error)),
            site.off_us,
        ]
        for site in sorted(sites, key=lambda site: -abs(site.off_us))[:WORST_SITES]
    ]
    columns = [*names, ViewColumn("calls", "count"), *times, ViewColumn("error", "error"), adds]
    return ViewTable("Where most of the error comes from", columns, rows)


def errors_section(ops: Sequence[OpComparison], by_workload: Mapping[str, Sequence[OpComparison]]) -> PageSection:
    """The distribution of errors, weighted by time."""
    groups = ops_of_variant(ops, by_workload)
    errors_of_variant = {name: errors_by_kind(group) for name, group in groups.items()}
    text = (
        "How far off the predictions are, weighted by time: a long operator counts for more than a short one. First, "
        "how much of the measured time has which error. Then each kind of op by itself: the diamond is its median, "
        "the box holds half of its time, the line four fifths. The shaded bands are \u00b110 % and \u00b125 %."
    )
    parts: list[Part] = [Note(_share_within(errors_of(group)), variant=name) for name, group in groups.items()]
    parts.append(
        Figure(
            "Share of time by signed error", {n: charts.histogram(e) for n, e in errors_of_variant.items()}, half=True
        )
    )
    parts.append(
        Figure(
            "Signed error of each kind of op", {n: charts.spreads(e) for n, e in errors_of_variant.items()}, half=True
        )
    )
    parts.append(Legend())
    return PageSection("errors", "How far off", text, tuple(parts), choices(by_workload, everything=True))


def _share_within(errors: Errors) -> str:
    return (
        f"{units.share(errors.within(10.0))} of the operators' time is predicted within 10 %, "
        f"{units.share(errors.within(25.0))} within 25 %."
    )


def family_pairs(step: StepComparison, ops: Sequence[OpComparison]) -> dict[str, tuple[float, float]]:
    """kind -> (predicted, measured) microseconds of a step, the longest first; ``host`` is what the ops leave."""
    totals: dict[str, tuple[float, float]] = {}
    for op in ops:
        predicted, measured = totals.get(op.kind, (0.0, 0.0))
        totals[op.kind] = (predicted + op.predicted_us, measured + op.measured_us)
    totals = dict(sorted(totals.items(), key=lambda item: -item[1][1]))
    predicted, measured = (sum(pair[side] for pair in totals.values()) for side in (0, 1))
    rest = (step.predicted_ms * 1e3 - predicted, step.measured_ms * 1e3 - measured)
    return totals | {charts.HOST: (max(rest[0], 0.0), max(rest[1], 0.0))}


def breakdown_section(
    steps: Sequence[StepComparison], by_workload: Mapping[str, Sequence[OpComparison]]
) -> PageSection | None:
    """Where each step's time goes, predicted beside measured."""
    with_ops = [step for step in steps if by_workload[step.workload]]
    if not with_ops:
        return None
    pairs = {step.workload: family_pairs(step, by_workload[step.workload]) for step in with_ops}
    text = (
        "Each step twice, predicted above measured, each workload on a scale of its own. Where the pieces line up, the "
        f"prediction is right for the right reason. Grey is what the operators leave of the step: {HOST_AND_REST}."
    )
    figure = charts.side_by_side([(wording.workload(name), parts) for name, parts in pairs.items()])
    tables = [family_table(step, by_workload[step.workload], pairs[step.workload]) for step in with_ops]
    alone = [step.workload for step in with_ops if _sum(by_workload[step.workload]) > step.measured_ms * 1e3]
    notes = [
        Note(
            "Timed one by one the operators add up to more than the real step, which overlaps or runs them without "
            "waiting in between: nothing is left for the host.",
            variant=name,
        )
        for name in alone
    ]
    parts: tuple[Part, ...] = (Figure("Time of each step by kind of op", {ALL: figure}), Legend(), *tables, *notes)
    return PageSection("breakdown", "Where the time goes", text, parts, choices(by_workload, everything=False))


def _sum(ops: Sequence[OpComparison]) -> float:
    return sum(op.measured_us for op in ops)


FAMILY_COLUMNS = (
    Column("op family", words=True),
    Column("calls"),
    Column("predicted"),
    Column("measured"),
    Column("error", "signed, of the family's whole time"),
    Column("median error per call", "APE"),
    Column("share", "of the measured step"),
)


def family_table(step: StepComparison, ops: Sequence[OpComparison], pairs: Mapping[str, tuple[float, float]]) -> Table:
    """The families of one workload, and the step they add up to."""
    largest = max(max(pair) for pair in pairs.values())
    measured_us = step.measured_ms * 1e3
    calls = {kind: len(kind_errors.percent) for kind, kind_errors in errors_by_kind(ops).items()}
    medians = {kind: _median_ape([op for op in ops if op.kind == kind]) for kind in calls}
    rows = [
        (
            Cell(HOST_AND_REST if kind == charts.HOST else kind),
            Cell(units.count(calls.get(kind))),
            Cell(units.duration(predicted), bar=predicted / largest),
            Cell(units.duration(measured), bar=measured / largest, bar_tone="measured"),
            _error_cell(predicted, measured),
            Cell(units.percent(medians.get(kind))),
            Cell(units.share(measured / measured_us)),
        )
        for kind, (predicted, measured) in pairs.items()
    ]
    total = (
        Cell("step"),
        Cell(units.count(len(ops))),
        Cell(units.duration(step.predicted_ms * 1e3)),
        Cell(units.duration(measured_us)),
        _error_cell(step.predicted_ms, step.measured_ms),
        Cell(units.percent(_median_ape(ops))),
        Cell(""),
    )
    return Table(f"{wording.workload(step.workload)} by op family", FAMILY_COLUMNS, rows, step.workload, (total,))


def _median_ape(ops: Sequence[OpComparison]) -> float:
    return statistics.median(ape(op.predicted_us, op.measured_us) for op in ops)


def _error_cell(predicted: float, measured: float) -> Cell:
    if measured <= 0:
        return Cell(units.DASH)
    error = (predicted / measured - 1.0) * 100.0
    return Cell(units.percent(error, signed=True), colours.of_error(error))


def timeline_section(steps: Sequence[StepComparison]) -> PageSection | None:
    """The predicted steps in time."""
    steps_shown = [step for step in steps if step.report.timeline]
    if not steps_shown:
        return None
    text = (
        "The predicted step from start to end: its phases, the layers in it, their modules, and every operator in the "
        "colour of its kind. Drag across it or use the buttons to zoom, double-click for the whole. Gaps are host time."
    )
    figure = Figure(
        "Predicted timeline", {step.workload: timeline(step.report.timeline) for step in steps_shown}, zoom=True
    )
    return PageSection(
        "timeline", "The step in time", text, (figure, Legend()), tuple((s.workload, s.workload) for s in steps_shown)
    )


PREDICTOR_COLUMNS = (
    Column("op kind", words=True),
    Column("rows", "measurements it learned from"),
    Column("median", "APE on held-out shapes"),
    Column("mean", "APE on held-out shapes"),
    Column("p90", "APE on held-out shapes"),
    Column("coverage", "how often the interval held the measured value, on held-out shapes"),
    Column("formula", "median APE of the analytical engine, before learning"),
    Column("roofline", "median APE of the roofline alone"),
    Column("won", "the learner with the smallest held-out error", words=True),
)


def predictors_section(training: Mapping[str, Mapping[str, Any]]) -> PageSection | None:
    """What was learned, and how well it does on shapes it had not seen."""
    if not training:
        return None
    rows = [predictor_row(kind, training[kind]) for kind in sorted(training)]
    splits = sorted({str(training_row["split"]) for training_row in training.values() if training_row.get("split")})
    text = (
        "Each kind of op has a predictor of its own, chosen among several by cross-validation. The errors are on "
        "shapes that were held out. Roofline and formula say what the same shapes look like without learning."
        + (f" Split: {', '.join(splits)}." if splits else "")
    )
    return PageSection("predictors", "What was learned", text, (Table("Predictors", PREDICTOR_COLUMNS, rows),))


def predictor_row(kind: str, training_row: Mapping[str, Any]) -> tuple[Cell, ...]:
    """One predictor; a kind that could not be learned says why."""
    if "error" in training_row:
        return (Cell(kind), Cell(f"not learned: {training_row['error']}", "poor", span=len(PREDICTOR_COLUMNS) - 1))
    median = training_row.get("test_median_ape")
    others = ", ".join(
        f"{name} {units.percent(error)}" for name, error in sorted((training_row.get("candidates") or {}).items())
    )
    coverage = training_row.get("coverage")
    return (
        Cell(kind, hint=str(training_row.get("predictor") or "")),
        Cell(units.count(training_row.get("n"))),
        Cell(units.percent(median), "" if median is None else colours.of_error(median)),
        Cell(units.percent(training_row.get("test_mean_ape"))),
        Cell(units.percent(training_row.get("test_p90_ape"))),
        Cell(units.share(coverage)),
        Cell(units.percent(training_row.get("analytical_median_ape"))),
        Cell(units.percent(training_row.get("roofline_median_ape"))),
        Cell(
            str(training_row.get("chosen") or training_row.get("predictor") or units.DASH).replace("_", " "),
            hint=others,
        ),
    )


def method_section(comparison: Comparison) -> PageSection:
    """How it was measured, and what the campaign did."""
    campaign = comparison.campaign
    runs = ", ".join(f"{len(step.measured_runs_ms)} of {step.workload}" for step in comparison.steps)
    items = [
        "Operators were profiled with shapes that do not include the model's own, each repeated until its median was "
        "settled or its time was up, in an order that spreads drift over all of them.",
        f"Real steps ({runs}) were run in rounds between the operators, so that a machine that slows down or speeds up "
        "does so for both; medians are reported.",
        "Steps and operators ran in processes with the same number of threads and the same memory allocator settings.",
        "The operators of the real steps were timed one by one inside the framework's dispatcher, in runs of their "
        "own. What they leave of the step is called host time.",
    ]
    if campaign:
        items.append(campaign_line(campaign))
    if campaign.get("drift"):
        worst = max(campaign["drift"].values())
        items.append(
            f"Shapes repeated throughout the campaign moved by at most {units.share(worst)} from their median."
        )
    if comparison.device.get("vendor") == "cpu":
        items.append(
            "The device's own figures (rates, bandwidths, cache) were measured on this machine, not looked up."
        )
    return PageSection("method", "How it was measured", "", (Note("", tuple(items)),))


def campaign_line(campaign: Mapping[str, Any]) -> str:
    """What was measured, in one sentence."""
    failed = campaign.get("failed") or 0
    text = f"{units.count(campaign.get('cases'))} cases were planned, {units.count(campaign.get('ok'))} measured"
    if failed:
        text += f", {units.count(failed)} failed (they are kept as rows with their reason)"
    if campaign.get("wall_time_s"):
        text += f", in {units.duration(campaign['wall_time_s'] * 1e6)}"
    return text + (f", run {campaign['run_id']}." if campaign.get("run_id") else ".")
