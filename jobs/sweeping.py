"""One question many times, with other settings: the points of some axes, their answers as rows, and the table of them.

All faces hand over points; a row is known by its question and by the release that answered, so that a sweep that was
ended goes on from its table.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..datasets.loading import choice, nearest
from ..datasets.own_errors import refusal
from ..datasets.reading import flat
from ..datasets.version import __version__
from ..simulator.question.canonical import Request, RequestError
from ..simulator.search.spread import Crew, Progress
from . import questions
from .show import BadInputError
from .writing import check_place, write

ANSWERS = {  # verb -> the workbench's method that answers
    "plan": "plan",
    "posttrain": "posttrain",
    "compare": "compare_chips",
    "upgrade": "upgrade",
    "simulate": "simulate",
}
KEYS = ("opcast", "question")  # columns by which a row is known
DROPPED = ("wall_time_s",)  # of an answer: the same question has the same row
ERROR = "error"
WRITE_S = 10.0  # between two writes of the table
MOST_POINTS = 100_000

Row = dict[str, Any]
Keyed = dict[tuple[str, ...], list[Row]]


@dataclass(frozen=True)
class SweepPoint:
    """A point: its values of the axes by name, the question that it is known by, and what its answer is made of."""

    axes: Mapping[str, Any]
    question: str
    parts: tuple[Any, ...]

    @property
    def key(self) -> tuple[str, str]:
        """What its rows are known by."""
        return __version__, self.question


@dataclass(frozen=True)
class SweepReport:
    """All answers to a ``verb`` as flat ``rows``, in the order of the points; several of an answer that has rows.

    Figures have their path for a name (``days.p50``), axes that of the command line (``cluster.nodes``). A point
    without an answer has a row with its ``error``. ``asked`` counts points that no table had.
    """

    verb: str
    axes: tuple[str, ...]
    points: int
    asked: int
    rows: tuple[Row, ...]

    @property
    def errors(self) -> tuple[Row, ...]:
        """Rows of points without an answer."""
        return tuple(row for row in self.rows if row.get(ERROR))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"verb": self.verb, "axes": list(self.axes), "points": self.points, "rows": [dict(r) for r in self.rows]}


@dataclass(frozen=True)
class QuestionSweep:
    """The points of a ``verb`` whose questions are requests, or why they are none."""

    verb: str
    axes: tuple[str, ...]
    points: tuple[SweepPoint, ...]

    def answered(self, crew: Crew, progress: Progress, path: Path | None = None) -> SweepReport:
        """All answers. RequestError where no point has one; BadInputError for a ``path`` of no table of sweeps."""
        report = answer_points(self.verb, self.points, rows_of_request, crew, progress, path, self.axes)
        if len(report.errors) == len(report.rows):
            raise RequestError(str(report.rows[0][ERROR]))
        return report


def sweep_of(
    verb: str,
    settings: Mapping[str, Any],
    axes: Mapping[str, Any],
    request_of: Callable[[dict[str, Any]], Any],
    most: int = MOST_POINTS,
) -> QuestionSweep:
    """All combinations of the ``axes`` (values by name, as ``{"nodes": [4, 8], "checkpoint.every_minutes": [10]}``).

    ``request_of`` makes the request of the settings of a point. RequestError for a verb that no sweep asks, and for
    axes that are none.
    """
    choice(RequestError, "verb", verb, list(ANSWERS))
    if not isinstance(axes, Mapping):
        raise RequestError(f"axes={axes!r} must be settings with lists of their values, as {{'nodes': [4, 8]}}")
    columns = [column_of(verb, name, values) for name, values in axes.items()]
    questions.check_names(verb, settings)
    check_count(columns, list(axes.values()), most)
    points = []
    for values in itertools.product(*axes.values()):
        given = dict(settings)
        for name, value in zip(axes, values, strict=True):
            place(given, name, value)
        told = {column: cell(value) for column, value in zip(columns, values, strict=True)}
        points.append(point_of(verb, told, given, request_of))
    return QuestionSweep(verb, tuple(columns), tuple(points))


def point_of(
    verb: str, told: Mapping[str, Any], given: dict[str, Any], request_of: Callable[[dict[str, Any]], Any]
) -> SweepPoint:
    """The point of some settings; where they are no request, the reason is its answer."""
    try:
        request = request_of(given)
    except ValueError as error:
        return SweepPoint(told, "", (verb, None, refusal(error)))
    return SweepPoint(told, key_of(verb, request), (verb, request))


def key_of(verb: str, request: Request) -> str:
    """What the answer to a request is known by; nothing for a model that is a function, which no table goes on with."""
    try:
        return f"{verb} {request.key()}"
    except RequestError:
        return ""


def column_of(verb: str, name: str, values: Any) -> str:
    """The name of an axis as the command line has it. RequestError for no setting, and for what is no list."""
    outer, dot, inner = name.partition(".")
    known = {setting.name: setting for setting in questions.settings(verb)}
    if outer not in known:
        raise RequestError(f"axes.{name}: {verb} has no such setting; {nearest(outer, list(known))}")
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence) or not values:
        raise RequestError(f"axes.{name}={values!r} must be a list of values, such as [4, 8]")
    return f"{questions.CHOSEN_BY_NAME.get(outer, known[outer].path)}{dot}{inner}"


def place(settings: dict[str, Any], name: str, value: Any) -> None:
    """Put a value under a name with dots, into copies of the mappings on the way. RequestError for what is none."""
    *outer, last = name.split(".")
    for part in outer:
        inner = settings.get(part) or {}
        if not isinstance(inner, Mapping):
            raise RequestError(f"axes.{name} is within {part}={inner!r}, which must be settings of their own")
        settings[part] = settings = dict(inner)
    settings[last] = value


def cell(value: Any) -> Any:
    """A value of an axis as a table has it: numbers, flags and words as they are, all else as JSON or its name."""
    if value is None or isinstance(value, (int, float, str)):
        return value
    try:
        return json.dumps(value)
    except TypeError:
        return str(getattr(value, "id", getattr(value, "name", value)))


def check_count(names: Sequence[str], axes: Sequence[Sequence[Any]], most: int = MOST_POINTS) -> None:
    """RequestError for more points than are asked."""
    if (count := math.prod(map(len, axes))) > most:
        raise RequestError(f"the axes ({', '.join(names)}) have {count:,} points, more than {most:,}: take fewer")


def place_of_table(path: str | Path) -> Path:
    """Where a table shall lie. BadInputError where it cannot."""
    place_path = Path(path).expanduser()
    check_place("table", place_path)
    return place_path


def answer_points(
    verb: str,
    points: Sequence[SweepPoint],
    answer: Callable[..., list[Row]],
    crew: Crew,
    progress: Progress,
    path: Path | None,
    axes: Sequence[str],
) -> SweepReport:
    """Ask all points that the table at ``path`` has not, and write it; ``answer`` has the rows of a point's parts."""
    table_rows = read_rows(path) if path is not None else {}
    open_points = [point for point in points if not point.question or point.key not in table_rows]
    answers: list[list[Row]] = []
    written_s = time.monotonic()
    with progress(len(open_points)) as advance:
        try:
            for point, rows in zip(open_points, crew.apply(answer, [each.parts for each in open_points]), strict=True):
                answers.append([{**dict(zip(KEYS, point.key, strict=True)), **row, **point.axes} for row in rows])
                if point.question:
                    table_rows[point.key] = answers[-1]
                advance(1)
                if path is not None and time.monotonic() - written_s > WRITE_S:
                    write_rows(path, points, table_rows)
                    written_s = time.monotonic()
        finally:
            if path is not None and table_rows:
                write_rows(path, points, table_rows)
    fresh = {id(point): rows for point, rows in zip(open_points, answers, strict=True)}
    all_rows = tuple(row for point in points for row in fresh.get(id(point)) or table_rows[point.key])
    return SweepReport(verb, tuple(axes), len(points), len(open_points), all_rows)


def rows_of_request(verb: str, request: Any, why: str = "") -> list[Row]:
    """The answer to a request as flat rows; one with the error alone where there is none."""
    from .resolve import bench_of

    if why:
        return [{ERROR: why}]
    sources = request.sources if verb == "simulate" else request.step.sources
    return rows_of(verb, lambda: (bench_of(sources), request))


def rows_of(verb: str, question: Callable[[], tuple[Any, Any]]) -> list[Row]:
    """The answer of a workbench to a request as flat rows; one with the error alone where opcast has none."""
    try:
        bench, request = question()
        report = getattr(bench, ANSWERS[verb])(request)
    except ValueError as error:
        return [{ERROR: refusal(error)}]
    values = {name: value for name, value in report.to_dict().items() if name not in DROPPED}
    rows = values.pop("rows", None) or [{}]
    return [{name: json_of(value) for name, value in flat({**values, "rows": row})} for row in rows]


def json_of(value: Any) -> Any:
    """A list as JSON; all else as it is."""
    return json.dumps(value) if isinstance(value, (list, tuple)) else value


def read_rows(path: Path) -> Keyed:
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
    table_rows: Keyed = {}
    for key, row in zip(keys, rows, strict=True):
        if not row.get(ERROR):
            table_rows.setdefault(key, []).append({name: value for name, value in row.items() if value is not None})
    return table_rows


def write_rows(path: Path, points: Sequence[SweepPoint], table_rows: Keyed) -> None:
    """Write the table: this sweep's points in their order, then what others left in it. BadInputError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    mine = {point.key: None for point in points}
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
