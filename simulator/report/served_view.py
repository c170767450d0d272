"""What a person is shown of served traffic: one list of tables, which a terminal, a page and a notebook draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...datasets.counts import counted
from .served import ServingReport
from .served_times import NAME
from .view import CURRENCY, PAGE, Toned, ViewColumn, ViewTable, number_text, shares_text

NO_SLO = "no slo is set"
USER_TIMES = ("ttft_ms", "tpot_ms")
INTERVALS = {"ttft_ms.p50": "TTFT p50", "tpot_ms.p50": "TPOT p50", "output_tokens_per_s": "tokens/s"}
TIERS = {"gpu": "GPU", "host": "host memory", "ssd": "drives", "remote": "shared store"}
TIER_COUNTS = ("tokens_found", "loads", "tokens_kept", "tokens_evicted")


def time_columns(upper: str) -> list[ViewColumn]:
    """Of the median and an upper percentile of TTFT and TPOT."""
    return [ViewColumn(title, "time_ms") for title in ("TTFT p50", upper, "TPOT p50", upper)]


def user_times(run: ServingReport | Mapping[str, Any], upper: str) -> list[float]:
    """The values under :func:`time_columns` of a report or a part of one; NaN for a time that nobody had."""
    figures = run if isinstance(run, Mapping) else {name: getattr(run, name).to_dict() for name in USER_TIMES}
    values = [figures[name][quantile] for name in USER_TIMES for quantile in ("p50", upper)]
    return [math.nan if value is None else value for value in values]


def attained(run: ServingReport | Mapping[str, Any]) -> float | str:
    """The share of requests that had all of slo, of a report or a class of one; words where nothing was asked."""
    figures = run if isinstance(run, Mapping) else vars(run)
    targets = figures["slo"] or any(kind["slo"] for kind in figures.get("classes", {}).values())
    return figures["slo_attainment"] if targets else NO_SLO


def attained_text(share: float | str) -> str:
    """The same in a sentence."""
    return share if isinstance(share, str) else f"{share:.1%} of requests had all of slo"


def summary_table(report: ServingReport) -> ViewTable:
    """What was served by what, what it took, how sure it is, and who measured what it stands on."""
    fewer = report.fleet and report.fleet["mean_replicas"] < report.replicas  # an autoscaler may start fewer
    caption = f"{'at most ' if fewer else ''}{counted(report.replicas, 'replica')}"
    rows = [*served_rows(report), *fleet_rows(report), *price_rows(report), *sure_rows(report)]
    return ViewTable(caption, [NAME, NAME], rows)


def served_rows(report: ServingReport) -> list[tuple[str, str]]:
    """Requests, tokens, memory, and what took part beside the model; what was not in the run has no row."""
    why = ", ".join(f"{limit['requests']:,} by {name.replace('_', ' ')}" for name, limit in report.rejections.items())
    rejected = f"{report.rejected:,} rejected" + (f" ({why})" if why else "")
    rejected += f", {report.failed:,} failed" if report.failed else ""
    tokens = f"{number_text(report.output_tokens_per_s)} output tokens/s"
    kv_text = memory_text(vars(report))
    found = f"{report.prefix_hit_share:.0%} of tokens were found{tiers_text(report)}"
    rows = {
        "requests": f"{report.completed:,} served, {rejected}, in {report.duration_s:,.1f} s",
        "throughput": f"{number_text(report.requests_per_s)} requests/s, {tokens}",
        "per GPU": f"{report.output_tokens_per_s_per_gpu:,.1f} output tokens/s ({counted(report.devices, 'GPU')})",
        "goodput": f"{number_text(report.goodput)} requests/s, {attained_text(attained(report))}",
        "KV memory": f"{kv_text}; {counted(report.preemptions, 'preemption')}",
        "iterations": f"{report.iterations:,}, {report.mean_batch:,.1f} tokens each; {report.utilisation:.0%} busy",
        "speculation": f"{report.tokens_per_decode:.2f} tokens a sequence and decode"
        if report.tokens_per_decode > 1
        else "",
        "prefix cache": found if report.prefix_hit_share else "",
        "adapters": adapters_text(report.adapters),
        "experts": experts_text(report.expert_balance),
        "images": images_text(report.images),
    }
    pools = {
        f"{name} pool": f"{pool['utilisation']:.0%} busy; KV memory: {memory_text(pool)}"
        for name, pool in report.pools.items()
    }
    return [(name, text) for name, text in (rows | pools).items() if text]


def memory_text(kv: Mapping[str, Any]) -> str:
    """How many tokens fit into the KV memory of a replica, and how much of it was in use."""
    ranks = round(kv["kv_tokens"] / kv["kv_rank_tokens"])
    per_rank = f" ({ranks} ranks of {kv['kv_rank_tokens']:,.0f})" if ranks > 1 else ""
    return f"{kv['kv_tokens']:,.0f} tokens a replica{per_rank}, {kv['kv_peak']:.0%} in use at most"


def tiers_text(report: ServingReport) -> str:
    """Where the tokens of the prefix cache were found, and how long a load took; empty without tiers."""
    if not report.kv_tiers:
        return ""
    shares = ", ".join(f"{tier['share']:.0%} {name}" for name, tier in report.kv_tiers.items() if name != "loads")
    loads = report.kv_tiers["loads"]
    return f" ({shares}); {counted(loads['loads'], 'load')} of {loads['mean_ms']:,.1f} ms"


def adapters_text(figures: Mapping[str, Any]) -> str:
    """How many adapters were in a batch, and what loading them took; empty without any."""
    if not figures:
        return ""
    return (
        f"{figures['asked_for']:,} asked for, {figures['in_batch']:.1f} in a batch of at most {figures['on_gpu']}; "
        f"{counted(figures['loads'], 'load')} of {figures['load_ms']:,.1f} ms, {figures['loads_from_disk']:,} of them "
        f"from disk; {counted(figures['waited'], 'request')} waited for a place"
    )


def experts_text(figures: Mapping[str, Any]) -> str:
    """How uneven experts were, and what that and moving them took; empty where they are even."""
    if not figures:
        return ""
    return (
        f"the busiest GPU has {figures['mean']:.2f} times the mean, {figures['most']:.2f} at most: "
        f"{figures['longer_ms']:,.2f} ms an iteration; {counted(figures['rebalances'], 'rebalance')} of "
        f"{figures['move_ms']:,.1f} ms"
    )


def images_text(figures: Mapping[str, float]) -> str:
    """How many images there were, and what encoding them took; empty without any."""
    if not figures:
        return ""
    where = f"{counted(figures['images'], 'image')} in {counted(figures['requests'], 'request')}"
    text = f"{where}, {figures['encode_ms']:,.1f} ms each"
    if "gpus" not in figures:
        return f"{text}, on the GPUs that prefill"
    return (
        f"{text}; {figures['wait_ms']:,.1f} ms until they are encoded, {figures['transfer_ms']:,.2f} ms to a replica; "
        f"{counted(figures['gpus'], 'GPU')} to encode, {figures['utilisation']:.0%} busy"
    )


def fleet_rows(report: ServingReport) -> list[tuple[str, str]]:
    """Replicas that came and went, and failed."""
    fleet, without = report.fleet, report.without_failures
    if not fleet:
        return []
    hours = f"{fleet['gpu_hours']:,.4g} GPU-hours, {fleet['mean_replicas']:,.2f} replicas on average"
    rows = [("fleet", f"{hours}, {counted(fleet['starts'], 'start')}")]
    if without:
        lost = f"{counted(fleet['lost_requests'], 'request')} lost {counted(fleet['lost_tokens'], 'token')}"
        rows.append(("failures", f"{fleet['failures']:,}, {fleet['down_share']:.2%} of the time down; {lost}"))
        share = NO_SLO if attained(report) == NO_SLO else without["slo_attainment"]
        rows.append(("without failures", f"{attained_text(share)}, TTFT p99 {without['ttft_ms']['p99']:,.1f} ms"))
    return rows


def price_rows(report: ServingReport) -> list[tuple[str, str]]:
    """Power, energy and cost, where they are known."""
    rows = []
    if report.power_w is not None:
        energy = f"{report.kwh_per_million_tokens or 0:,.3g} kWh per million output tokens"
        rows.append(("power (estimate)", f"{report.power_w:,.0f} W a GPU, {energy}"))
    if report.cost_per_million_tokens is not None:
        rows.append(("cost", f"{report.cost_per_million_tokens:,.4g} per million output tokens, {CURRENCY}"))
    return rows


def sure_rows(report: ServingReport) -> list[tuple[str, str]]:
    """How sure the figures are, and who measured what they stand on."""
    rows = []
    if report.intervals:
        spans = {title: report.intervals[name] for name, title in INTERVALS.items() if name in report.intervals}
        texts = [f"{title} {low:,.1f} to {high:,.1f}" for title, (low, high) in spans.items()]
        rows.append((f"{report.coverage:.0%} interval", ", ".join(texts)))
    if report.p_slo_met is not None:
        rows.append(("chance of slo", f"{report.p_slo_met:.0%} that {report.slo['share']:.0%} of requests have it"))
    if report.p_p99_ttft_met is not None:
        most = f"{report.slo['ttft_ms']:g} ms"
        rows.append(("chance of p99", f"{report.p_p99_ttft_met:.0%} that the 99th percentile of TTFT is within {most}"))
    if report.sources:
        rows.append(("measured by", shares_text(report.sources)))
    return rows


def class_table(report: ServingReport) -> ViewTable:
    """What each class of requests saw."""
    counts = [ViewColumn(title, "count") for title in ("priority", "served", "rejected")]
    targets = ViewColumn("had all of slo", "share", bar=True), ViewColumn("goodput", "amount")
    rows = []
    for name, figures in report.classes.items():
        served, came = figures["completed"], figures["requests"]
        had = attained(figures), figures["goodput"]
        rows.append([name, figures["priority"], served, came - served, *user_times(figures, "p99"), *had])
    return ViewTable("classes, milliseconds", [NAME, *counts, *time_columns("p99"), *targets], rows)


def rejection_table(report: ServingReport) -> ViewTable:
    """Which limits rejected requests, on a page."""
    rows = [
        [name.replace("_", " "), limit["requests"], limit.get("most", limit.get("most_tokens", 0)), limit["setting"]]
        for name, limit in report.rejections.items()
    ]
    counts = ViewColumn("rejected", "count", bar=True), ViewColumn("at most", "figure")
    return ViewTable(
        "rejected requests", [ViewColumn("limit", "words"), *counts, ViewColumn("setting", "words")], rows, PAGE
    )


def tier_table(report: ServingReport) -> ViewTable:
    """Where the prefix cache found tokens, on a page."""
    rows = [
        [TIERS[name], tier["share"], *(tier.get(count) for count in TIER_COUNTS), tier.get("bytes_read")]
        for name, tier in report.kv_tiers.items()
        if name != "loads"
    ]
    counts = [ViewColumn(title, "count") for title in ("tokens found", "loads", "tokens kept", "tokens forgotten")]
    columns = [NAME, ViewColumn("of all tokens", "share", bar=True), *counts, ViewColumn("read", "size")]
    return ViewTable("tiers", columns, rows, PAGE)


def adapter_table(report: ServingReport) -> ViewTable:
    """What the requests of each adapter had, on a page."""
    names = ("adapter", "requests", "requests_per_s", "output_tokens_per_s", "ttft_ms")
    rows = [[row[name] for name in names] for row in report.adapters.get("by_adapter", ())]
    rates = [ViewColumn(title, "amount") for title in ("requests/s", "output tokens/s")]
    columns = [ViewColumn("adapter"), ViewColumn("requests", "count", bar=True), *rates]
    return ViewTable("the most asked for", [*columns, ViewColumn("mean TTFT", "time_ms")], rows, PAGE)


def pool_table(report: ServingReport) -> ViewTable:
    """The pools that prefill and decode, on a page."""
    columns = {
        "replicas": ViewColumn("replicas", "count"),
        "devices": ViewColumn("GPUs", "count"),
        "utilisation": ViewColumn("busy", "share", bar=True),
        "kv_tokens": ViewColumn("KV tokens a replica", "count"),
        "kv_peak": ViewColumn("most KV memory", "share", bar=True),
    }
    rows = [[name, *(pool[column] for column in columns)] for name, pool in report.pools.items()]
    return ViewTable("pools", [NAME, *columns.values()], rows, PAGE)


def kind_table(report: ServingReport) -> ViewTable:
    """What each of two kinds of replicas served and cost."""
    counts = [ViewColumn(title, "count") for title in ("replicas", "GPUs", "served")]
    rate = ViewColumn("tokens/s/GPU", "tenths")
    ends = [ViewColumn("busy", "percent"), ViewColumn("cost", "figure", "of a million output tokens")]
    ends += [ViewColumn("output tokens", "count", only=PAGE), ViewColumn("most KV memory", "share", only=PAGE)]
    rows = []
    for name, kind in report.kinds.items():
        sizes = [kind[figure] for figure in ("replicas", "devices", "completed", "output_tokens_per_s_per_gpu")]
        cost = kind["cost_per_million_tokens"] or None
        title = f"{name} ({kind['device']})" if kind["device"] else name
        more = kind["utilisation"], cost, kind["output_tokens"], kind["kv_peak"]
        rows.append([title, *sizes, *user_times(kind, "p99"), *more])
    return ViewTable("kinds of replicas, milliseconds", [NAME, *counts, rate, *time_columns("p99"), *ends], rows)


def tables(report: ServingReport) -> list[ViewTable]:
    """All tables of a report, the most asked for first."""
    parts = (class_table, rejection_table, kind_table, pool_table, tier_table, adapter_table)
    return [report.times_table(), summary_table(report), *(part(report) for part in parts)]


def sweep_table(reports: Sequence[tuple[float, ServingReport]], unit: str) -> ViewTable:
    """Latency against rate."""
    columns = [ViewColumn(f"{time} {quantile}", "time_ms") for time in ("TTFT", "TPOT") for quantile in ("p50", "p90")]
    rows = [
        [rate, *load_row(report), Toned("overload" if report.overload else "", "poor", report.overload)]
        for rate, report in reports
    ]
    columns = [ViewColumn(unit, "digits"), *columns, *LOADS, NAME]
    return ViewTable("latency against rate, milliseconds", columns, rows)


LOADS = ViewColumn("tokens/s", "count"), ViewColumn("slo", "share")


def load_row(report: ServingReport) -> list[Any]:
    """Times, output tokens a second, and the share that had all of slo: a run as a row beside others."""
    return [*user_times(report, "p90"), report.output_tokens_per_s, attained(report)]
