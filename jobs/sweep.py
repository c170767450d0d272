"""``opcast sweep VERB …``: one question many times, with other settings, here, on a Ray or in Slurm; one table of rows.

A setting with commas is an axis, in Hydra's grammar (``cluster.nodes=4,8,16``); all combinations are asked. A row is
known by its settings and by the release that answered, so that a sweep that was ended goes on where it was.
"""

from __future__ import annotations

import importlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..datasets.counts import counted
from ..datasets.loading import choice
from . import resolve
from .composing import as_override, compose, quoted
from .search import crew_of
from .show import BadInputError, print_json, say, wants_json
from .show import table as print_table
from .sweeping import ANSWERS, ERROR, Row, SweepPoint, SweepReport, answer_points, check_count, place_of_table, rows_of
from .validate import progress_bar

ADDED = ("crew.options.",)
FIGURES = {  # verb -> the figures that are shown
    "plan": ("days.p50", "gpu_hours.p50", "cost.p50", "kwh.p50", "goodput.p50"),
    "posttrain": ("iteration_s.p50", "hours.p50", "cost.p50", "kwh.p50", "tokens_per_s_per_gpu.p50"),
    "compare": ("rows.cluster", "rows.time_s", "rows.speed", "rows.break_even", "rows.fits"),
    "upgrade": ("step_time_s", "rows.kind", "rows.library", "rows.before_percent", "rows.after_percent"),
    "simulate": ("step_time_s", "mfu", "e2e_ms", "fits"),
}
OWN = ("table", "workers", "crew", "format", "home")  # settings of the sweep itself; all others are its verb's
SHOWN = 20


def words(arguments: Sequence[str]) -> list[str]:
    """The verb and its settings as the settings that they are here. BadInputError for a verb that no sweep asks."""
    mine = [text for text in arguments if text.startswith("-") or text.split("=")[0].partition(".")[0] in OWN]
    others = [text for text in arguments if text not in mine]
    if not others:
        return mine
    if "=" in others[0]:
        raise BadInputError(f"`opcast sweep` needs what is asked first: {', '.join(ANSWERS)}, as `opcast sweep plan …`")
    choice(BadInputError, "sweep", others[0], list(ANSWERS))
    return [f"verb={others[0]}", f"words=[{','.join(map(quoted, others[1:]))}]", *mine]


def run(config: dict[str, Any]) -> int:
    """Ask all points that the table has not, and write it; returns the exit code, 1 where no point has an answer."""
    as_json, started = wants_json(config), time.perf_counter()
    choice(BadInputError, "sweep", config["verb"], list(ANSWERS))
    path = place_of_table(str(config["table"]))
    crew, verb = crew_of(config), str(config["verb"])
    shared = (f"home={quoted(str(config['home']))}",)
    points, swept = points_of(verb, list(map(str, config["words"])), shared)
    compose(verb, overrides_of(verb, points[0].parts[1]))  # a setting that is none is told at once
    report = answer_points(verb, points, rows_of_words, crew, progress_bar, path, swept)
    if as_json:
        figures = {"points": report.points, "asked": report.asked, "rows": len(report.rows)}
        failed = {"failed": len(report.errors), "wall_time_s": time.perf_counter() - started}
        print_json({"table": str(path), **figures, **failed})
    else:
        show(report)
    kept = report.points - report.asked
    size = f"{counted(len(report.rows), 'row')} of {counted(report.points, 'point')}"
    say(f"table: {path} ({size}, {kept:,} of them from it)")
    for why, count in Counter(row[ERROR] for row in report.errors).most_common(3):
        say(f"{count:,} without an answer: {why}")
    return 1 if len(report.errors) == len(report.rows) else 0


def points_of(verb: str, settings: Sequence[str], shared: tuple[str, ...]) -> tuple[list[SweepPoint], list[str]]:
    """All combinations of the axes, and the names of these. RequestError for too many."""
    axes = [values_of(text) for text in settings]
    swept = [text.partition("=")[0].lstrip("+") for text, values in zip(settings, axes, strict=True) if values[1:]]
    check_count(swept, axes)
    points = []
    for point in itertools.product(*axes):
        named = {text.partition("=")[0].lstrip("+"): text.partition("=")[2] for text in point}
        told = {name: typed(named[name]) for name in swept}
        points.append(SweepPoint(told, question_of(verb, point), (verb, (*shared, *point))))
    return points, swept


def values_of(text: str) -> list[str]:
    """A setting once for each of its values; itself where it has one, or is no setting of Hydra's grammar."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(text)
        if not override.is_sweep_override():
            return [text]
        name = text.partition("=")[0]
        return [f"{name}={value}" for value in override.sweep_string_iterator()]
    except (HydraException, ValueError):
        return [text]


def typed(text: str) -> Any:
    """A value of the command line as a number or flag where it is one."""
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip("'\"")
    return value if isinstance(value, (int, float)) else text


def question_of(verb: str, point: Sequence[str]) -> str:
    """What a row is known by: the verb and its settings, in one order."""
    return " ".join([verb, *sorted(point)])


def overrides_of(verb: str, settings: Sequence[str]) -> list[str]:
    """The settings of a point as Hydra takes them."""
    module = importlib.import_module(f".{verb}", __package__)
    return [as_override(module, text) for text in settings]


def rows_of_words(verb: str, settings: Sequence[str]) -> list[Row]:
    """The answer to a point of the command line as flat rows."""

    def question() -> tuple[Any, Any]:
        config = compose(verb, overrides_of(verb, settings))
        return resolve.bench(config), resolve.request_of(verb, config)

    return rows_of(verb, question)


def show(report: SweepReport) -> None:
    """The first rows: the axes and the figures that count most."""
    rows = report.rows
    names = [*report.axes, *(name for name in FIGURES[report.verb] if any(row.get(name) is not None for row in rows))]
    shown = [[figure_text(row.get(name)) for name in names] for row in rows[:SHOWN]]
    left = f", the first {SHOWN} of {counted(len(rows), 'row')}" if len(rows) > SHOWN else ""
    print_table(f"{report.verb}{left}", names, shown)


def figure_text(value: Any) -> str:
    """A figure in four digits."""
    return "" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)
