"""``opcast sweep VERB …``: one question many times, with other settings, here, on a Ray or in Slurm; one table of rows.

A setting with commas is an axis, in Hydra's grammar (``cluster.nodes=4,8,16``); all combinations are asked. A row is
known by its settings and by the release that answered, so that a sweep that was ended goes on where it was.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..datasets.loading import choice
from ..datasets.version import __version__
from . import resolve
from .composing import as_override, compose, quoted
from .search import crew_of
from .show import BadInputError, one_line, print_json, say, wants_json
from .show import table as print_table
from .validate import progress_bar
from .writing import check_place, write

ADDED = ("crew.options.",)
# verb -> the workbench's method that answers, and the figures that are shown
ANSWERS = {
    "plan": ("plan", ("days.p50", "gpu_hours.p50", "cost.p50", "kwh.p50", "goodput.p50")),
    "posttrain": ("posttrain", ("iteration_s.p50", "hours.p50", "cost.p50", "kwh.p50", "tokens_per_s_per_gpu.p50")),
    "compare": ("compare_chips", ("rows.cluster", "rows.time_s", "rows.speed", "rows.break_even", "rows.fits")),
    "upgrade": ("upgrade", ("step_time_s", "rows.kind", "rows.library", "rows.before_percent", "rows.after_percent")),
    "simulate": ("simulate", ("step_time_s", "mfu", "e2e_ms", "fits")),
}
OWN = ("table", "workers", "crew", "format", "home")  # settings of the sweep itself; all others are its verb's
KEYS = ("opcast", "question")  # columns by which a row is known
DROPPED = ("wall_time_s",)  # of an answer: the same question has the same row
ERROR = "error"
WRITE_S = 10.0  # between two writes of the table
MOST_POINTS = 100_000
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
    path = Path(str(config["table"])).expanduser()
    check_place("table", path)
    crew, verb = crew_of(config), str(config["verb"])
    points = points_of(list(map(str, config["words"])))
    shared = [f"home={quoted(str(config['home']))}"]
    compose(verb, overrides_of(verb, (*shared, *points[0][1])))  # a setting that is none is told at once
    table_rows = read_rows(path)
    open_points = [point for point in points if (__version__, question_of(verb, point[1])) not in table_rows]
    parts = [(verb, (*shared, *point)) for _, point in open_points]
    written_s = time.monotonic()
    with progress_bar(len(parts)) as advance:
        try:
            for (axes, point), answer in zip(open_points, crew.apply(rows_of, parts), strict=True):
                key = __version__, question_of(verb, point)
                table_rows[key] = [{**dict(zip(KEYS, key, strict=True)), **row, **axes} for row in answer]
                advance(1)
                if time.monotonic() - written_s > WRITE_S:
                    write_rows(path, points, table_rows, verb)
                    written_s = time.monotonic()
        finally:
            if table_rows:
                write_rows(path, points, table_rows, verb)
    answers = [row for _, point in points for row in table_rows[__version__, question_of(verb, point)]]
    errors = [row for row in answers if row.get(ERROR)]
    if as_json:
        figures = {"points": len(points), "asked": len(parts), "rows": len(answers), "failed": len(errors)}
        print_json({"table": str(path), **figures, "wall_time_s": time.perf_counter() - started})
    else:
        show(verb, points, answers)
    say(
        f"table: {path} ({len(answers):,} rows of {len(points):,} points, {len(points) - len(parts):,} of them from it)"
    )
    for why, count in itertools.islice(counted(row[ERROR] for row in errors).items(), 3):
        say(f"{count:,} without an answer: {why}")
    return 1 if len(errors) == len(answers) else 0


def points_of(settings: Sequence[str]) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """All combinations of the axes: what is other in each, and its settings. BadInputError for too many."""
    axes = [values_of(text) for text in settings]
    swept = [text.partition("=")[0].lstrip("+") for text, values in zip(settings, axes, strict=True) if values[1:]]
    count = 1
    for values in axes:
        count *= len(values)
    if count > MOST_POINTS:
        raise BadInputError(
            f"the axes ({', '.join(swept)}) have {count:,} points, more than {MOST_POINTS:,}: take fewer"
        )
    points = []
    for point in itertools.product(*axes):
        named = {text.partition("=")[0].lstrip("+"): text.partition("=")[2] for text in point}
        points.append(({name: typed(named[name]) for name in swept}, point))
    return points


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


def rows_of(verb: str, settings: Sequence[str]) -> list[dict[str, Any]]:
    """The answer to a point as flat rows; one with the error alone where opcast has none."""
    try:
        config = compose(verb, overrides_of(verb, settings))
        report = getattr(resolve.bench(config), ANSWERS[verb][0])(resolve.request_of(verb, config))
    except ValueError as error:
        if not type(error).__module__.startswith("opcast"):
            raise
        return [{ERROR: one_line(error)}]
    values = {name: value for name, value in report.to_dict().items() if name not in DROPPED}
    rows = values.pop("rows", None) or [{}]
    return [dict(flat(values)) | dict(flat({"rows": row})) for row in rows]


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Figures of an answer by their path, as ``days.p50``; lists as JSON."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", json.dumps(value) if isinstance(value, (list, tuple)) else value


def read_rows(path: Path) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Rows of a table by their key, those without an answer left out. BadInputError where it is no table of a sweep."""
    if not path.exists():
        return {}
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
        keys = [tuple(str(row[name]) for name in KEYS) for row in rows]
    except (OSError, KeyError, pa.ArrowException):
        raise BadInputError(f"table={path} is there and no table of `opcast sweep`: name another file") from None
    table_rows: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for key, row in zip(keys, rows, strict=True):
        if not row.get(ERROR):
            table_rows.setdefault(key, []).append({name: value for name, value in row.items() if value is not None})
    return table_rows


def write_rows(
    path: Path,
    points: Sequence[tuple[dict[str, Any], tuple[str, ...]]],
    table_rows: Mapping[tuple[str, ...], list[dict[str, Any]]],
    verb: str,
) -> None:
    """Write the table: this sweep's points in their order, then what others left in it. BadInputError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    mine = {(__version__, question_of(verb, point)): None for _, point in points}
    keys = [*mine, *(key for key in table_rows if key not in mine)]
    rows = [row for key in keys for row in table_rows.get(key, ())]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: column([row.get(name) for row in rows]) for name in names}
    write("table", path, lambda temporary: pq.write_table(pa.table(columns), temporary, compression="zstd"))


def column(values: list[Any]) -> list[Any]:
    """Values of one type: numbers as they are, whole ones beside others as floats, all else as text."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) < 2:
        return values
    if kinds <= {int, float}:
        return [None if value is None else float(value) for value in values]
    return [None if value is None else str(value) for value in values]


def counted(texts: Iterator[str]) -> dict[str, int]:
    """How often each text comes, the most frequent first."""
    counts: dict[str, int] = {}
    for text in texts:
        counts[text] = counts.get(text, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def show(verb: str, points: Sequence[tuple[dict[str, Any], tuple[str, ...]]], rows: Sequence[dict[str, Any]]) -> None:
    """The first rows: the axes and the figures that count most."""
    figures = [name for name in ANSWERS[verb][1] if any(row.get(name) is not None for row in rows)]
    names = [*points[0][0], *figures]
    shown = [[figure_text(row.get(name)) for name in names] for row in rows[:SHOWN]]
    left = f", the first {SHOWN} of {len(rows):,} rows" if len(rows) > SHOWN else ""
    print_table(f"{verb}{left}", names, shown)


def figure_text(value: Any) -> str:
    """A figure in four digits."""
    if value is None:
        return ""
    with contextlib.suppress(ValueError):
        return f"{value:,.4g}" if isinstance(value, float) else str(value)
    return str(value)
