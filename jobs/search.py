"""``opcast search`` and ``opcast search serving``: the best layouts of a step or ways to serve, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..datasets.loading import load, whole
from ..simulator.report.view import time_text
from ..simulator.search.kinds import kind_of
from ..simulator.search.question import SearchQuestion
from ..simulator.search.result import SearchReport
from ..simulator.search.spread import Crew, processors
from ..simulator.search.view import RowsView, headline, measurements, tables
from . import questions, resolve
from .composing import STEP_ADDED, STEP_CHOICE, quoted
from .settings import command, names
from .show import BadInputError, print_json, say, show, wants_json
from .validate import progress_bar
from .writing import places, write_text

FREE_CHOICE, ADDED = STEP_CHOICE, (*STEP_ADDED, "crew.options.")
WORDS = ("compare",)
POINTS = {
    "search": "two points: ranks, or axes such as 'tp=8 pp=2'",
    "search_serving": "two ways: ranks, or settings such as 'tp=2 batch=64'",
}


def words(arguments: Sequence[str], verb: str = "search") -> list[str]:
    """``compare A B`` as the setting that it is. BadInputError where there are not two points after it."""
    words_typed = list(arguments)
    if not words_typed or words_typed[0] != "compare":
        return words_typed
    points = [word for word in words_typed[1:3] if not of_the_verb(word, verb)]
    if len(points) < 2:
        raise BadInputError(f"`{command(verb)} compare` needs {POINTS[verb]}")
    return [f"compare=[{','.join(map(quoted, points))}]", *words_typed[3:]]


def of_the_verb(word: str, verb: str) -> bool:
    """Whether a word is a setting of the verb, such as ``model=llama3_8b``, and no axis of a point."""
    name, equals, _ = word.partition("=")
    kind: Any = questions.QUESTIONS[verb].kind_of_request
    return bool(equals) and name.partition(".")[0] in set(names(verb)) - set(kind.POINT)


def run(config: dict[str, Any], verb: str = "search") -> int:
    """Search, or compare two points, and print what was found; returns the exit code, 1 where no point can be."""
    as_json = wants_json(config)
    request, workers = resolve.request_of(verb, config), crew_of(config)
    if config["compare"] is not None:
        return run_comparison(config, request, verb, as_json)
    return run_search(config, request, workers, as_json)


def crew_of(config: Mapping[str, Any]) -> Crew:
    """Who simulates: so many workers, in processes, on a Ray or in Slurm."""
    count = whole(BadInputError, "workers", config["workers"]) or processors()
    settings = config["crew"]
    if not isinstance(settings, Mapping) or not set(settings) <= {"engine", "folder", "options"}:
        raise BadInputError(f"crew={settings} must be settings of their own, as crew.engine=ray")
    return load(Crew, {**settings, "count": count}, BadInputError, "crew")


def run_search(config: Mapping[str, Any], request: SearchQuestion, crew: Crew, as_json: bool) -> int:
    """Search and print the best points; returns the exit code, 1 where no point can run."""
    points = str(config["points"]) if config["points"] else None
    one_file = ("points",) if request.NOUNS[-1] == "FILE" else ()
    files = places(config, "report", "launch", *one_file)
    bench, view = resolve.bench(config), kind_of(request).view
    report = bench.search(request, crew, points, progress_bar)
    if one_file and report.rows and points:
        say(f"points: {points}")
    if report.best and "report" in files:
        from ..simulator.html import write
        from ..simulator.search.view import page

        say(f"report: {write(page(report, view), files['report'])}")
    if report.best and "launch" in files:
        text, differ = bench.launch(request, report.best[0], config["framework"])
        if differ:
            say(differ)
        say(f"launch file: {write_text('launch', files['launch'], text)}")
    if as_json:
        print_json(report.to_dict() | ({} if report.best else {"error": report.notes[0]}))
    else:
        show_search(report, view)
    if not report.best:
        say(f"opcast: {report.notes[0]}")
    return 0 if report.best else 1


def run_comparison(config: Mapping[str, Any], request: SearchQuestion, verb: str, as_json: bool) -> int:
    """Print how two points differ; returns the exit code."""
    points = config["compare"]
    if not isinstance(points, list) or len(points) != 2:
        raise BadInputError(f"compare={points} must be {POINTS[verb]}")
    one, other = map(str, points)
    comparison = resolve.bench(config).compare(request, one, other, config["points"])
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
