"""``opcast search`` and ``opcast search serving``: the best layouts of a step or ways to serve, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..datasets.loading import load, whole
from ..simulator.report.view import time_text
from ..simulator.search.compare import ComparedPoints
from ..simulator.search.request import SearchRequest
from ..simulator.search.result import SearchReport
from ..simulator.search.served.request import ServedSearchRequest
from ..simulator.search.spread import Crew, processors
from ..simulator.search.view import RowsView, headline, measurements, tables
from . import resolve
from .composing import STEP_ADDED, STEP_CHOICE, quoted
from .show import BadInputError, print_json, say, show, wants_json
from .validate import progress_bar
from .writing import places, write_text

FREE_CHOICE, ADDED = STEP_CHOICE, (*STEP_ADDED, "crew.options.")
WORDS = ("compare",)


def words(arguments: Sequence[str]) -> list[str]:
    """``compare A B`` as the setting that it is. BadInputError where there are not two points after it."""
    words_typed = list(arguments)
    if not words_typed or words_typed[0] != "compare":
        return words_typed
    if len(words_typed) < 3:
        raise BadInputError("`opcast search compare` needs two points: ranks, or axes such as 'tp=8 pp=2'")
    return [f"compare=[{quoted(words_typed[1])},{quoted(words_typed[2])}]", *words_typed[3:]]


def run(config: dict[str, Any], verb: str = "search") -> int:
    """Search, or compare two points, and print what was found; returns the exit code, 1 where no point can be."""
    as_json = wants_json(config)
    request, workers = resolve.request_of(verb, config), crew_of(config)
    if config["compare"] is not None:
        return run_comparison(config, request, as_json)
    return run_search(config, request, workers, as_json)


def crew_of(config: Mapping[str, Any]) -> Crew:
    """Who simulates: so many workers, in processes, on a Ray or in Slurm."""
    count = whole(BadInputError, "workers", config["workers"]) or processors()
    settings = config["crew"]
    if not isinstance(settings, Mapping) or not set(settings) <= {"engine", "folder", "options"}:
        raise BadInputError(f"crew={settings} must be settings of their own, as crew.engine=ray")
    return load(Crew, {**settings, "count": count}, BadInputError, "crew")


def run_search(
    config: Mapping[str, Any], request: SearchRequest | ServedSearchRequest, crew: Crew, as_json: bool
) -> int:
    """Search and print the best points; returns the exit code, 1 where no point can run."""
    serving, points = isinstance(request, ServedSearchRequest), str(config["points"]) if config["points"] else None
    files = places(config, "report", "launch", *(("points",) if serving else ()))
    bench = resolve.bench(config)
    find: Callable[..., SearchReport] = bench.search_serving if serving else bench.search
    report = find(request, crew, points, progress_bar)
    if serving and report.rows and points:
        say(f"points: {points}")
    if report.best and "report" in files:
        from ..simulator.html import write
        from ..simulator.search.view import page

        say(f"report: {write(page(report, view_of(serving)), files['report'])}")
    if report.best and "launch" in files:
        text = launch_text(config, request, report.best[0])
        say(f"launch file: {write_text('launch', files['launch'], text)}")
    if as_json:
        print_json(report.to_dict() | ({} if report.best else {"error": report.notes[0]}))
    else:
        show_search(report, view_of(serving))
    if not report.best:
        say(f"opcast: {report.notes[0]}")
    return 0 if report.best else 1


def view_of(serving: bool) -> RowsView:
    """How rows are shown."""
    if serving:
        from ..simulator.search.served.shown import WAYS

        return WAYS
    from ..simulator.search.shown import LAYOUTS

    return LAYOUTS


def launch_text(
    config: Mapping[str, Any], request: SearchRequest | ServedSearchRequest, best: Mapping[str, Any]
) -> str:
    """The launch file of the best point, for the framework that is told, or that the stack or the policy is of.

    Says so where that one runs something else than was searched.
    """
    framework, bench = config["framework"], resolve.bench(config)
    if isinstance(request, ServedSearchRequest):
        from ..simulator.search.served.launch import other_engine

        text, differ = bench.launch_serving(request, best, framework), other_engine(framework, best["policy"])
    else:
        from ..simulator.search.launch import other_stack, usual_framework

        framework = framework or usual_framework(request.base.stack)
        text, differ = bench.launch(request, best, framework), other_stack(request.base, framework)
    if differ:
        say(differ)
    return text


def run_comparison(config: Mapping[str, Any], request: SearchRequest | ServedSearchRequest, as_json: bool) -> int:
    """Print how two points differ; returns the exit code."""
    points, bench, serving = config["compare"], resolve.bench(config), isinstance(request, ServedSearchRequest)
    if not isinstance(points, list) or len(points) != 2:
        example = "'tp=2 batch=64'" if serving else "'tp=8 pp=2'"
        raise BadInputError(f"compare={points} must be two points: ranks, or settings such as {example}")
    one, other = map(str, points)
    compare: Callable[..., ComparedPoints] = bench.compare_serving if serving else bench.compare
    comparison = compare(request, one, other, config["points"])
    if as_json:
        print_json(comparison.to_dict())
        return 0
    for part_table in comparison.tables(one, other):
        show(part_table, empty=True)
    return 0


def show_search(report: SearchReport, view: RowsView) -> None:
    """Best points, the front, what one change costs and what was left out, as tables."""
    say(headline(report, view))
    for at, view_table in enumerate(tables(report, view)):
        show(view_table, empty=not at)
    if report.ties:
        more = "1 more is" if report.ties == 1 else f"{report.ties:,} more are"
        say(f"{more} within the noise floor of the best, too close to tell apart")
    for op, seconds in measurements(report)[:3]:
        say(f"measuring this would help to: {op} (it differs by {time_text(seconds * 1e6)}{view.measured})")
