"""Why the best points are better than the next, and what a change around the best one costs."""

from __future__ import annotations

from typing import Any

from .answer import cost_of, told
from .objectives import OBJECTIVES
from .outcome import OK
from .rank import Row
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


def changes(one: Row, other: Row) -> dict[str, tuple[Any, Any]]:
    """The axes in which two rows differ, with the value of each."""
    differ = {name: (one[name], other[name]) for name in AXES if one[name] != other[name]}
    if 1 in differ.get("tp", ()):
        differ.pop("sequence_parallel", None)  # which goes with tensor parallelism
    return differ


def reason(better: Row, worse: Row, objective: str) -> str:
    """Why a row is better than another: by how much, and which parts of the step make the difference."""
    figure = OBJECTIVES[objective].figure
    ours, theirs = better.get(figure), worse.get(figure)
    if ours is None or theirs is None or not theirs:
        return ""
    if figure == "peak_gib":
        return f"{theirs - ours:.1f} GiB less"
    seconds = worse["step_time_s"] - better["step_time_s"]
    text = f"{abs(ours / theirs - 1):.1%} better in {objective.replace('_', ' ')}"
    parts = {name: (worse.get(key) or 0.0) - (better.get(key) or 0.0) for key, name in PARTS.items()}
    size = max(abs(seconds), max(map(abs, parts.values()), default=0.0))
    named = {name: gain for name, gain in parts.items() if abs(gain) > NAMED * size and size > 0}
    gains = ", ".join(told(named, _ms, 4))
    return f"{text}: {gains}" if gains else text


def change(best: Row, axis: str, row: Row, objective: str) -> dict[str, Any]:
    """What the change of one axis of the best row costs (:func:`.answer.cost_of`), and which part of the step makes it;
    of one that cannot be, why."""
    figure = OBJECTIVES[objective].figure
    cost = cost_of(best, row, objective) if row["status"] == OK else None
    row_figures = {} if cost is None else {figure: row[figure], "peak_gib": row["peak_gib"]}
    why = row["why"] if cost is None else reason_between(best, row)
    return {
        "axis": axis,
        "value": row[axis],
        "instead_of": best[axis],
        "status": row["status"],
        "cost": cost,
        **row_figures,
        "why": why,
    }


def reason_between(one: Row, other: Row) -> str:
    """The part of the step that changes most from one row to another, of those that change as the whole step does."""
    gains = {name: (one.get(key) or 0.0) - (other.get(key) or 0.0) for key, name in PARTS.items()}
    faster = one["step_time_s"] > other["step_time_s"]
    return told({name: gain for name, gain in gains.items() if (gain > 0) is faster} or gains, _ms, 1)[0]


def _ms(seconds: float) -> str:
    """The size of a difference: whole milliseconds, or two digits of less than ten."""
    ms = abs(seconds) * 1e3
    return f"{ms:.0f} ms" if ms >= 9.5 else f"{ms:.2g} ms"
