"""``opcast search``: the best layouts of a training step on a cluster, and why they are best."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..datasets.loading import load, number, whole
from ..simulator.search.compare import AxisChange
from ..simulator.search.request import OBJECTIVES, SearchRequest
from ..simulator.search.result import SearchReport
from ..simulator.search.space import settings
from ..simulator.search.spread import Crew
from . import resolve
from .composing import quoted
from .show import BadInputError, microseconds, print_json, say, table, wants_json
from .validate import progress_bar
from .writing import check_place, write_text

FREE_CHOICE = {"device": "device.id", "model": "+model.path", "cluster": "+cluster.path"}
ADDED = ("device.", "cluster.", "stack.", "options", "precision.quantization", "crew.options.")
WORDS = ("compare",)
SHOWN_CLASSES = 12  # reasons of points left out that a person is shown


def words(arguments: Sequence[str]) -> list[str]:
    """``compare A B`` as the setting that it is. BadInputError where there are not two points after it."""
    given = list(arguments)
    if not given or given[0] != "compare":
        return given
    if len(given) < 3:
        raise BadInputError("`opcast search compare` needs two points: ranks, or axes such as 'tp=8 pp=2'")
    return [f"compare=[{quoted(given[1])},{quoted(given[2])}]", *given[3:]]


def run(config: dict[str, Any]) -> int:
    """Search and print the best points; returns the exit code, 1 where no point can run."""
    as_json = wants_json(config)
    request = resolve.search_request(config)
    number(BadInputError, "noise_floor", config["noise_floor"])
    workers = crew_of(config)
    if config["compare"] is not None:
        return run_comparison(config, request, as_json)
    for name in ("report", "launch"):
        if config[name]:
            check_place(name, Path(str(config[name])))
    found = resolve.bench(config).search(request, workers, config["points"], progress_bar)
    if found.best and config["report"]:
        say(f"report: {write_report(found, Path(str(config['report'])))}")
    if found.best and config["launch"]:
        path = Path(str(config["launch"]))
        text = resolve.bench(config).launch(request, found.best[0], framework_of(config))
        say(f"launch file: {write_text('launch', path, text)}")
    if as_json:
        print_json(found.to_dict() | ({} if found.best else {"error": found.notes[0]}))
    else:
        show(found)
    if not found.best:
        say(f"opcast: {found.notes[0]}")
    return 0 if found.best else 1


def crew_of(config: Mapping[str, Any]) -> Crew:
    """Who simulates: so many workers, in processes, on a Ray or in Slurm."""
    count = whole(BadInputError, "workers", config["workers"]) or os.cpu_count() or 1
    given = config["crew"]
    if not isinstance(given, Mapping) or not set(given) <= {"engine", "folder", "options"}:
        raise BadInputError(f"crew={given} must be settings of their own, as crew.engine=ray")
    return load(Crew, {**given, "count": count}, BadInputError, "crew")


def write_report(found: SearchReport, path: Path) -> Path:
    """The HTML page of a search."""
    from ..simulator.html import write_search_report

    return write_search_report(
        found.to_dict(), found.rows, [OBJECTIVES[n][0] for n in found.objectives], settings, path
    )


def framework_of(config: Mapping[str, Any]) -> str:
    """Whose launch file is written: as told, or the one that the stack is of."""
    if config["framework"] is not None:
        return str(config["framework"])
    return "torchtitan" if str((config.get("stack") or {}).get("id", "")).startswith("torchtitan") else "megatron-lm"


def pair_of(given: Any, example: str) -> tuple[str, str]:
    """The two points of ``compare=[A,B]``. BadInputError for anything else."""
    if not isinstance(given, list) or len(given) != 2:
        raise BadInputError(f"compare={given} must be two points: ranks, or settings such as {example}")
    return str(given[0]), str(given[1])


def run_comparison(config: Mapping[str, Any], request: SearchRequest, as_json: bool) -> int:
    """Print how two points differ; returns the exit code."""
    pair = pair_of(config["compare"], "'tp=8 pp=2'")
    found = resolve.bench(config).compare(request, *pair, config["points"])
    if as_json:
        print_json(found.to_dict())
        return 0
    steps = [(each.axis, f"{each.one} → {each.other}", *after(each)) for each in found.axes]
    table("axis by axis", ("axis", "from → to", "step then", "GiB then", ""), steps)
    heads = ("", pair[0], pair[1], "more")
    for title, changes in (("parts of the step", found.parts), ("ops, those that differ most", found.ops)):
        rows = [(each.name, *(microseconds(us * 1e6) for us in (each.one, each.other, each.more))) for each in changes]
        table(title, heads, rows)
    gib = [(each.name, f"{each.one:.2f}", f"{each.other:.2f}", f"{each.more:+.2f}") for each in found.memory]
    table("memory, GiB", heads, gib)
    return 0


def after(change: AxisChange) -> tuple[str, str, str]:
    """Step and memory after a change, and why there is none."""
    step = "" if change.step_time_s is None else microseconds(change.step_time_s * 1e6)
    return step, "" if change.peak_gib is None else f"{change.peak_gib:.1f}", change.why


def show(found: SearchReport) -> None:
    """Best points, what was left out, the front and what one change costs, as tables."""
    say(
        f"{found.combinations:,} combinations, {found.points:,} points; {found.evaluated:,} simulated, "
        f"{found.pruned:,} left out, in {found.wall_time_s:.1f} s"
    )
    heads = ("", "layout", "step", "tokens/s/GPU", "MFU", "GiB", "tie", "better than the next")
    title = f"{found.model}: best by {found.objectives[0]}"
    table(title, heads, [(row["rank"], *line(row), row["tie"], row["reason"]) for row in found.best])
    if len(found.objectives) > 1:
        front = [(at, *line(row)) for at, row in enumerate(found.pareto[:12], 1)]
        table(f"Pareto front of {', '.join(found.objectives)}: {len(found.pareto)} points", heads[:6], front)
    if found.sensitivity:
        rows = [
            (f"{each['axis']}={each['value']}", each["instead_of"], worse(each["cost"]), each["why"] or each["status"])
            for each in found.sensitivity
        ]
        table("one change of the best", ("change", "instead of", "costs", "why"), rows)
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
        say(f"measuring this would help to: {dims} (it differs by {microseconds(each['difference_s'] * 1e6)})")


def worse(cost: float | None) -> str:
    """What a change costs, in percent."""
    return "" if cost is None else f"{cost:+.1%}"


def line(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A point and its figures."""
    step = microseconds(row["step_time_s"] * 1e6)
    rate = f"{row['tokens_per_s_per_gpu']:,.0f}"
    return (
        f"{settings(row)} dp={row['dp']} on {row['devices']} GPUs",
        step,
        rate,
        f"{row['mfu']:.1%}",
        f"{row['peak_gib']:.1f}",
    )
