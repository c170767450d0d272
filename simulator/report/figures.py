"""The figures of a simulated step, each named, ordered and written here, for a terminal, a notebook and a page."""

from __future__ import annotations

from ...datasets.counts import counted
from .display import display_html
from .step import Answer
from .view import CURRENCY, ViewColumn, ViewTable, shares_text, time_text

TOP_OPS = 12


def headline(report: Answer, device: str) -> str:
    """What is asked, on which device, and by which framework: two frameworks may be five times apart."""
    unfit = "" if report.fits else " (does not fit)"
    return f"{report.model}: {report.workload} in {report.precision} on {device} ({report.stack}){unfit}"


def figures(report: Answer, device_gib: float | None = None, within_s: float | None = None) -> list[tuple[str, str]]:
    """Each figure by name, as text. ``device_gib`` is what the device has; ``within_s`` asks how likely so many seconds
    are."""
    _, low_s, high_s = report.times_s
    memory, of = report.memory, "" if device_gib is None else f" of {device_gib:.0f} GiB"
    return [
        *layout(report),
        *((name, time_text(us)) for name, _, us in report.named_times_us()),
        *([] if within_s is None else [(f"P(at most {within_s} s)", f"{report.probability_within(within_s):.1%}")]),
        (f"{report.coverage:.0%} interval", f"{time_text(low_s * 1e6)} to {time_text(high_s * 1e6)}"),
        ("tokens/s per device", f"{report.tokens_per_s_per_gpu:,.0f}"),
        ("model TFLOP/s", f"{report.tflops_per_gpu:.4g}  (MFU {report.mfu:.1%}, HFU {report.hfu:.1%})"),
        ("peak memory", f"{memory.peak_gib:.2f} GiB{of}, {'fits' if report.fits else 'DOES NOT FIT'}"),
        *([] if report.p_oom is None else [("P(out of memory)", f"{report.p_oom:.1%}")]),
        ("answered by", shares_text(report.provenance)),
        ("time that is", shares_text(report.trust)),
        ("measured by", shares_text(report.sources)),
        *price(report),
    ]


def layout(report: Answer) -> list[tuple[str, str]]:
    """How the model is spread, where that is over more than one device."""
    if report.devices == 1:
        return []
    return [("layout", f"{counted(report.devices, 'device')}: {', '.join(report.degrees()) or 'alike copies'}")]


def price(report: Answer) -> list[tuple[str, str]]:
    """Power and cost, where they are known."""
    rows = []
    if report.power_w:
        measured_text = f", {report.energy_measured:.0%} by measured watts" if report.energy_measured else ""
        watts = f"{report.power_w:,.0f} W a device, {report.energy_j or 0:,.0f} J in all{measured_text}"
        rows.append(("power (estimate)", watts))
    if report.cost is not None:
        per_million = f"{report.cost_per_million_tokens:,.4g} per million tokens"
        rows.append(("cost", f"{report.cost:,.4g} a step, {per_million}, {CURRENCY}"))
    return rows


def time_parts_s(report: Answer) -> dict[str, float]:
    """What the time is made of, in seconds that add up to the step; parts of no time are left out."""
    breakdown = report.breakdown
    exposed = {f"exposed {group}": seconds for group, seconds in breakdown.by_parallelism.items()}
    parts = {
        "compute": breakdown.compute_s,
        "optimizer": breakdown.optimizer_s,
        **(exposed or {"exposed communication": breakdown.exposed_comm_s}),
        "bubble": breakdown.bubble_s,
        "waiting for the host": breakdown.host_s,
    }
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def time_table(report: Answer) -> ViewTable:
    """What the time is made of, with shares of the whole."""
    columns = [ViewColumn("part"), ViewColumn("time", "seconds"), ViewColumn("share", "share")]
    rows = [[name, part_s, part_s / report.times_s[0]] for name, part_s in time_parts_s(report).items()]
    return ViewTable("where the time goes", columns, rows)


def ops(report: Answer) -> ViewTable:
    """The kinds of op with the most time; some run beside others, so that they do not add up."""
    columns = [ViewColumn("op"), ViewColumn("calls"), ViewColumn("time", "seconds")]
    columns += [ViewColumn("of the whole", "share", bar=True), ViewColumn("answered by")]
    rows = [[s.kind, s.count, s.time_s, s.share, "+".join(s.engines)] for s in report.breakdown.by_op[:TOP_OPS]]
    return ViewTable("its ops, overlapped ones in full", columns, rows)


def notebook(report: Answer) -> str:
    """What a notebook shows of a step, as HTML: its figures and kinds of op."""
    return display_html(headline(report, report.device), figures(report), ops(report), " ".join(report.notes))
