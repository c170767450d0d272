"""What a person is shown of post-training, as tables for a terminal and a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...datasets.counts import counted
from ..job.shown import spread_table
from ..report.view import ViewColumn, ViewTable, time_text
from .answer import PostTrainReport, PostTrainWay

ROWS = {  # of the first table: what a figure is called -> the figure
    "iteration, s": "iteration_s",
    "tokens/s a GPU": "tokens_per_s_per_gpu",
    "whole run, hours": "hours",
    "GPU-hours": "gpu_hours",
    "price": "cost",
    "kWh an iteration": "iteration_kwh",
    "kWh": "kwh",
    "CO2, kg": "co2_kg",
}


def headline(report: PostTrainReport) -> str:
    """One line of what is asked."""
    layout = f" ({', '.join(report.layout)})" if report.layout else ""
    batch = {"sft": counted(report.prompts, "sequence"), "dpo": counted(report.prompts, "pair")}.get(
        report.method, f"{report.prompts:,} prompts x {report.responses}"
    )
    split = ""
    if report.placement == "apart":
        how = "one step off" if report.asynchronous else "in turns"
        split = f", {report.rollout_gpus:,} GPUs roll out and {report.training_gpus:,} train, {how}"
    return f"{report.method} of {report.model} on {report.gpus:,} x {report.device}{layout}: {batch}{split}"


def tables(report: PostTrainReport) -> list[ViewTable]:
    """What an iteration takes, its phases, the rollout, memory, and the ways that were tried."""
    tables_shown = [spreads(report), phases(report)]
    if report.rollout is not None:
        tables_shown.append(rollout(report))
    tables_shown.append(memory(report))
    if report.ways:
        tables_shown.append(ways(report))
    return tables_shown


def spreads(report: PostTrainReport) -> ViewTable:
    """Each figure with what one, five and nine of ten stay below."""
    caption = f"{counted(report.iterations, 'iteration')}, {counted(report.lives, 'life', 'lives')}"
    return spread_table(caption, report, ROWS, ("P10", "P50", "P90"))


def phases(report: PostTrainReport) -> ViewTable:
    """Phases of a mean batch in order, what they draw, and which GPUs wait."""
    kwh = dict(report.phase_kwh)
    rows: list[list[object]] = [
        [phase.name, phase.group, phase.seconds, phase.gpu_w, kwh.pop(phase.name, None)] for phase in report.phases
    ]
    rows += [
        [f"{group} waits", group, share * report.iteration_s.mean, None, None] for group, share in report.idle.items()
    ]
    rows += [[name, "", None, None, amount] for name, amount in kwh.items()]
    columns = [ViewColumn("phase"), ViewColumn("on"), ViewColumn("seconds", "hundredths", bar=True)]
    columns += [ViewColumn("W a GPU", "count"), ViewColumn("kWh", "figure")]
    return ViewTable("phases of a mean batch", columns, rows)


def rollout(report: PostTrainReport) -> ViewTable:
    """How a batch is rolled out, and what the weight sync moves."""
    figures, sync = report.rollout, report.sync
    assert figures is not None
    layout = f", {figures.layout}" if figures.layout else ""
    rows: list[Sequence[str]] = [
        ("replicas", f"{figures.replicas:,} of {figures.engine}{layout}"),
        ("responses", f"{figures.mean_response:,.0f} tokens in the mean, {figures.longest_response:,} the longest"),
        ("output tokens/s a GPU that rolls out", f"{figures.output_tokens_per_s_per_gpu:,.0f}"),
        ("time in which less than a tenth of the responses run", f"{figures.tail_share:.0%} of the rollout"),
        ("KV memory at its peak", f"{figures.kv_peak:.0%}"),
    ]
    if figures.preemptions:
        rows.append(("preemptions", f"{figures.preemptions:,.0f}"))
    if figures.carried:
        rows.append(("go on in the next batch", counted(figures.carried, "response")))
    if sync is not None:
        parts = f"gathered over {counted(sync.gather_ranks, 'rank')} in {time_text(1e6 * sync.gather_s)}"
        if sync.broadcast_ranks:
            parts += f", broadcast to {counted(sync.broadcast_ranks, 'GPU')} in {time_text(1e6 * sync.broadcast_s)}"
        if sync.tensors:
            parts += f"; {counted(sync.tensors, 'tensor')} handed over in {time_text(1e6 * sync.hand_over_s)}"
        rows.append(("weight sync", f"{sync.size_bytes / 1e9:,.4g} GB: {parts}"))
    return ViewTable("rollout and weight sync", [ViewColumn(""), ViewColumn("", "words")], rows)


def memory(report: PostTrainReport) -> ViewTable:
    """GiB of a GPU that each phase needs."""
    rows = [[phase.name, phase.needed_gib, phase.total_gib, "yes" if phase.fits else "NO"] for phase in report.memory]
    columns = [ViewColumn("memory of a GPU"), ViewColumn("needs, GiB", "gib"), ViewColumn("has, GiB", "gib")]
    return ViewTable("memory by phase", [*columns, ViewColumn("fits")], rows)


def ways(report: PostTrainReport) -> ViewTable:
    """Every placement that was tried, the quickest first."""
    order = sorted(report.ways, key=lambda way: (way.iteration_s is None, not way.fits, way.iteration_s or 0.0))
    columns: list[tuple[ViewColumn, Callable[[PostTrainWay], object]]] = [
        (ViewColumn("placement"), lambda way: f"{way.placement}{', one step off' if way.asynchronous else ''}"),
        (ViewColumn("roll out", "count"), lambda way: way.rollout_gpus),
        (ViewColumn("train", "count"), lambda way: way.training_gpus),
        (ViewColumn("iteration, s", "tenths", bar=True), lambda way: way.iteration_s),
        (ViewColumn("rollout, s", "tenths"), lambda way: way.rollout_s),
        (ViewColumn("training, s", "tenths"), lambda way: way.training_s),
        (ViewColumn("fits"), lambda way: way.why_not if way.iteration_s is None else "yes" if way.fits else "NO"),
    ]
    return ViewTable.of("placements tried, with the first batch", order, columns)
