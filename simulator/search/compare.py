"""How two points of a search differ: axis by axis, part by part of the step, and op by op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..question.canonical import RequestError
from ..report.answer import Answer, StepReport, plain
from .evaluate import OK, Evaluator, Row, figures
from .explain import PARTS
from .points import Folder
from .rank import meeting, ranked
from .request import Asked
from .space import AXES

SHOWN_OPS = 20
MEMORY = ("weights_gib", "gradients_gib", "optimizer_gib", "activations_gib", "other_gib")


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
class PointComparison:
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with what the other has more."""
        made: dict[str, Any] = plain(self)
        for name in ("parts", "memory", "ops"):
            for entry, change in zip(made[name], getattr(self, name), strict=True):
                entry["more"] = change.more
        return made


def compare(evaluator: Evaluator, one: Mapping[str, Any], other: Mapping[str, Any]) -> PointComparison:
    """How two points differ. RequestError for one that cannot run."""
    reports = [_report(evaluator, point) for point in (one, other)]
    found = [figures(report) for report in reports]
    parts = [Change(name, found[0][key] or 0.0, found[1][key] or 0.0) for key, name in PARTS.items()]
    parts.append(Change("step", reports[0].step_time_s, reports[1].step_time_s))
    memory = [Change(key.removesuffix("_gib"), found[0][key] or 0.0, found[1][key] or 0.0) for key in MEMORY]
    memory.append(Change("peak", reports[0].memory.peak_gib, reports[1].memory.peak_gib))
    return PointComparison(
        one={**one, **found[0]},
        other={**other, **found[1]},
        axes=tuple(by_axis(evaluator, one, other)),
        parts=tuple(each for each in parts if each.one or each.other),
        memory=tuple(each for each in memory if each.one or each.other),
        ops=tuple(by_op(*reports)[:SHOWN_OPS]),
    )


def _report(evaluator: Evaluator, point: Mapping[str, Any]) -> StepReport:
    row = evaluator.row(point)
    if row["status"] != OK:
        said = " ".join(f"{name}={point[name]}" for name in ("tp", "pp", "vpp", "cp", "micro_batch", "recompute"))
        raise RequestError(f"{said} cannot be compared: {row['why']}")
    return evaluator.report(point)


def by_axis(evaluator: Evaluator, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[AxisChange]:
    """The step after each axis that differs is changed, those before it being changed already."""
    made, now = [], dict(one)
    for axis in (name for name in AXES if one[name] != other[name]):
        now[axis] = other[axis]
        row: Row = evaluator.row(now)
        made.append(
            AxisChange(axis, one[axis], other[axis], row.get("step_time_s"), row.get("peak_gib"), row.get("why") or "")
        )
    return made


def by_op(one: Answer, other: Answer) -> list[Change]:
    """Seconds of every op of two reports, those that differ most first; operators without a kind by their names."""
    first, second = _op_seconds(one), _op_seconds(other)
    found = [Change(name, first.get(name, 0.0), second.get(name, 0.0)) for name in {**first, **second}]
    return sorted(found, key=lambda each: (-abs(each.more), each.name))


def _op_seconds(report: Answer) -> dict[str, float]:
    found: dict[str, float] = {}
    assert report.state is not None
    for each in report.state.executions():
        costs, wanted = each.costs, _phases(each.phase)
        for node, us, repeats in zip(costs.nodes, costs.kernel_us.tolist(), costs.repeats.tolist(), strict=True):
            if node.phase in wanted:
                name = node.source if node.op is None else shown(node.op.to_dict())
                found[name] = found.get(name, 0.0) + us * repeats * each.times * 1e-6
    return found


def _phases(phase: str) -> tuple[str, ...]:
    return ("recompute", "backward") if phase == "backward" else (phase,)


def shown(op: Mapping[str, Any]) -> str:
    """An op with its dims in short."""
    dims = (
        f"{name}={value}"
        for name, value in op.items()
        if name not in ("kind", "out_dtype") and value not in ("same", 0)
    )
    return f"{op['kind']} {' '.join(dims)}"


def point_of(made: Asked, text: str, folder: Folder) -> dict[str, Any]:
    """The point that a person names: a rank of a search that was kept, or axes such as ``tp=8 pp=2``.

    An axis that is not named has its only value, or what is usual: degrees of 1, the last of its stages of ZeRO, the
    framework's overlap. RequestError for a rank that is not there and for an axis that is none.
    """
    text = str(text).strip()
    if text.isdigit():
        return _of_rank(made, int(text), folder)
    usual = {
        "recompute": "none",
        "schedule": "1f1b",
        "sequence_parallel": True,
        "zero_stage": made.axes["zero_stage"][-1],
    }
    point = {name: values[0] if len(values) == 1 else usual.get(name, 1) for name, values in made.axes.items()}
    point |= {name: made.axes[name][0] for name in ("cluster", "nodes", "precision", "overlap")}
    for part in text.replace(",", " ").split():
        name, equals, value = part.partition("=")
        if name not in AXES or not equals:
            raise RequestError(
                f"{part!r} is no axis=value; axes are {', '.join(AXES)}, or give a rank of points=FOLDER"
            )
        point[name] = _as(name, value, made.axes[name][0])
    return point


def _as(name: str, value: str, like: Any) -> Any:
    if isinstance(like, bool):
        if value.lower() not in ("true", "false"):
            raise RequestError(f"{name}={value} must be true or false")
        return value.lower() == "true"
    if isinstance(like, str):
        return value
    if not value.isdigit():
        raise RequestError(f"{name}={value} must be a whole number")
    return int(value)


def _of_rank(made: Asked, rank: int, folder: Folder) -> dict[str, Any]:
    rows: Sequence[Row] = [row for row in folder.known.values() if row["status"] == OK]
    if not rows:
        raise RequestError(f"{rank} is a rank of a search that was kept: name its folder with points=FOLDER")
    ordered = ranked(meeting(rows, made.request.expressions()[1]), made.request.objectives)
    if not 1 <= rank <= len(ordered):
        raise RequestError(f"{rank} is no rank of points={folder.path}: it has 1 to {len(ordered)}")
    return {name: ordered[rank - 1][name] for name in AXES}
