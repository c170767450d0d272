"""``opcast search serving``: the best ways to serve a model on so many GPUs, and the front of speed against use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..simulator.search.objectives import OF_SERVING
from ..simulator.search.result import SearchReport
from ..simulator.search.served.explain import settings
from ..simulator.search.served.request import ServedSearchRequest
from . import resolve, search
from .search import SHOWN_CLASSES, crew_of, pair_of, worse
from .show import print_json, say, table, wants_json
from .validate import progress_bar
from .writing import check_place, write, write_text

FREE_CHOICE = {"device": "device.id", "model": "+model.path", "cluster": "+cluster.path"}
ADDED = ("device.", "cluster.", "stack.", "options", "precision.quantization", "precision.kv_dtype", "crew.options.")
WORDS = search.WORDS


def words(arguments: Sequence[str]) -> list[str]:
    """``compare A B`` as the setting that it is. BadInputError where there are not two points after it."""
    return search.words(arguments)


def run(config: dict[str, Any]) -> int:
    """Search, or compare two ways to serve, and print what was found; returns the exit code, 1 where none can be."""
    as_json = wants_json(config)
    request = resolve.served_search_request(config)
    if config["compare"] is not None:
        return run_comparison(config, request, as_json)
    return run_search(config, request, as_json)


def run_search(config: Mapping[str, Any], request: ServedSearchRequest, as_json: bool) -> int:
    """Search and print the best ways to serve; returns the exit code, 1 where none can be."""
    crew = crew_of(config)
    for name in ("report", "launch", "points"):
        if config[name]:
            check_place(name, Path(str(config[name])))
    bench = resolve.bench(config)
    found = bench.search_serving(request, crew, progress_bar)
    if found.rows and config["points"]:
        say(f"points: {write('points', Path(str(config['points'])), partial(write_points, found))}")
    if found.best and config["report"]:
        from ..simulator.html import write_served_report

        plotted = [OF_SERVING[name][0] for name in found.objectives]
        path = write_served_report(found.to_dict(), found.rows, plotted, settings, Path(str(config["report"])))
        say(f"report: {path}")
    if found.best and config["launch"]:
        text = bench.launch_serving(request, found.best[0], config["framework"])
        say(f"launch file: {write_text('launch', Path(str(config['launch'])), text)}")
    if as_json:
        print_json(found.to_dict() | ({} if found.best else {"error": found.notes[0]}))
    else:
        show(found)
    if not found.best:
        say(f"opcast: {found.notes[0]}")
    return 0 if found.best else 1


def run_comparison(config: Mapping[str, Any], request: ServedSearchRequest, as_json: bool) -> int:
    """Print how two ways to serve differ; returns the exit code."""
    pair = pair_of(config["compare"], "'tp=2 batch=64'")
    found = resolve.bench(config).compare_serving(request, *pair, config["points"])
    if as_json:
        print_json(found.to_dict())
        return 0
    steps = [
        (
            each.settings,
            f"{each.one} → {each.other}",
            *map(figure, (each.tokens_per_s_per_gpu, each.ttft_ms, each.tpot_ms)),
            each.why,
        )
        for each in found.settings
    ]
    table("setting by setting", ("setting", "from → to", "tokens/s/GPU", "TTFT ms", "TPOT ms", ""), steps)
    parts = {
        "what users and owners have": found.figures,
        "time of an output token, ms": found.tpot,
        "time of the first token, ms": found.ttft,
        "an iteration that decodes, by dimension, ms": found.dimensions,
        "its ops that differ most, ms": found.decode_ops,
        "ops of prompts that differ most, ms": found.prompt_ops,
        "memory of a GPU, GiB": found.memory,
    }
    for title, changes in parts.items():
        rows = [(each.name, figure(each.one), figure(each.other), f"{each.more:+,.4g}") for each in changes]
        table(title, ("", *pair, "more"), rows)
    return 0


def figure(value: float | None) -> str:
    """A figure as a person reads it."""
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def write_points(found: SearchReport, path: Path) -> None:
    """All points with their axes and figures, one row each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([dict(row) for row in found.rows]), path, compression="zstd")


def show(found: SearchReport) -> None:
    """Best points, the front, what one change costs and what was left out, as tables."""
    say(
        f"{found.combinations:,} layouts, {found.points:,} points; {found.evaluated:,} looked at, "
        f"{found.pruned:,} left out, in {found.wall_time_s:.1f} s"
    )
    heads = ("", "way to serve", "GPUs", "tokens/s/GPU", "tokens/s/user", "TTFT", "TPOT", "requests/s", "KV")
    title = f"{found.model}: best by {found.objectives[0]}"
    more = ("tie", "better than the next")
    table(title, (*heads, *more), [(row["rank"], *line(row), row["tie"], row["reason"]) for row in found.best])
    if len(found.objectives) > 1:
        front = [(at, *line(row)) for at, row in enumerate(found.pareto[:16], 1)]
        table(f"Pareto front of {', '.join(found.objectives)}: {len(found.pareto)} points", heads, front)
    played = [(row["rank"], *confirmed_line(row["confirmed"])) for row in found.best if "confirmed" in row]
    if played:
        columns = ("", "TTFT", "TPOT", "keeps up", "goodput", "had all of slo")
        table("the same in the event loop, at 95 % of the rate", columns, played)
    if found.sensitivity:
        rows = [
            (f"{each['axis']}={each['value']}", each["instead_of"], worse(each["cost"]), each["why"])
            for each in found.sensitivity
        ]
        table("one change of the best", ("change", "instead of", "costs", "what users notice"), rows)
    left: list[tuple[object, ...]] = [
        (name, f"{each.count:,}", settings(each.example), each.why)
        for name, each in list(found.pruned_by.items())[:SHOWN_CLASSES]
    ]
    if left:
        table("left out", ("because of", "points", "such as", "which"), left)
    if found.ties:
        say(f"{found.ties} more are within the noise floor of the best: they cannot be told apart")
    for each in found.measure_next[:3]:
        dims = " ".join(f"{name}={value}" for name, value in each["op"].items() if value not in ("same", 0))
        say(f"measuring this would help to: {dims} (it differs by {each['difference_s'] * 1e3:.2f} ms an iteration)")


def line(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A point and its figures."""
    return (
        settings(row),
        f"{row['devices']}",
        f"{row['tokens_per_s_per_gpu']:,.0f}",
        f"{row['tokens_per_s_per_user']:,.1f}",
        f"{row['ttft_ms']:,.0f} ms",
        f"{row['tpot_ms']:,.1f} ms",
        f"{row['requests_per_s']:,.2f}",
        f"{row['kv_share']:.0%}",
    )


def confirmed_line(found: Mapping[str, Any]) -> tuple[str, ...]:
    """What the event loop says of a point."""
    return (
        f"{found['ttft_ms']:,.0f} ms",
        f"{found['tpot_ms']:,.1f} ms",
        "yes" if found["keeps_up"] else "no",
        f"{found['goodput']:,.2f}",
        f"{found['slo_attainment']:.0%}",
    )
