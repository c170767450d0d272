"""The page of one simulated step: how long, where the time goes, what it needs, who says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

from ...datasets.counts import counted
from ...datasets.devices import Device, DeviceError, load_device
from ..memory.breakdown import Memory
from ..report.answer import InferenceReport, StepReport
from ..report.figures import time_parts_s
from ..report.step import Span
from ..report.view import Toned, ViewColumn, ViewTable
from . import charts, colours, units, wording
from .cluster import ClusterView, sections
from .page import Card, Figure, Legend, Note, Page, PageSection, Part, Piece, StackedBar, Strip, drawn_table
from .sites import call_site
from .timeline import timeline
from .trust import trust_section

TOP_OPS = 20
HUE_OF_MEMORY = {
    "weights": "blue",
    "gradients": "purple",
    "optimizer": "red",
    "activations": "orange",
    "other": "grey",
}
HUE_OF_TIME = {"compute": "blue", "optimizer": "red", "bubble": "yellow", "waiting for the host": "grey"}
HUES_OF_EXPOSED = ("indigo", "indigo-strong")


def page(
    report: StepReport | InferenceReport, device: Device | None = None, cluster: ClusterView | None = None
) -> Page:
    """Everything the page shows; ``cluster`` is what a step of many devices adds."""
    device = device or known_device(report.device)
    candidates = (
        breakdown_section(report),
        *(sections(cluster, step_us(report) * 1e-6) if cluster else ()),
        memory_section(report, device),
        provenance_section(report),
        trust_section(report),
        timeline_section(report),
        unmapped_section(report),
    )
    return Page(
        title=f"{report.model}: {wording.workload(report.workload).lower()}",
        subtitle=f"{report.precision} on {device.name if device else report.device} ({report.stack}), simulated",
        facts=facts(report, device),
        cards=tuple(cards(report, device)),
        sections=tuple(section for section in candidates if section is not None),
        caption="Blue line: the prediction; blue band: its interval.",
        glossary=wording.terms(*wording.STEP_TERMS, *(wording.CLUSTER_TERMS if cluster else ())),
    )


def known_device(device_id: str) -> Device | None:
    """The device's data sheet; None for one that was measured and has none."""
    try:
        return load_device(device_id)
    except DeviceError:
        return None


def step_us(report: StepReport | InferenceReport) -> float:
    """The whole of what was simulated, in microseconds."""
    return 1e6 * report.times_s[0]


def facts(report: StepReport | InferenceReport, device: Device | None) -> tuple[str, ...]:
    """The device in a few phrases, and how long the answer took."""
    phrases = layout(report)
    if device is not None:
        rate = device.tensor_rate(report.precision) if device.supports(report.precision) else None
        if rate:
            phrases.append(f"{units.with_prefix(rate * 1e12, 'FLOP/s')} in {report.precision}")
        phrases.append(f"{units.gib(device.memory_gib)} memory")
        phrases.append(f"{units.with_prefix(device.memory_gbps * 1e9, 'B/s')} memory bandwidth")
    return (*phrases, f"simulated in {units.duration(report.wall_time_s * 1e6)}")


def layout(report: StepReport | InferenceReport) -> list[str]:
    """How many devices, and how the model is spread over them."""
    if report.devices == 1:
        return []
    return [counted(report.devices, "device"), " ".join(report.degrees())]


def cards(report: StepReport | InferenceReport, device: Device | None) -> list[Card]:
    """Headlines: time, throughput, utilisation, memory."""
    return [*time_cards(report), rate_card(report), memory_card(report, device)]


def time_cards(report: StepReport | InferenceReport) -> list[Card]:
    """The step with its interval; for inference TTFT and TPOT before it where they are not the same."""
    total, low, high = (1e6 * seconds for seconds in report.times_s)
    interval = ("interval", f"{units.duration_range(low, high)} ({report.coverage:.0%})")
    pad = (high - low) * 0.2 or total * 0.2
    first, last = max(min(low, total) - pad, 0.0), max(high, total) + pad
    low_at, at, high_at = (round((value - first) / (last - first) * 100.0, 2) for value in (low, total, high))
    strip = Strip(low_at, at, high_at, (), units.duration(first), units.duration(last), interval[1])
    times = report.named_times_us()
    if len(times) == 2:  # one step of inference, which is the whole
        times = times[:1]
    titles = [f"{name}, {meaning}" if meaning else name.capitalize() for name, meaning, _ in times]
    cards_shown = [Card(title, (("", units.duration(us)),)) for title, (_, _, us) in zip(titles, times, strict=True)]
    return [*cards_shown[:-1], replace(cards_shown[-1], lines=(interval,), strip=strip)]


def rate_card(report: StepReport | InferenceReport) -> Card:
    """Throughput and utilisation."""
    lines = (
        ("model", units.with_prefix(report.tflops_per_gpu * 1e12, "FLOP/s")),
        ("MFU", units.share(report.mfu)),
        ("HFU", units.share(report.hfu)),
    )
    return Card("Tokens per second and device", (("", units.three_digits(report.tokens_per_s_per_gpu)),), lines)


def memory_card(report: StepReport | InferenceReport, device: Device | None) -> Card:
    """The peak beside what the device has."""
    lines = [("device", units.gib(device.memory_gib))] if device else []
    if device:
        lines.append(("used", units.share(report.memory.peak_gib / device.memory_gib)))
    return Card(
        "Peak memory",
        (("", units.gib(report.memory.peak_gib)),),
        tuple(lines),
        verdict="fits" if report.fits else "does not fit",
        tone="good" if report.fits else "poor",
    )


def breakdown_section(report: StepReport | InferenceReport) -> PageSection:
    """Parts of the step, then kinds of op."""
    parts, total_s, exposed = report.breakdown, step_us(report) * 1e-6, cycle(HUES_OF_EXPOSED)
    pieces = [
        Piece(name, f"{units.duration(1e6 * part_s)}, {units.share(part_s / total_s)}", part_s / total_s, hue)
        for name, part_s in time_parts_s(report).items()
        for hue in [HUE_OF_TIME.get(name) or next(exposed)]
    ]
    text = (
        "The whole step on top, then every kind of op. Exposed communication is what no computation hides; host is the "
        "time in which no operator runs."
    )
    chart = Figure("Time by kind of op", {"": charts.kinds_chart(parts.by_op, parts.host_s, total_s)})
    return PageSection(
        "breakdown", "Where the time goes", text, (StackedBar("Parts of the step", tuple(pieces)), chart)
    )


def memory_section(report: StepReport | InferenceReport, device: Device | None) -> PageSection:
    """What memory holds at its peak, against the device."""
    memory = report.memory
    bar_gib = max(memory.peak_gib, device.memory_gib) if device else memory.peak_gib
    pieces = tuple(memory_pieces(memory, bar_gib))
    if device and memory.peak_gib < bar_gib:
        free = bar_gib - memory.peak_gib
        pieces = (*pieces, Piece("free", units.gib(free), free / bar_gib, "grid"))
    limit = device.memory_gib / bar_gib if device and memory.peak_gib > device.memory_gib else None
    text = (
        "What the device holds at the fullest moment of the step"
        + (f", of its {units.gib(device.memory_gib)}" if device else "")
        + ". Activations include the cache of keys and values."
        + (" The mark is where the device ends." if limit is not None else "")
    )
    return PageSection("memory", "Memory at its peak", text, (StackedBar("Peak memory", pieces, limit),))


def memory_pieces(memory: Memory, whole_gib: float) -> list[Piece]:
    """The parts of the peak as fractions of ``whole_gib``."""
    return [
        Piece(name, units.gib(size_gib), size_gib / whole_gib, HUE_OF_MEMORY[name])
        for name, size_gib in memory.parts_gib.items()
        if size_gib > 0
    ]


def provenance_section(report: StepReport | InferenceReport) -> PageSection:
    """Who answered, by share of the time."""
    pieces = tuple(
        Piece(name, units.share(fraction), fraction, colours.HUE_OF_ENGINE.get(name, "brown"))
        for name, fraction in report.provenance.items()
        if fraction >= 5e-4
    )
    words = tuple(f"{piece.name}: {wording.ENGINES[piece.name]}" for piece in pieces if piece.name in wording.ENGINES)
    text = "The share of the step's time that each source answered for, and whose measurements those sources know."
    measured = tuple(
        Piece(name, units.share(fraction), fraction, hue)
        for (name, fraction), hue in zip(report.sources.items(), cycle(colours.HUES_OF_LABS), strict=False)
        if fraction >= 5e-4
    )
    bars = StackedBar("Sources", pieces), StackedBar("Measured by", measured)
    return PageSection("provenance", "Who says so", text, (*bars, Note("", words)))


def timeline_section(report: StepReport | InferenceReport) -> PageSection | None:
    """The step in time, and its longest calls."""
    if not report.timeline:
        return None
    length = max(span.start_us + span.duration_us for span in report.timeline)
    excerpt_note = "" if length > 0.99 * step_us(report) else f" Shown is its first part, {units.duration(length)}."
    text = (
        "From start to end: phases, the layers in them, their modules, and every operator in the colour of its kind. "
        f"Drag across it or use the buttons to zoom, double-click for the whole. Gaps are host time.{excerpt_note}"
    )
    parts: tuple[Part, ...] = (
        Figure("Timeline", {"": timeline(report.timeline)}, zoom=True),
        Legend(),
        drawn_table(top_table(report.timeline, length)),
    )
    return PageSection("timeline", "The step in time", text, parts)


def top_table(spans: Sequence[Span], total_us: float) -> ViewTable:
    """The calls with the most time, all layers together."""
    groups: dict[tuple[str, ...], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.kind, span.name, call_site(span.path), span.phase), []).append(span)
    times = {key: sum(span.duration_us for span in group) for key, group in groups.items()}
    texts = [ViewColumn(title, "words") for title in ("op", "where", "phase")]
    figures = ViewColumn("calls", "count"), ViewColumn("time", "us", bar=True)
    ends = ViewColumn("share", "share", "of the time shown above"), ViewColumn("answered by", "words")
    rows = []
    for key in sorted(times, key=lambda key: -times[key])[:TOP_OPS]:
        kind, name, site, phase = key
        engines = ", ".join(sorted({span.engine for span in groups[key]}))
        place = Toned(kind, hint=name), site or "the model itself", phase
        rows.append([*place, len(groups[key]), times[key], times[key] / total_us, engines])
    return ViewTable("The longest calls", [*texts, *figures, *ends], rows)


def unmapped_section(report: StepReport | InferenceReport) -> PageSection | None:
    """What no kind covers, and what tracing had to say."""
    if not report.unmapped and not report.notes:
        return None
    notes = []
    if report.unmapped:
        notes.append(Note("Operators that no kind covers, costed by the bytes they move:", report.unmapped))
    if report.notes:
        notes.append(Note("Notes:", report.notes))
    return PageSection("notes", "What to keep in mind", "", tuple(notes))
