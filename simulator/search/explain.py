"""Why the best points are better than the next, what a change around the best one costs, and what would settle ties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .objectives import OBJECTIVES
from .space import AXES

PARTS = {  # figures of a row that add up to its step, as a person calls them
    "compute_s": "compute",
    "exposed_tp_s": "exposed tensor-parallel communication",
    "exposed_cp_s": "exposed context-parallel communication",
    "exposed_ep_s": "exposed expert-parallel communication",
    "exposed_dp_s": "exposed data-parallel communication",
    "exposed_pp_s": "exposed sends between stages",
    "bubble_s": "pipeline bubble",
    "optimizer_s": "optimizer",
    "host_s": "waiting for the host",
}
NAMED = 0.1  # of the difference: parts that make less of it are not named
LEAST_S = 1e-6  # of difference between tied points: less settles nothing
Row = Mapping[str, Any]


def changes(one: Row, other: Row) -> dict[str, tuple[Any, Any]]:
    """The axes in which two rows differ, with the value of each."""
    differ = {name: (one[name], other[name]) for name in AXES if one[name] != other[name]}
    if 1 in differ.get("tp", ()):
        differ.pop("sequence_parallel", None)  # which goes with tensor parallelism
    return differ


def reason(better: Row, worse: Row, objective: str) -> str:
    """Why a row is better than another: by how much, and which parts of the step make the difference."""
    figure, _ = OBJECTIVES[objective]
    own, theirs = better.get(figure), worse.get(figure)
    if own is None or theirs is None or not theirs:
        return ""
    if figure == "peak_gib":
        return f"{theirs - own:.1f} GiB less"
    seconds = worse["step_time_s"] - better["step_time_s"]
    said = f"{abs(own / theirs - 1):.1%} better in {objective}"
    parts = {name: (worse.get(key) or 0.0) - (better.get(key) or 0.0) for key, name in PARTS.items()}
    size = max(abs(seconds), max(map(abs, parts.values()), default=0.0))
    named = [(name, gain) for name, gain in parts.items() if abs(gain) > NAMED * size and size > 0]
    named.sort(key=lambda each: -abs(each[1]))
    shown = ", ".join(f"{_ms(gain)} {'less' if gain > 0 else 'more'} {name}" for name, gain in named[:4])
    return f"{said}: {shown}" if shown else said


def sensitivity(best: Row, found: Sequence[tuple[str, Row]], objective: str) -> list[dict[str, Any]]:
    """What each change of one axis around the best row costs, cheapest first; of one that cannot be, why.

    ``cost`` is how many times worse than the best the objective gets, less one: 0.02 is 2 % worse.
    """
    figure, sign = OBJECTIVES[objective]
    made = []
    for axis, row in found:
        entry: dict[str, Any] = {"axis": axis, "value": row[axis], "instead_of": best[axis], "status": row["status"]}
        value = row.get(figure)
        if row["status"] == "evaluated" and value is not None and best[figure]:
            ratio = value / best[figure] if sign > 0 else best[figure] / value
            entry |= {"cost": ratio - 1.0, figure: value, "peak_gib": row["peak_gib"], "why": reason_between(best, row)}
        else:
            entry |= {"cost": None, "why": row["why"]}
        made.append(entry)
    return sorted(made, key=lambda each: (each["cost"] is None, each["cost"] or 0.0))


def reason_between(one: Row, other: Row) -> str:
    """Which part of the step changes most from one row to another."""
    parts = {name: (other.get(key) or 0.0) - (one.get(key) or 0.0) for key, name in PARTS.items()}
    name = max(parts, key=lambda each: abs(parts[each]))
    return f"{_ms(parts[name])} {'more' if parts[name] > 0 else 'less'} {name}"


def _ms(seconds: float) -> str:
    """The size of a difference: whole milliseconds, or two digits of less than ten."""
    ms = abs(seconds) * 1e3
    return f"{ms:.0f} ms" if ms >= 9.5 else f"{ms:.2g} ms"


def settling(reports: Sequence[Any], limit: int = 5) -> list[dict[str, Any]]:
    """The measurements that say most of rows that cannot be told apart: ops whose share differs most between them.

    ``reports`` are those of the tied rows; an op that all of them spend as much time on settles nothing.
    """
    found: dict[tuple[Any, ...], tuple[Mapping[str, Any], list[float]]] = {}
    for place, report in enumerate(reports):
        for each in report.measure_next:
            key = tuple(sorted(each.op.items()))
            found.setdefault(key, (each.op, [0.0] * len(reports)))[1][place] = each.time_s
    spread = [(max(times) - min(times), dict(op)) for op, times in found.values()]
    spread.sort(key=lambda each: -each[0])
    return [{"op": op, "difference_s": seconds} for seconds, op in spread[:limit] if seconds > LEAST_S]
