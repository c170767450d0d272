"""How two points of a search differ: axis by axis, part by part, and op by op; and how a person names a point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..question.canonical import RequestError
from ..report.answer import StepReport
from ..report.step import Answer, plain
from ..report.view import ViewColumn, ViewTable, dims_text
from .evaluate import MEMORY, Evaluator, figures
from .explain import PARTS
from .outcome import OK, Row
from .points import Folder
from .question import SearchQuestion
from .rank import ranked
from .request import SearchRequest, SearchSetup
from .space import AXES

if TYPE_CHECKING:
    from ..engines.bench import Bench

SHOWN_OPS = 20


@dataclass(frozen=True)
class Change:
    """One quantity of two points, and what the second has more of it."""

    name: str
    one: float
    other: float

    @property
    def more(self) -> float:
        """What the other point has more."""
        return self.other - self.one


def differences(both: Iterable[Mapping[str, float]], last: Sequence[str] = ()) -> list[Change]:
    """Quantities of two points by name, those that only one of them has too; some of them ``last``."""
    one, other = both
    names = [name for name in {**one, **other} if name not in last]
    return [Change(name, one.get(name, 0.0), other.get(name, 0.0)) for name in (*names, *last)]


class ComparedPoints:
    """What all comparisons can do. ``STEPS`` is the field that leads from one point to the other, its caption and
    columns; ``CHANGES`` are fields of :class:`Change`, each with its caption and the kinds of its values and of their
    difference (:mod:`..report.view`)."""

    STEPS: ClassVar[tuple[str, str, Sequence[ViewColumn]]]
    CHANGES: ClassVar[Mapping[str, tuple[str, str, str]]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with what the other has more."""
        values: dict[str, Any] = plain(self)
        for name in self.CHANGES:
            values[name] = [{**entry, "more": entry["other"] - entry["one"]} for entry in values[name]]
        return values

    def tables(self, one: str, other: str) -> Iterator[ViewTable]:
        """What a person is shown of two points that are called so."""
        name, caption, columns = self.STEPS
        steps = [tuple(vars(step).values()) for step in getattr(self, name)]
        yield ViewTable(caption, columns, [(step[0], f"{step[1]} → {step[2]}", *step[3:]) for step in steps])
        for name, (caption, kind, more) in self.CHANGES.items():
            rows = [(change.name, change.one, change.other, change.more) for change in getattr(self, name)]
            heads = ViewColumn(""), ViewColumn(one, kind), ViewColumn(other, kind), ViewColumn("more", more)
            yield ViewTable(caption, heads, rows)


def stepwise(
    one: Row, other: Row, groups: Iterable[tuple[str, ...]], row_of: Callable[[Row], Row]
) -> Iterator[tuple[tuple[str, ...], Row]]:
    """Each group of names, and the row after it is changed, those before it being changed already."""
    now = dict(one)
    for names in groups:
        now |= {name: other[name] for name in names}
        yield names, row_of(now)


def by_op(one: Answer, other: Answer) -> list[Change]:
    """Seconds of every op of two reports, those that differ most first; operators without a kind by their names."""
    return sorted(differences(map(_op_seconds, (one, other))), key=lambda change: (-abs(change.more), change.name))


def _op_seconds(report: Answer) -> dict[str, float]:
    seconds: dict[str, float] = {}
    assert report.state is not None
    for execution in report.state.executions():
        costs, phases = execution.costs, _phases(execution.phase)
        for node, us, repeats in zip(costs.nodes, costs.kernel_us.tolist(), costs.repeats.tolist(), strict=True):
            if node.phase in phases:
                name = node.source if node.op is None else f"{node.op.kind} {dims_text(node.op.to_dict(), 'out_dtype')}"
                seconds[name] = seconds.get(name, 0.0) + us * repeats * execution.times * 1e-6
    return seconds


def _phases(phase: str) -> tuple[str, ...]:
    return ("recompute", "backward") if phase == "backward" else (phase,)


# --- points that a person names ---------------------------------------------------------------------------


def named_point(
    request: SearchQuestion,
    text: str,
    rows_of: Callable[[], Sequence[Row]],
    value_of: Callable[[str, str], Any],
    usual: Callable[[Row], Row],
) -> Row:
    """The point that a person names: a rank of the rows that a search kept, or values of :attr:`SearchQuestion.POINT`,
    such as ``tp=8 pp=2``, what is ``usual`` of all others. RequestError for a rank that is not there, and for a name
    that is none."""
    text, (one, many, where) = str(text).strip(), request.NOUNS
    if not text.isdigit():
        values: Row = {}
        for word in text.replace(",", " ").split():
            name, equals, value = word.partition("=")
            if name not in request.POINT or not equals:
                names = ", ".join(request.POINT)
                raise RequestError(f"{word!r} is no {one}=value; {many} are {names}, or give a rank of points={where}")
            values[name] = value_of(name, value)
        return {**usual(values), **values}
    rows = rows_of()
    if not rows:
        way_out = f"name its {where.lower()} with points={where}"
        raise RequestError(f"{int(text)} is a rank of a search that was kept: {way_out}")
    ordered = ranked(request.good(rows), request.objectives)
    if not 1 <= int(text) <= len(ordered):
        raise RequestError(f"{int(text)} is no rank of these points: they have 1 to {len(ordered)}")
    return {name: ordered[int(text) - 1][name] for name in request.POINT}


def typed_value(name: str, text: str, kind: type, least: int = 1) -> Any:
    """The value of a kind that a person types. RequestError for what is no flag, or no whole number of at least so
    much."""
    if kind is bool and text.lower() not in ("true", "false"):
        raise RequestError(f"{name}={text} must be true or false")
    if kind is int and (not text.isdigit() or int(text) < least):
        raise RequestError(f"{name}={text} must be a whole number of at least {least}")
    return text.lower() == "true" if kind is bool else kind(text)


# --- layouts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AxisChange:
    """One axis changed after those before it: from what to what, and the step's seconds after that (None: why not)."""

    axis: str
    one: Any
    other: Any
    step_time_s: float | None
    peak_gib: float | None
    why: str = ""


@dataclass(frozen=True)
class PointComparison(ComparedPoints):
    """Two points and how the second differs from the first.

    ``axes`` leads from one to the other axis by axis; ``parts`` add up to the step (seconds), ``memory`` to the peak
    (GiB); ``ops`` are kernels of the whole step on the stage that works longest, by kind and shape (seconds), those
    that differ most first. Kernels that run beside others count in full.
    """

    one: Mapping[str, Any]
    other: Mapping[str, Any]
    axes: tuple[AxisChange, ...]
    parts: tuple[Change, ...]
    memory: tuple[Change, ...]
    ops: tuple[Change, ...]

    STEPS = (
        *("axes", "axis by axis"),
        (
            *(ViewColumn("axis"), ViewColumn("from → to"), ViewColumn("step then", "seconds")),
            *(ViewColumn("GiB then", "gib"), ViewColumn("")),
        ),
    )
    CHANGES: ClassVar[Mapping[str, tuple[str, str, str]]] = {
        "parts": ("parts of the step", "seconds", "seconds"),
        "ops": ("ops, those that differ most", "seconds", "seconds"),
        "memory": ("memory, GiB", "hundredths", "more_hundredths"),
    }


def compare(request: SearchRequest, bench: Bench, names: Sequence[str], path: Path | None) -> PointComparison:
    """How two points differ that a person names, as ranks in a folder or by axes. RequestError for one that cannot
    run."""
    evaluator, folder = Evaluator.of(request, bench), Folder(path, request)
    one, other = (point_of(evaluator.setup, text, folder) for text in names)
    reports = [_report(evaluator, point) for point in (one, other)]
    figures_of = [figures(report) for report in reports]
    parts = [{name: change[key] or 0.0 for key, name in PARTS.items()} for change in figures_of]
    memory = [{key.removesuffix("_gib"): change[key] or 0.0 for key in MEMORY[1:]} for change in figures_of]
    for times, gib, report in zip(parts, memory, reports, strict=True):
        times["step"], gib["peak"] = report.step_time_s, report.memory.peak_gib
    differ = [name for name in AXES if one[name] != other[name]]
    axes = []
    for (axis,), row in stepwise(one, other, [(name,) for name in differ], evaluator.row):
        then = row.get("step_time_s"), row.get("peak_gib")
        axes.append(AxisChange(axis, one[axis], other[axis], *then, row.get("why") or ""))
    return PointComparison(
        one={**one, **figures_of[0]},
        other={**other, **figures_of[1]},
        axes=tuple(axes),
        parts=tuple(change for change in differences(parts) if change.one or change.other),
        memory=tuple(change for change in differences(memory) if change.one or change.other),
        ops=tuple(by_op(*reports)[:SHOWN_OPS]),
    )


def _report(evaluator: Evaluator, point: Mapping[str, Any]) -> StepReport:
    row = evaluator.row(point)
    if row["status"] != OK:
        axes = " ".join(f"{name}={point[name]}" for name in ("tp", "pp", "vpp", "cp", "micro_batch", "recompute"))
        raise RequestError(f"{axes} cannot be compared: {row['why']}")
    return evaluator.report(point)


def point_of(setup: SearchSetup, text: str, folder: Folder) -> Row:
    """The layout that a person names (:func:`named_point`). An axis that is not named has its only value, or what is
    usual: degrees of 1, the last of its stages of ZeRO, the framework's overlap."""
    axes = setup.axes
    usual = {"recompute": "none", "schedule": "1f1b", "sequence_parallel": True, "zero_stage": axes["zero_stage"][-1]}
    usual |= {name: axes[name][0] for name in ("cluster", "nodes", "precision", "overlap")}
    usual = {name: values[0] if len(values) == 1 else usual.get(name, 1) for name, values in axes.items()}
    return named_point(
        setup.request,
        text,
        lambda: [row for row in folder.known.values() if row["status"] == OK],
        lambda name, value: typed_value(name, value, type(axes[name][0]), least=name != "zero_stage"),
        lambda _: usual,
    )
