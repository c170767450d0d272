"""What ``opcast serving`` prints of a report, of capacity, of rates and of ways."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..simulator.report.served import ServingReport, TimeSpread
from ..simulator.report.view import counted
from .show import listed, say, table
from .simulate import CURRENCY

if TYPE_CHECKING:
    from ..simulator.question.serving import ServingRequest
    from ..simulator.serving.capacity import Capacity
    from ..simulator.serving.comparison import WayOfServing

TIMES = {  # as they are called -> the report's name; those that moved caches have a row where any did
    "TTFT": "ttft_ms",
    "TPOT": "tpot_ms",
    "ITL": "itl_ms",
    "end to end": "e2e_ms",
    "queue": "queue_ms",
    "per output token": "normalised_ms",
    "prefill": "prefill_e2e_ms",
    "KV transfer": "kv_transfer_ms",
    "decode": "decode_e2e_ms",
}
INTERVALS = {"ttft_ms.p50": "TTFT p50", "tpot_ms.p50": "TPOT p50", "output_tokens_per_s": "tokens/s"}


def show_capacity(best: Capacity, unit: str) -> None:
    """The rate, how sure it is, and what was tried."""
    tried = [(f"{rate:.4g}", f"{share:.1%}", "yes" if met else "no") for rate, share, met in sorted(best.tried)]
    table("rates tried", (unit, "had all of slo", "enough"), tried)
    sure = f", {best.interval[0]:.4g} to {best.interval[1]:.4g} over {len(best.rates)} seeds" if best.rates[1:] else ""
    print(f"capacity: {best.rate:.4g} {unit}{sure}, {best.requests_per_s_per_gpu:.4g} per GPU")
    if best.attained[1:]:
        print(f"at this rate {best.seeds_met} of {len(best.attained)} seeds have the share of slo; the first of them:")
    if best.rates_of_errors is not None:
        slow, fast = best.rates_of_errors
        print(f"by 90 % of the errors of known steps: {f'{slow:.4g}' if slow else 'none'} to {fast:.4g} {unit}")
    if best.p_p99_ttft_met is not None:
        print(f"the 99th percentile of TTFT is within slo.ttft_ms there with a chance of {best.p_p99_ttft_met:.0%}")
    show(best.at_rate)


def show_ways(request: ServingRequest, ways: list[WayOfServing]) -> None:
    """Replicas that do both beside pools, the best first."""
    from ..simulator.serving.report import number_text

    times_of = ("TTFT p50", "p90", "TPOT p50", "p90", "KV transfer")
    heads = ("", "GPUs", *times_of, "KV tokens", "tokens/s/GPU", "goodput/GPU", "slo")
    rows: list[tuple[object, ...]] = []
    for way in ways:
        report, moved = way.report, way.report.kv_transfer_ms
        times = (time_ms(value) for spread in (report.ttft_ms, report.tpot_ms) for value in (spread.p50, spread.p90))
        rate = (f"{report.output_tokens_per_s_per_gpu:,.1f}", number_text(report.goodput / report.devices))
        share = f"{report.slo_attainment:.1%}" + (" overload" if report.overload else "")
        kv_tokens = " / ".join(f"{kv['kv_tokens']:,.0f}" for kv in (report.pools or {"": vars(report)}).values())
        rows.append(
            (way.name, f"{report.devices}", *times, time_ms(moved.p50) if moved else "", kv_tokens, *rate, share)
        )
    ranked = "goodput of a GPU" if request.slo.named else "output tokens of a GPU"
    table(f"co-located and disaggregated, milliseconds, by {ranked}", heads, rows)


def show(report: ServingReport) -> None:
    """Times, throughput, memory, and what a reader should know."""
    spreads = {name: getattr(report, field_name) for name, field_name in TIMES.items()}
    if report.completed:
        rows = [(name, *figures(spread)) for name, spread in spreads.items() if spread is not None]
        table("milliseconds", ("", "mean", "p50", "p90", "p99"), rows)
    else:
        print("milliseconds: none served")
    fewer = report.fleet and report.fleet["mean_replicas"] < report.replicas  # an autoscaler may start fewer
    most = "at most " if fewer else ""
    table(f"{most}{counted(report.replicas, 'replica')}", ("", ""), [*summary(report), *sureness(report)])
    show_classes(report)
    show_kinds(report)
    for note in (report.overload, *report.notes):
        if note:
            say(note)


def summary(report: ServingReport) -> list[tuple[str, str]]:
    """What was served by what, and what it took."""
    from ..simulator.serving.report import number_text

    why = ", ".join(f"{limit['requests']:,} by {name.replace('_', ' ')}" for name, limit in report.rejections.items())
    rejected = f"{report.rejected:,} rejected" + (f" ({why})" if why else "")
    rejected += f", {report.failed:,} failed" if report.failed else ""
    tokens = f"{number_text(report.output_tokens_per_s)} output tokens/s"
    targets = report.slo or any(seen["slo"] for seen in report.classes.values())
    attained = f"{report.slo_attainment:.1%} of requests had all of slo" if targets else "no slo is set"
    rows = [
        ("requests", f"{report.completed:,} served, {rejected}, in {report.duration_s:,.1f} s"),
        ("throughput", f"{number_text(report.requests_per_s)} requests/s, {tokens}"),
        ("per GPU", f"{report.output_tokens_per_s_per_gpu:,.1f} output tokens/s ({counted(report.devices, 'GPU')})"),
        ("goodput", f"{number_text(report.goodput)} requests/s, {attained}"),
        ("KV memory", f"{kv_text(vars(report))}; {counted(report.preemptions, 'preemption')}"),
        ("iterations", f"{report.iterations:,}, {report.mean_batch:,.1f} tokens each; {report.utilisation:.0%} busy"),
    ]
    if report.tokens_per_decode > 1:
        rows.append(("speculation", f"{report.tokens_per_decode:.2f} tokens a sequence and decode"))
    if report.prefix_hit_share:
        rows.append(("prefix cache", f"{report.prefix_hit_share:.0%} of tokens were found{tiers_text(report)}"))
    with_text = {
        "adapters": (report.adapters, adapters_text),
        "experts": (report.expert_balance, experts_text),
        "images": (report.images, images_text),
    }
    rows += [(name, text(report)) for name, (figures, text) in with_text.items() if figures]
    rows += [
        (f"{name} pool", f"{pool['utilisation']:.0%} busy; KV memory: {kv_text(pool)}")
        for name, pool in report.pools.items()
    ]
    return [*rows, *fleet_rows(report), *price(report)]


def sureness(report: ServingReport) -> list[tuple[str, str]]:
    """How sure the figures are, and who measured what they stand on."""
    rows = []
    if report.intervals:
        figures_known = [name for name in INTERVALS if name in report.intervals]
        rows.append((f"{report.coverage:.0%} interval", ", ".join(interval(report, name) for name in figures_known)))
    if report.p_slo_met is not None:
        rows.append(("chance of slo", f"{report.p_slo_met:.0%} that {report.slo['share']:.0%} of requests have it"))
    if report.p_p99_ttft_met is not None:
        most = f"{report.slo['ttft_ms']:g} ms"
        rows.append(("chance of p99", f"{report.p_p99_ttft_met:.0%} that the 99th percentile of TTFT is within {most}"))
    if report.sources:
        rows.append(("measured by", listed(report.sources)))
    return rows


def tiers_text(report: ServingReport) -> str:
    """Where the tokens of the prefix cache were found, and how long a load took; empty without tiers."""
    tiers = {name: tier for name, tier in report.kv_tiers.items() if name != "loads"}
    if not tiers:
        return ""
    shares = ", ".join(f"{tier['share']:.0%} {name}" for name, tier in tiers.items())
    loads = report.kv_tiers["loads"]
    return f" ({shares}); {counted(loads['loads'], 'load')} of {loads['mean_ms']:,.1f} ms"


def adapters_text(report: ServingReport) -> str:
    """How many adapters were in a batch, and what loading them took."""
    figures = report.adapters
    return (
        f"{figures['asked_for']:,} asked for, {figures['in_batch']:.1f} in a batch of at most {figures['on_gpu']}; "
        f"{counted(figures['loads'], 'load')} of {figures['load_ms']:,.1f} ms, {figures['loads_from_disk']:,} of them "
        f"from disk; {counted(figures['waited'], 'request')} waited for a place"
    )


def experts_text(report: ServingReport) -> str:
    """How uneven experts were, and what that and moving them took."""
    figures = report.expert_balance
    return (
        f"the busiest GPU has {figures['mean']:.2f} times the mean, {figures['most']:.2f} at most: "
        f"{figures['longer_ms']:,.2f} ms an iteration; {counted(figures['rebalances'], 'rebalance')} of "
        f"{figures['move_ms']:,.1f} ms"
    )


def images_text(report: ServingReport) -> str:
    """How many images there were, and what encoding them took."""
    figures = report.images
    where = f"{counted(figures['images'], 'image')} in {counted(figures['requests'], 'request')}"
    text = f"{where}, {figures['encode_ms']:,.1f} ms each"
    if "gpus" not in figures:
        return f"{text}, on the GPUs that prefill"
    return (
        f"{text}; {figures['wait_ms']:,.1f} ms until they are encoded, {figures['transfer_ms']:,.2f} ms to a replica; "
        f"{counted(figures['gpus'], 'GPU')} to encode, {figures['utilisation']:.0%} busy"
    )


def show_classes(report: ServingReport) -> None:
    """What each class of requests saw."""
    if not report.classes:
        return
    from ..simulator.serving.report import number_text

    heads = ("", "priority", "served", "rejected", "TTFT p50", "p99", "TPOT p50", "p99", "had all of slo", "goodput")
    rows = []
    for name, seen in report.classes.items():
        times = (time_ms(seen[each][part]) for each in ("ttft_ms", "tpot_ms") for part in ("p50", "p99"))
        counts = f"{seen['completed']:,}", f"{seen['requests'] - seen['completed']:,}"
        goodput = number_text(seen["goodput"])
        rows.append((name, f"{seen['priority']}", *counts, *times, f"{seen['slo_attainment']:.1%}", goodput))
    table("classes, milliseconds", heads, rows)


def show_kinds(report: ServingReport) -> None:
    """What each of two kinds of replicas served and cost."""
    if not report.kinds:
        return
    heads = ("", "replicas", "GPUs", "served", "tokens/s/GPU", "TTFT p50", "p99", "TPOT p50", "p99", "busy", "cost")
    rows = []
    for name, kind in report.kinds.items():
        times = (f"{kind[each][part]:,.1f}" for each in ("ttft_ms", "tpot_ms") for part in ("p50", "p99"))
        cost = kind["cost_per_million_tokens"]
        counts = f"{kind['replicas']}", f"{kind['devices']}", f"{kind['completed']:,}"
        rate = f"{kind['output_tokens_per_s_per_gpu']:,.1f}"
        named = f"{name} ({kind['device']})" if kind["device"] else name
        rows.append((named, *counts, rate, *times, f"{kind['utilisation']:.0%}", f"{cost:,.4g}" if cost else ""))
    table("kinds of replicas, milliseconds", heads, rows)


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
        p99 = f"TTFT p99 {without['ttft_ms']['p99']:,.1f} ms"
        rows.append(("without failures", f"{without['slo_attainment']:.1%} of requests had all of slo, {p99}"))
    return rows


def kv_text(kv: Mapping[str, Any]) -> str:
    """How many tokens fit into the KV memory of a replica, and how much of it was in use."""
    ranks = round(kv["kv_tokens"] / kv["kv_rank_tokens"])
    per_rank = f" ({ranks} ranks of {kv['kv_rank_tokens']:,.0f})" if ranks > 1 else ""
    return f"{kv['kv_tokens']:,.0f} tokens a replica{per_rank}, {kv['kv_peak']:.0%} in use at most"


def price(report: ServingReport) -> list[tuple[str, str]]:
    """Power, energy and cost, where they are known."""
    rows = []
    if report.power_w is not None:
        energy = (
            f"{report.power_w:,.0f} W a GPU, {report.kwh_per_million_tokens or 0:,.3g} kWh per million output tokens"
        )
        rows.append(("power (estimate)", energy))
    if report.cost_per_million_tokens is not None:
        rows.append(("cost", f"{report.cost_per_million_tokens:,.4g} per million output tokens, {CURRENCY}"))
    return rows


def interval(report: ServingReport, name: str) -> str:
    """A figure's interval as text."""
    low, high = report.intervals[name]
    return f"{INTERVALS[name]} {low:,.1f} to {high:,.1f}"


def figures(spread: TimeSpread) -> tuple[str, ...]:
    """Its figures as text."""
    return tuple(map(time_ms, spread.to_dict().values()))


def time_ms(value: float | None) -> str:
    """Milliseconds as text; a dash where nobody had that time."""
    return "-" if value is None or math.isnan(value) else f"{value:,.1f}"


def show_sweep(reports: list[tuple[float, ServingReport]], unit: str) -> None:
    """Latency against rate."""
    heads = (unit, "TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90", "tokens/s", "slo", "")
    rows = [(f"{rate:.4g}", *sweep_figures(report)) for rate, report in reports]
    table("latency against rate, milliseconds", heads, rows)
    fullest = max((report for _, report in reports), key=lambda report: report.kv_peak)
    for name, kv in (fullest.pools or {"": vars(fullest)}).items():
        print(f"KV memory{f' of the {name} pool' if name else ''}: {kv_text(kv)}")
    for note in dict.fromkeys(note for _, report in reports for note in report.notes):
        say(note)


def sweep_figures(report: ServingReport) -> tuple[str, ...]:
    """A report as a row of :func:`show_sweep`."""
    return (
        *(time_ms(value) for spread in (report.ttft_ms, report.tpot_ms) for value in (spread.p50, spread.p90)),
        f"{report.output_tokens_per_s:,.0f}",
        f"{report.slo_attainment:.1%}",
        "overload" if report.overload else "",
    )
