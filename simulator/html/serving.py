"""The page of served traffic: what users wait for, what the engine did meanwhile, and how much met the targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..report.served import ServingReport, TimeSpread
from . import colours, units
from .charts import LEGEND, RIGHT, curve, dashed, figure, hover, titled
from .fleet import fleet_section, kinds_section
from .page import Card, Cell, Column, Figure, Note, Page, PageSection, Part, Table

TIMES = {  # figures with a CDF -> (short name, what it is, the target that limits it)
    "ttft_ms": ("TTFT", "until the first token", "ttft_ms"),
    "tpot_ms": ("TPOT", "of each later token of a request, on average", "tpot_ms"),
    "itl_ms": ("ITL", "between two tokens", ""),
    "e2e_ms": ("end to end", "until the last token", "e2e_ms"),
}
MORE_TIMES = {
    "queue_ms": ("queue", "until the request runs", ""),
    "normalised_ms": ("per output token", "end to end over tokens of the answer", ""),
    "prefill_e2e_ms": ("prefill", "until the prompt is computed, of requests whose cache moves", ""),
    "kv_transfer_ms": ("KV transfer", "of a cache to the pool that decodes", ""),
    "decode_e2e_ms": ("decode", "from the arrival of the cache to the last token", ""),
}
PARTS = ("mean", "p50", "p90", "p99")
CLASS_TIMES = tuple((time, part) for time in ("ttft", "tpot") for part in ("p50", "p99"))
TIER_COUNTS = ("tokens_found", "loads", "tokens_kept", "tokens_evicted")
TIERS = {"gpu": "GPU", "host": "host memory", "ssd": "drives", "remote": "shared store"}
POOLS = {
    "all": "all replicas",
    "prefill": "prefill",
    "decode": "decode",
    "first": "replicas of the first kind",
    "second": "of the second",
}
RateSweep = Sequence[tuple[str, float, ServingReport]]  # (name, rate, what came of it)


def page(report: ServingReport, title: str, facts: Sequence[str] = (), rates: RateSweep = ()) -> Page:
    """Everything the page shows of a run, and of other ``rates`` where there are any."""
    sections = [
        rates_section(rates) if rates else None,
        times_section(report),
        over_time_section(report),
        targets_section(report),
        classes_section(report),
        tiers_section(report),
        adapters_section(report),
        experts_section(report),
        pools_section(report),
        kinds_section(report),
        fleet_section(report),
    ]
    notes = tuple(note for note in (report.overload, *report.notes) if note)
    notes_section = (PageSection("notes", "Notes", "", (Note("", notes),)),) if notes else ()
    return Page(
        title=title,
        subtitle=f"{count_text(report.completed, 'request')} in {units.duration(report.duration_s * 1e6)} of traffic, "
        f"{count_text(report.replicas, 'replica')} on {count_text(report.devices, 'GPU')}, simulated",
        facts=tuple(facts),
        cards=tuple(cards(report)),
        sections=(*(section for section in sections if section is not None), *notes_section),
    )


def microseconds(time_ms: float | None) -> float | None:
    """A time that nobody may have had."""
    return None if time_ms is None else time_ms * 1e3


def count_text(count: int, what: str) -> str:
    """A count and its noun, in the plural where there are several."""
    return f"{units.count(count)} {what}" + ("s" if count != 1 else "")


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


def times_section(report: ServingReport) -> PageSection:
    """CDFs of what users see, and all times as a table."""
    figures = [
        Figure(f"{TIMES[name][0]}: share of requests at most as long", {"": cdf(report, name)}, half=True)
        for name in TIMES
        if getattr(report, name).cdf
    ]
    rows = [
        (Cell(short, hint=what), *(Cell(units.duration(getattr(spread_ms, quantile) * 1e3)) for quantile in PARTS),
         Cell(spread(report, f"{name}.p50")), Cell(spread(report, f"{name}.p99")))
        for name, (short, what, _) in (TIMES | MORE_TIMES).items()
        if (spread_ms := getattr(report, name)) is not None
    ]  # fmt: skip
    columns = Column("", words=True), *map(Column, PARTS), Column("interval of p50"), Column("interval of p99")
    if not report.intervals:
        rows, columns = [row[:5] for row in rows], columns[:5]
    parts: list[Part] = [*figures, Table("Times", columns, rows)]
    text = "How long requests take. A dashed line is the target."
    return PageSection("times", "What users wait for", text, tuple(parts))


def cdf(report: ServingReport, name: str) -> dict[str, Any]:
    """The CDF of a time, its target and what share meets it."""
    short, what, target = TIMES[name]
    points: tuple[tuple[float, float], ...] = getattr(report, name).cdf
    hints = [
        hover(f"{units.share(share)} of requests", f"{short} at most {units.duration(ms * 1e3)}")
        for ms, share in points
    ]
    times, shares = [ms for ms, _ in points], [100 * share for _, share in points]
    line = curve(times, shares, "blue", {"width": 2}, hovertext=hints, hoverinfo="text")
    limit = report.slo.get(target)
    shapes = [] if limit is None else [dashed("x", limit)]
    positive = [ms for ms, _ in points if ms > 0]
    wide = positive and positive[-1] > 20 * positive[0]
    axis = titled(f"{short}, ms ({what})", rangemode="tozero")
    if wide:
        ends = [math.log10(value) for value in (positive[0], max(positive[-1], limit or 0.0))]
        axis = {"title": axis["title"], "type": "log", "range": [ends[0] - 0.1, ends[1] + 0.1]}
    return figure([line], 300, shapes=shapes, xaxis=axis, yaxis=titled("% of requests", range=[0, 101]))


def over_time_section(report: ServingReport) -> PageSection | None:
    """Batches, KV memory and the queue over time, pool by pool."""
    pools = {name: rows for name, rows in report.over_time.items() if rows}
    if not pools:
        return None
    pictures = {
        "Sequences that decode in a batch, and prompt tokens of one": batches,
        "KV memory in use": lambda rows: filled_curve(rows, "kv_share", 100.0, "% of KV blocks", "orange"),
        "Requests that wait on a replica": lambda rows: filled_curve(rows, "waiting", 1.0, "requests", "red"),
        "Time that replicas compute": lambda rows: filled_curve(rows, "busy_share", 100.0, "% of time", "green"),
    }
    parts: list[Part] = [
        Figure(label, {name if len(pools) > 1 else "": draw(rows) for name, rows in pools.items()}, half=True)
        for label, draw in pictures.items()
    ]
    choices = tuple((name, POOLS[name]) for name in pools) if len(pools) > 1 else ()
    text = "Means of spans of equal length, over all replicas, weighted by the length of iterations."
    return PageSection("time", "Over time", text, tuple(parts), choices)


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


def targets_section(report: ServingReport) -> PageSection | None:
    """Share of requests, and goodput, by how strict the targets are; None without targets."""
    if not report.slo_curve:
        return None
    limits = {name: f"{value:,g} ms" for name, value in report.slo.items() if name != "share"}
    limits_text = ", ".join(f"{name.removesuffix('_ms').upper()} at most {value}" for name, value in limits.items())
    scales = [scale for scale, _ in report.slo_curve]
    rate = report.requests / report.duration_s
    axis = titled("targets, times as long as asked", type="log", tickvals=[0.1, 0.2, 0.5, 1, 2, 5, 10])
    pictures: dict[str, tuple[float, str, str, dict[str, Any]]] = {
        "Share of requests that meet all targets": (100.0, "% of requests", "blue", {"range": [0, 101]}),
        "Goodput: requests a second that meet all targets": (rate, "requests/s", "teal", {"rangemode": "tozero"}),
    }
    parts: list[Part] = []
    for label, (factor, what, hue, axis_options) in pictures.items():
        shares = [share * factor for _, share in report.slo_curve]
        hint = f"%{{y:.3g}} {what} at %{{x:.2g}} times<extra></extra>"
        line = curve(scales, shares, hue, {"width": 2}, hovertemplate=hint)
        picture = figure([line], 300, shapes=[dashed("x", 1.0)], xaxis=axis, yaxis=titled(what, **axis_options))
        parts.append(Figure(label, {"": picture}, half=True))
    text = (
        f"Asked: {limits_text}, for {units.share(report.slo['share'])} of the requests. What other targets would give:"
    )
    return PageSection("targets", "Targets", text, tuple(parts))


def classes_section(report: ServingReport) -> PageSection | None:
    """What each class of requests saw, and which limits rejected them; None where nobody was told apart or rejected."""
    parts: list[Part] = []
    if report.classes:
        rows = [
            (Cell(name), Cell(str(seen["priority"])), Cell(units.count(seen["completed"])),
             Cell(units.count(seen["requests"] - seen["completed"])),
             *(Cell(units.duration(microseconds(seen[f"{time}_ms"][part]))) for time, part in CLASS_TIMES),
             Cell(units.share(seen["slo_attainment"]), bar=seen["slo_attainment"]))
            for name, seen in report.classes.items()
        ]  # fmt: skip
        numbers = ("priority", "served", "rejected", "TTFT p50", "p99", "TPOT p50", "p99", "had all targets")
        parts.append(Table("Classes", (Column("class", words=True), *map(Column, numbers)), rows))
    if report.rejections:
        limits = [
            (Cell(name.replace("_", " ")),
             Cell(units.count(limit["requests"]), bar=limit["requests"] / report.requests),
             Cell(f"{limit.get('most', limit.get('most_tokens', 0)):,g}"), Cell(limit["setting"]))
            for name, limit in report.rejections.items()
        ]  # fmt: skip
        heads = Column("limit", words=True), Column("rejected"), Column("at most"), Column("setting", words=True)
        parts.append(Table("Rejected requests", heads, limits))
    if not parts:
        return None
    text = "Requests of a lower priority number go first. A rejected request has no times, and misses its targets."
    return PageSection("classes", "Classes and rejections", text, tuple(parts))


def tiers_section(report: ServingReport) -> PageSection | None:
    """Where the prefix cache found tokens; None without tiers."""
    tiers = {name: tier for name, tier in report.kv_tiers.items() if name != "loads"}
    if not tiers:
        return None
    rows = [
        (Cell(TIERS[name]), Cell(units.share(tier["share"]), bar=tier["share"]),
         *(Cell(units.count(tier[name]) if name in tier else "") for name in TIER_COUNTS),
         Cell(units.with_prefix(tier["bytes_read"], "B") if "bytes_read" in tier else ""))
        for name, tier in tiers.items()
    ]  # fmt: skip
    numbers = ("of all tokens", "tokens found", "loads", "tokens kept", "tokens forgotten", "read")
    loads = report.kv_tiers["loads"]
    text = (
        "Tokens of prompts that were found in place of computed. "
        f"{units.count(loads['loads'])} loads from below the GPU took {units.duration(loads['mean_ms'] * 1e3)} each."
    )
    return PageSection(
        "tiers", "Prefix cache", text, (Table("Tiers", (Column("tier", words=True), *map(Column, numbers)), rows),)
    )


def adapters_section(report: ServingReport) -> PageSection | None:
    """What low-rank adapters took, and what the requests of each had; None without adapters."""
    figures = report.adapters
    if not figures:
        return None
    rows = [
        (Cell(f"{row['adapter']}"), Cell(units.count(row["requests"]), bar=row["requests"] / report.requests),
         Cell(f"{row['requests_per_s']:,.3g}"), Cell(f"{row['output_tokens_per_s']:,.3g}"),
         Cell(units.duration(row["ttft_ms"] * 1e3)))
        for row in figures["by_adapter"]
    ]  # fmt: skip
    text = (
        f"{figures['in_batch']:.1f} adapters were in a batch, of at most {figures['on_gpu']} on a GPU. "
        f"{units.count(figures['loads'])} loads took {units.duration(figures['load_ms'] * 1e3)} each, and "
        f"{units.count(figures['waited'])} requests waited for a place."
    )
    heads = Column("adapter"), *map(Column, ("requests", "requests/s", "output tokens/s", "mean TTFT"))
    return PageSection("adapters", "Adapters", text, (Table("The most asked for", heads, rows),))


def experts_section(report: ServingReport) -> PageSection | None:
    """How uneven the GPUs of experts were, iteration by iteration; None where experts are even."""
    figures = report.expert_balance
    if not figures:
        return None
    hint = "%{y:.3g} times the mean at iteration %{x:,}<extra></extra>"
    line = curve((), [factor for _, factor in figures["over_time"]], "blue", hovertemplate=hint)
    line["x"] = [start for start, _ in figures["over_time"]]
    axes = {"xaxis": titled("iterations"), "yaxis": titled("busiest GPU over the mean")}
    text = (
        f"The busiest GPU had {figures['mean']:.2f} times the mean: {units.duration(figures['longer_ms'] * 1e3)} "
        f"an iteration. {units.count(figures['rebalances'])} rebalances took "
        f"{units.duration(figures['move_ms'] * 1e3)} each."
    )
    return PageSection("experts", "Experts", text, (Figure("Load of experts", {"": figure([line], 300, **axes)}),))


def pools_section(report: ServingReport) -> PageSection | None:
    """The pools that prefill and decode, and what moves between them; None with one pool."""
    if not report.pools:
        return None
    rows = [
        (Cell(name), Cell(units.count(pool["replicas"])), Cell(units.count(pool["devices"])),
         Cell(units.share(pool["utilisation"]), bar=pool["utilisation"]),
         Cell(units.count(pool["kv_tokens"])), Cell(units.share(pool["kv_peak"]), bar=pool["kv_peak"]))
        for name, pool in report.pools.items()
    ]  # fmt: skip
    numbers = ("replicas", "GPUs", "busy", "KV tokens a replica", "most KV memory")
    columns = (Column("pool", words=True), *map(Column, numbers))
    moved = units.with_prefix(report.kv_transfer_bytes, "B")
    text = f"One pool prefills, one decodes; {moved} of caches moved between them."
    return PageSection("pools", "Pools", text, (Table("Pools", columns, rows),))


def rates_section(rates: RateSweep) -> PageSection:
    """Latency and throughput against rate, as curves and as a table."""
    columns_of_time = {"ttft_ms": "TTFT, ms", "tpot_ms": "TPOT, ms"}
    parts: list[Part] = []
    for name, what in columns_of_time.items():
        spreads = [getattr(run, name) for _, _, run in rates]
        data = [
            _against(rates, [getattr(spread, quantile) for spread in spreads], quantile, hue)
            for quantile, hue in (("p50", "blue"), ("p90", "orange"), ("p99", "red"))
        ]
        limit = rates[0][2].slo.get(name)
        shapes = [] if limit is None else [dashed("y", limit)]
        parts.append(Figure(f"{what} against rate", {"": _curves(data, what, shapes=shapes)}, half=True))
    rate = [_against(rates, [run.requests_per_s for _, _, run in rates], "served", "blue")]
    if rates[0][2].slo:
        rate.append(_against(rates, [run.goodput for _, _, run in rates], "met all targets", "teal"))
    rate_per_gpu = [run.output_tokens_per_s_per_gpu for _, _, run in rates]
    tokens = [_against(rates, rate_per_gpu, "tokens/s per GPU", "purple")]
    parts.append(Figure("Requests served a second", {"": _curves(rate, "requests/s")}, half=True))
    parts.append(Figure("Output tokens a second and GPU", {"": _curves(tokens, "tokens/s")}, half=True))
    quantiles = [Column(f"{head} {quantile}") for head in ("TTFT", "TPOT") for quantile in ("p50", "p90")]
    columns = (Column("rate"), *quantiles, Column("tokens/s"), Column("targets"), Column("", words=True))  # fmt: skip
    rows = [
        (Cell(name), *(Cell(units.duration(getattr(getattr(run, figure_name), quantile) * 1e3))
                       for figure_name in columns_of_time for quantile in ("p50", "p90")),
         Cell(units.count(run.output_tokens_per_s)), Cell(units.share(run.slo_attainment) if run.slo else ""),
         Cell("overload" if run.overload else "", tone="poor", hint=run.overload))
        for name, _, run in rates
    ]  # fmt: skip
    parts.append(Table("Rates", columns, rows))
    text = "The same traffic, sent at other rates. What follows below is the last of them."
    return PageSection("rates", "Latency against rate", text, tuple(parts))


def _against(rates: RateSweep, values: Sequence[float], name: str, hue: str) -> dict[str, Any]:
    hint = f"{name} %{{y:.4g}} at %{{x:.4g}} requests/s<extra></extra>"
    more = {"mode": "lines+markers", "name": name, "hovertemplate": hint}
    return curve([rate for _, rate, _ in rates], values, hue, {"width": 2}, **more)


def _curves(data: list[dict[str, Any]], what: str, **layout: Any) -> dict[str, Any]:
    axes = {"xaxis": titled("requests/s"), "yaxis": titled(what, rangemode="tozero")}
    return figure(data, 300, **axes, **LEGEND, **layout)
