"""The page of served traffic: what users wait for, what the engine did meanwhile, and how much met the targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...datasets.counts import counted
from ..report import served_view
from ..report.served import ServingReport
from ..report.served_times import TIMES, TimeSpread
from ..report.served_view import adapter_table, class_table, kind_table, pool_table, rejection_table, tier_table
from ..report.view import ViewTable
from . import colours, units
from .charts import LEGEND, RIGHT, curve, dashed, figure, hover, titled
from .fleet import fleet_pictures
from .page import Card, Figure, Page, PageSection, drawn_table, notes_sections

CURVES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")  # times with a CDF
POOLS = {
    "all": "all replicas",
    "prefill": "prefill",
    "decode": "decode",
    "first": "replicas of the first kind",
    "second": "of the second",
}
RateSweep = Sequence[tuple[float, ServingReport]]


def page(report: ServingReport, title: str, facts: Sequence[str] = (), rates: RateSweep = ()) -> Page:
    """Everything the page shows of a run, and of other ``rates`` where there are any."""
    waits = "How long requests take. A dashed line is the target."
    order = "Requests of a lower priority number go first. A rejected request has no times, and misses its targets."
    moved = units.with_prefix(report.kv_transfer_bytes, "B")
    pools = f"One pool prefills, one decodes; {moved} of caches moved between them."
    kinds = "Replicas of two kinds in one pool: the router chooses between them."
    fleet = "Replicas start, drain before they stop, fail and come back."
    rejected = {"Classes": class_table(report), "Rejected requests": rejection_table(report)}
    return Page(
        title=title,
        subtitle=f"{counted(report.completed, 'request')} in {units.duration(report.duration_s * 1e6)} of traffic, "
        f"{counted(report.replicas, 'replica')} on {counted(report.devices, 'GPU')}, simulated",
        facts=tuple(facts),
        cards=tuple(cards(report)),
        sections=(
            *(rates_section(rates) if rates else ()),
            *section("times", "What users wait for", waits, cdfs(report), {"Times": report.times_table()}),
            *section("summary", "What was served", "", (), {"In short": served_view.summary_table(report)}),
            *over_time_section(report),
            *section("targets", "Targets", targets_text(report), target_pictures(report)),
            *section("classes", "Classes and rejections", order, (), rejected),
            *section("tiers", "Prefix cache", "Where prompts were found.", (), {"Tiers": tier_table(report)}),
            *section("adapters", "Adapters", "", (), {"The most asked for": adapter_table(report)}),
            *section("experts", "Experts", "", expert_pictures(report)),
            *section("pools", "Pools", pools, (), {"Pools": pool_table(report)}),
            *section("kinds", "Kinds of replicas", kinds, (), {"Kinds": kind_table(report)}),
            *section("fleet", "Fleet", fleet, fleet_pictures(report)),
            *notes_sections(report.all_notes),
        ),
    )


def section(
    name: str, title: str, text: str, pictures: Sequence[Figure], tables: Mapping[str, ViewTable] | None = None
) -> list[PageSection]:
    """A section of pictures and tables (by caption); none where there are neither pictures nor rows."""
    drawn = [drawn_table(table, caption) for caption, table in (tables or {}).items() if table.rows]
    return [PageSection(name, title, text, (*pictures, *drawn))] if pictures or drawn else []


def spread(report: ServingReport, name: str) -> str:
    """The interval of a figure in milliseconds, as text; empty without one."""
    if name not in report.intervals:
        return ""
    low, high = report.intervals[name]
    return units.duration_range(low * 1e3, high * 1e3)


def cards(report: ServingReport) -> list[Card]:
    """Headlines."""
    cards_shown = []
    for name in ("ttft_ms", "tpot_ms"):
        spread_ms: TimeSpread = getattr(report, name)
        lines = [(quantile, units.duration(getattr(spread_ms, quantile) * 1e3)) for quantile in ("p90", "p99")]
        interval = spread(report, f"{name}.p50")
        lines += [(f"{report.coverage or 0:.0%} interval of p50", interval)] if interval else []
        cards_shown.append(Card(TIMES[name][0], (("p50", units.duration(spread_ms.p50 * 1e3)),), tuple(lines)))
    rate = units.three_digits(report.requests_per_s)
    per_gpu = ("output tokens/s per GPU", units.three_digits(report.output_tokens_per_s_per_gpu))
    busy = ("GPUs busy", units.share(report.utilisation))
    cards_shown.append(Card("Throughput", (("requests/s", rate),), (per_gpu, busy)))
    lines = [("most KV memory", units.share(report.kv_peak)), ("KV tokens a replica", units.count(report.kv_tokens))]
    lines += [("preemptions", units.count(report.preemptions))]
    if report.slo:
        enough = report.slo_attainment >= report.slo["share"] and not report.overload
        chance = report.p_slo_met
        lines = [("goodput", f"{units.three_digits(report.goodput)} requests/s"), *lines]
        lines += [("chance that targets are met", units.share(chance))] if chance is not None else []
        verdict, tone = ("targets are met", "good") if enough else ("targets are missed", "poor")
        met = (("had all targets", units.share(report.slo_attainment)),)
        cards_shown.append(Card("Targets", met, tuple(lines), verdict, tone))
    else:
        cards_shown.append(Card("Memory", (lines[0],), tuple(lines[1:])))
    if report.kwh_per_million_tokens is not None or report.cost_per_million_tokens is not None:
        cards_shown.append(price_card(report))
    return cards_shown


def price_card(report: ServingReport) -> Card:
    """Energy and price of a million tokens."""
    cost, energy = report.cost_per_million_tokens, report.kwh_per_million_tokens
    head = ("price", units.three_digits(cost)) if cost is not None else ("kWh", units.three_digits(energy))
    lines = (
        [("energy (estimate)", f"{units.three_digits(energy)} kWh")] if cost is not None and energy is not None else []
    )
    lines += [("mean power of a GPU", f"{units.three_digits(report.power_w)} W")] if report.power_w is not None else []
    verdict = (
        "" if cost is None else f"A million output tokens cost {units.three_digits(cost)} in the currency of the price."
    )
    return Card("A million tokens", (head,), tuple(lines), verdict)


def cdfs(report: ServingReport) -> list[Figure]:
    """CDFs of what users see."""
    return [
        Figure(f"{TIMES[name][0]}: share of requests at most as long", {"": cdf(report, name)}, half=True)
        for name in CURVES
        if getattr(report, name).cdf
    ]


def cdf(report: ServingReport, name: str) -> dict[str, Any]:
    """The CDF of a time, its target and what share meets it."""
    short, what = TIMES[name]
    points: tuple[tuple[float, float], ...] = getattr(report, name).cdf
    hints = [
        hover(f"{units.share(share)} of requests", f"{short} at most {units.duration(ms * 1e3)}")
        for ms, share in points
    ]
    times, shares = [ms for ms, _ in points], [100 * share for _, share in points]
    line = curve(times, shares, "blue", {"width": 2}, hovertext=hints, hoverinfo="text")
    limit = report.slo.get(name)
    shapes = [] if limit is None else [dashed("x", limit)]
    positive = [ms for ms, _ in points if ms > 0]
    wide = positive and positive[-1] > 20 * positive[0]
    axis = titled(f"{short}, ms ({what})", rangemode="tozero")
    if wide:
        ends = [math.log10(value) for value in (positive[0], max(positive[-1], limit or 0.0))]
        axis = {"title": axis["title"], "type": "log", "range": [ends[0] - 0.1, ends[1] + 0.1]}
    return figure([line], 300, shapes=shapes, xaxis=axis, yaxis=titled("% of requests", range=[0, 101]))


def over_time_section(report: ServingReport) -> list[PageSection]:
    """Batches, KV memory and the queue over time, pool by pool."""
    pools = {name: rows for name, rows in report.over_time.items() if rows}
    if not pools:
        return []
    pictures = {
        "Sequences that decode in a batch, and prompt tokens of one": batches,
        "KV memory in use": lambda rows: filled_curve(rows, "kv_share", 100.0, "% of KV blocks", "orange"),
        "Requests that wait on a replica": lambda rows: filled_curve(rows, "waiting", 1.0, "requests", "red"),
        "Time that replicas compute": lambda rows: filled_curve(rows, "busy_share", 100.0, "% of time", "green"),
    }
    parts = [
        Figure(label, {name if len(pools) > 1 else "": draw(rows) for name, rows in pools.items()}, half=True)
        for label, draw in pictures.items()
    ]
    choices = tuple((name, POOLS[name]) for name in pools) if len(pools) > 1 else ()
    text = "Means of spans of equal length, over all replicas, weighted by the length of iterations."
    return [PageSection("time", "Over time", text, tuple(parts), choices)]


def batches(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """What batches are made of: sequences that decode on the left axis, prompt tokens on the right."""
    times = [row["start_s"] for row in rows]
    lines = (("decodes", "sequences that decode", "blue", "y"), ("prefill_tokens", "prompt tokens", "pink", "y2"))
    data = [
        curve(
            times,
            [row[name] for row in rows],
            hue,
            name=what,
            yaxis=axis,
            hovertemplate=f"%{{y:.3g}} {what} at %{{x:.3g}} s<extra></extra>",
        )
        for name, what, hue, axis in lines
    ]
    axes = {"yaxis": titled("sequences", rangemode="tozero"), "yaxis2": titled("tokens", **RIGHT)}
    return figure(data, 300, **LEGEND, xaxis=titled("seconds"), **axes)


def filled_curve(rows: Sequence[Mapping[str, float]], name: str, factor: float, what: str, hue: str) -> dict[str, Any]:
    """One figure over time, as an area."""
    area: dict[str, Any] = {"fill": "tozeroy", "fillcolor": colours.css("bar")}
    hint = f"%{{y:.3g}} {what} at %{{x:.3g}} s<extra></extra>"
    values = [row[name] * factor for row in rows]
    line = curve([row["start_s"] for row in rows], values, hue, **area, hovertemplate=hint)
    return figure([line], 300, xaxis=titled("seconds"), yaxis=titled(what, rangemode="tozero"))


def targets_text(report: ServingReport) -> str:
    """What was asked for, in words; empty where nothing was."""
    limits = {name: f"{value:,g} ms" for name, value in report.slo.items() if name != "share"}
    limits_text = ", ".join(f"{name.removesuffix('_ms').upper()} at most {value}" for name, value in limits.items())
    return limits_text and (
        f"Asked: {limits_text}, for {units.share(report.slo['share'])} of the requests. What other targets would give:"
    )


def target_pictures(report: ServingReport) -> list[Figure]:
    """Share of requests, and goodput, by how strict the targets are; none without targets."""
    if not report.slo_curve:
        return []
    scales = [scale for scale, _ in report.slo_curve]
    rate = report.requests / report.duration_s
    axis = titled("targets, times as long as asked", type="log", tickvals=[0.1, 0.2, 0.5, 1, 2, 5, 10])
    pictures: dict[str, tuple[float, str, str, dict[str, Any]]] = {
        "Share of requests that meet all targets": (100.0, "% of requests", "blue", {"range": [0, 101]}),
        "Goodput: requests a second that meet all targets": (rate, "requests/s", "teal", {"rangemode": "tozero"}),
    }
    parts = []
    for label, (factor, what, hue, axis_options) in pictures.items():
        shares = [share * factor for _, share in report.slo_curve]
        hint = f"%{{y:.3g}} {what} at %{{x:.2g}} times<extra></extra>"
        line = curve(scales, shares, hue, {"width": 2}, hovertemplate=hint)
        picture = figure([line], 300, shapes=[dashed("x", 1.0)], xaxis=axis, yaxis=titled(what, **axis_options))
        parts.append(Figure(label, {"": picture}, half=True))
    return parts


def expert_pictures(report: ServingReport) -> list[Figure]:
    """How uneven the GPUs of experts were, iteration by iteration; none where experts are even."""
    points = report.expert_balance.get("over_time")
    if not points:
        return []
    starts, factors = zip(*points, strict=True)
    hint = "%{y:.3g} times the mean at iteration %{x:,}<extra></extra>"
    line = curve((), factors, "blue", hovertemplate=hint) | {"x": list(starts)}
    axes = {"xaxis": titled("iterations"), "yaxis": titled("busiest GPU over the mean")}
    return [Figure("Load of experts", {"": figure([line], 300, **axes)})]


def rates_section(rates: RateSweep) -> list[PageSection]:
    """Latency and throughput against rate, as curves and as a table."""
    columns_of_time = {"ttft_ms": "TTFT, ms", "tpot_ms": "TPOT, ms"}
    parts = []
    for name, what in columns_of_time.items():
        spreads = [getattr(run, name) for _, run in rates]
        data = [
            _against(rates, [getattr(spread, quantile) for spread in spreads], quantile, hue)
            for quantile, hue in (("p50", "blue"), ("p90", "orange"), ("p99", "red"))
        ]
        limit = rates[0][1].slo.get(name)
        shapes = [] if limit is None else [dashed("y", limit)]
        parts.append(Figure(f"{what} against rate", {"": _curves(data, what, shapes=shapes)}, half=True))
    rate = [_against(rates, [run.requests_per_s for _, run in rates], "served", "blue")]
    if rates[0][1].slo:
        rate.append(_against(rates, [run.goodput for _, run in rates], "met all targets", "teal"))
    rate_per_gpu = [run.output_tokens_per_s_per_gpu for _, run in rates]
    tokens = [_against(rates, rate_per_gpu, "tokens/s per GPU", "purple")]
    parts.append(Figure("Requests served a second", {"": _curves(rate, "requests/s")}, half=True))
    parts.append(Figure("Output tokens a second and GPU", {"": _curves(tokens, "tokens/s")}, half=True))
    table = served_view.sweep_table(rates, "rate")
    text = "The same traffic, sent at other rates. What follows below is the last of them."
    return section("rates", "Latency against rate", text, parts, {"Rates": table})


def _against(rates: RateSweep, values: Sequence[float], name: str, hue: str) -> dict[str, Any]:
    hint = f"{name} %{{y:.4g}} at %{{x:.4g}} requests/s<extra></extra>"
    more = {"mode": "lines+markers", "name": name, "hovertemplate": hint}
    return curve([rate for rate, _ in rates], values, hue, {"width": 2}, **more)


def _curves(data: list[dict[str, Any]], what: str, **layout: Any) -> dict[str, Any]:
    axes = {"xaxis": titled("requests/s"), "yaxis": titled(what, rangemode="tozero")}
    return figure(data, 300, **axes, **LEGEND, **layout)
