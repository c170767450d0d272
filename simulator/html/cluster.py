"""What the page of a step on a cluster shows beside that of one device: pipeline, communication, stages, memory.

Everything is made from a :class:`ClusterView` of plain values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..report.step import StageShare
from ..report.view import ViewColumn, ViewTable
from ..timing.schedule.pipeline import PipelineTimes
from . import colours, units
from .charts import bars, figure, from_top, hover, label, round_number, where_room
from .gantt import pipeline_charts
from .links import links_section, time_section
from .page import Figure, LayeredTimeline, Legend, Note, PageSection, Part, drawn_table

GROUP_WORDS = {
    "tp": "tensor",
    "cp": "context",
    "dp": "data",
    "dp_cp": "data and context",
    "pp": "pipeline",
    "ep": "expert",
    "etp": "expert tensor",
    "edp": "expert data",
}
LINK_WORDS = {"nvlink": "NVLink", "pcie": "PCIe", "ib": "InfiniBand", "roce": "RoCE", "loopback": "the device itself"}
VARIANTS = {"start": "Start", "whole": "Whole", "end": "End"}
CLASS_HUES = {
    "weights": "blue",
    "gradients": "purple",
    "optimizer": "red",
    "activations": "orange",
    "logits": "yellow",
    "temporaries": "pink",
    "buffers": "indigo",
    "communication": "indigo",
    "context": "grey-strong",
    "fragmentation": "brown",
    "other": "grey",
}
SPARE_HUES = ("cyan", "lime", "teal", "green", "brown-strong", "purple-strong")


@dataclass(frozen=True)
class ClusterView:
    """The parts of a step that only a cluster has.

    ``exposed_s`` and ``hidden_s`` are seconds of communication by process group; ``stages`` what each pipeline stage
    does; ``memory_gib`` by stage and class of tensor, ``limit_gib`` what a device has. ``links`` is ``network`` of the
    report, ``links_svg`` its fabric as a picture, ``layers`` the pipeline in three dimensions; ``exchanges`` are,
    of a device, (process group, slowest kind of link, operations, seconds). What is empty is left out.
    """

    pipeline: PipelineTimes | None = None
    exposed_s: Mapping[str, float] = field(default_factory=dict)
    hidden_s: Mapping[str, float] = field(default_factory=dict)
    stages: Sequence[StageShare] = ()
    memory_gib: Sequence[Mapping[str, float]] = ()
    limit_gib: float | None = None
    links: Mapping[str, Any] = field(default_factory=dict)
    links_svg: str = ""
    layers: LayeredTimeline | None = None
    exchanges: Sequence[tuple[str, str, float, float]] = ()


def sections(view: ClusterView, step_s: float) -> tuple[PageSection, ...]:
    """The sections of a view, in the order of the page."""
    candidates = (
        pipeline_section(view.pipeline) if view.pipeline is not None and view.pipeline.orders.stages > 1 else None,
        layers_section(view.layers) if view.layers is not None else None,
        parallelism_section(view.exposed_s, view.hidden_s, step_s, view.exchanges, bool(view.links)),
        stages_section(view.stages, view.memory_gib, view.limit_gib),
        links_section(view.links, view.links_svg),
        time_section(view.links),
    )
    return tuple(section for section in candidates if section is not None)


def pipeline_section(times: PipelineTimes) -> PageSection:
    """The pipeline in time."""
    charts_of_variant = pipeline_charts(times)
    orders = times.orders
    chunks = f" with {orders.chunks} chunks each" if orders.chunks > 1 else ""
    shades = " Every other chunk has a shade of its own." if orders.chunks > 1 else ""
    text = (
        f"{orders.schedule} over {orders.stages} stages{chunks} and {units.count(orders.micro_batches)} micro-batches: "
        f"stages are idle for {_share_range(times.bubble_share.tolist())} of the time.{shades} Drag across the picture "
        "or use the buttons to zoom, double-click for the whole."
    )
    variants = tuple((name, VARIANTS[name]) for name in charts_of_variant) if len(charts_of_variant) > 1 else ()
    charts = charts_of_variant if variants else {"": charts_of_variant["whole"]}
    parts = (Figure("Stages", charts, zoom=True), Legend())
    return PageSection("pipeline", "The pipeline in time", text, parts, variants)


def layers_section(layers: LayeredTimeline) -> PageSection:
    """The pipeline in three dimensions."""
    text = (
        "Each row is a stage, and time runs along it. Kinds of work stand on one another, each as high as its part of "
        "the task; what stands higher than a whole task runs side by side. Bare ground is idle. Drag to turn the "
        "picture, or use the buttons or the arrow keys. Point at a bar for its figures."
    )
    return PageSection("layers", "Stages, time and kinds of work", text, (layers,))


def _share_range(shares: Sequence[float]) -> str:
    lowest, highest = units.share(min(shares)), units.share(max(shares))
    return lowest if lowest == highest else f"{lowest} to {highest}"


def parallelism_section(
    exposed_s: Mapping[str, float],
    hidden_s: Mapping[str, float],
    step_s: float,
    exchanges: Sequence[tuple[str, str, float, float]] = (),
    links_simulated: bool = True,
) -> PageSection | None:
    """Communication by parallel dimension."""
    names = sorted({*exposed_s, *hidden_s}, key=lambda name: -(exposed_s.get(name, 0.0) + hidden_s.get(name, 0.0)))
    names = [name for name in names if exposed_s.get(name, 0.0) + hidden_s.get(name, 0.0) > 0]
    if not names:
        return None
    text = (
        "How long a device communicates, by what it communicates for. Only what is exposed makes the step longer: "
        "the rest runs beside computation."
    )
    chart = parallelism_chart([(name, exposed_s.get(name, 0.0), hidden_s.get(name, 0.0)) for name in names], step_s)
    parts: list[Part] = [Figure("By parallel dimension", {"": chart}), Legend()]
    if exchanges:
        parts.append(drawn_table(exchanges_table(exchanges)))
    if not links_simulated:
        parts.append(Note("", ("Ask with network=flow to see how full each link is and what sharing links costs.",)))
    return PageSection("communication", "Communication", text, tuple(parts))


def exchanges_table(exchanges: Sequence[tuple[str, str, float, float]]) -> ViewTable:
    """What a device exchanges over which kind of link."""
    columns = (
        ViewColumn("for", "words"),
        ViewColumn("over", "words", "the slowest kind of link that the group crosses"),
        ViewColumn("operations", "count", "of one device in a step"),
        ViewColumn("time", "seconds", "of them all, hidden or not", bar=True),
    )
    rows = [
        [GROUP_WORDS.get(group, group), LINK_WORDS.get(link, link), count, seconds]
        for group, link, count, seconds in exchanges
    ]
    return ViewTable("Kinds of link", columns, rows)


def parallelism_chart(rows: Sequence[tuple[str, float, float]], step_s: float) -> dict[str, Any]:
    """(group, exposed seconds, hidden seconds) as bars in two pieces."""
    divisor, unit = units.duration_unit(max(exposed + hidden for _, exposed, hidden in rows) * 1e6)
    names = [f"{label(GROUP_WORDS.get(name, name))} ({label(name)})" for name, *_ in rows]
    data = []
    pieces = (("exposed", "indigo", [row[1] for row in rows]), ("hidden", "line", [row[2] for row in rows]))
    for index, (piece, hue, seconds) in enumerate(pieces):
        hints = [
            hover(
                GROUP_WORDS.get(name, name),
                f"{piece}: {units.duration(value * 1e6)}, {units.share(value / step_s)} of the step",
            )
            for (name, *_), value in zip(rows, seconds, strict=True)
        ]
        more = where_room("var(--on-fill)" if piece == "exposed" else "var(--text)")
        more |= {"text": [units.share(value / step_s) if value / step_s >= 5e-3 else "" for value in seconds]}
        more |= {"meta": {"name": piece, "place": index}}
        lengths = [round_number(value * 1e6 / divisor) for value in seconds]
        data.append(bars(piece, colours.css(hue), lengths, names, hints, **more))
    return figure(
        data,
        height=90 + 34 * len(rows),
        barmode="stack",
        bargap=0.25,
        xaxis={"ticksuffix": f"\u00a0{unit}", "rangemode": "tozero"},
        yaxis=from_top(names),
    )


def stages_section(
    stages: Sequence[StageShare], memory_gib: Sequence[Mapping[str, float]], limit_gib: float | None
) -> PageSection | None:
    """What every stage holds and does."""
    parts: list[Part] = []
    if memory_gib:
        parts += [Figure("Memory at the peak of each stage", {"": memory_chart(memory_gib, limit_gib)}), Legend()]
    if stages:
        parts.append(drawn_table(stages_table(stages)))
    if not parts:
        return None
    mark = " The line is where the device ends." if memory_gib and limit_gib else ""
    text = f"The stages of the pipeline, from the first layers to the last.{mark}"
    return PageSection("stages", "Stage by stage", text, tuple(parts))


def memory_chart(memory_gib: Sequence[Mapping[str, float]], limit_gib: float | None = None) -> dict[str, Any]:
    """Classes of tensors stacked by stage, and the line of what a device has."""
    names = [f"stage {stage}" for stage in range(len(memory_gib))]
    spare = iter(SPARE_HUES * 4)
    data = []
    for index, name in enumerate(dict.fromkeys(name for stage_gib in memory_gib for name in stage_gib)):
        sizes = [stage_gib.get(name, 0.0) for stage_gib in memory_gib]
        if not any(sizes):
            continue
        hints = [
            hover(name, at, f"{units.gib(size)} of {units.gib(sum(stage_gib.values()))}")
            for at, size, stage_gib in zip(names, sizes, memory_gib, strict=True)
        ]
        colour, meta = colours.css(CLASS_HUES.get(name) or next(spare)), {"name": name, "place": index}
        data.append(bars(name, colour, [round_number(size) for size in sizes], names, hints, meta=meta))
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 2, "color": "var(--text)"}}
    return figure(
        data,
        height=90 + 26 * len(names),
        barmode="stack",
        bargap=0.2,
        shapes=[line | {"x0": limit_gib, "x1": limit_gib}] if limit_gib else [],
        xaxis={"ticksuffix": "\u00a0GiB", "rangemode": "tozero"},
        yaxis=from_top(names),
    )


def stages_table(stages: Sequence[StageShare]) -> ViewTable:
    """One row per stage."""
    columns = {
        "stage": ViewColumn("stage"),
        "layers": ViewColumn("layers"),
        "parameters": ViewColumn("parameters", "quantity", "on each of its devices"),
        "busy_s": ViewColumn("busy", "seconds", "time in forwards and backwards", bar=True),
        "bubble_s": ViewColumn("bubble", "seconds", "time waiting for other stages", bar=True),
    }
    rows = [[getattr(stage, name) for name in columns] for stage in stages]
    return ViewTable("Work of each stage", [*columns.values()], rows)
