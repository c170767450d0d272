"""Why one way to serve is better than the next, and what a change around the best costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..answer import cheapness, cost_of, told
from ..objectives import OF_SERVING
from ..outcome import SearchOutcome
from ..rank import Row
from .request import OF_POINT, OF_PREFILL, ServedSearchRequest

PARTS = {  # figures of a row, as a person calls them
    "decode_ms": "for an iteration that decodes",
    "prompt_ms": "for prompts beside it",
    "queue_ms": "of waiting for a prompt's turn",
    "transfer_ms": "of moving the cache",
}
LEAST_MS = 0.05  # of difference: less is not worth a word


def settings(row: Row) -> str:
    """A way to serve in short, as a person reads it."""
    words = [f"{name}={row[name]}" for name in ("tp", "pp", "dp", "ep") if row[name] != 1 or name == "tp"]
    text = f"{' '.join(words)} batch={row['batch']}"
    if row["pools"] == "together":
        return f"{text} max_tokens={row['max_tokens']}"
    other = " ".join(f"{name[8:]}={row[name]}" for name in OF_PREFILL if row[name] != 1 or name == "prefill_tp")
    ratio = f"{row['ratio']} " if row.get("ratio") else ""
    place = f" on {row['prefill_cluster']}" if row["prefill_cluster"] else ""
    return f"{ratio}prefill {other} max_tokens={row['max_tokens']}{place}, decode {text}"


def changes(one: Row, other: Row) -> dict[str, tuple[Any, Any]]:
    """The axes in which two rows differ, with the value of each."""
    return {name: (one[name], other[name]) for name in OF_POINT if one[name] != other[name]}


def reason(better: Row, worse: Row, objective: str) -> str:
    """Why a row is better than another: by how much, and what of their times makes it."""
    figure = OF_SERVING[objective].figure
    value, theirs = better.get(figure), worse.get(figure)  # which only rows that were played may have
    how = "as good" if value == theirs else f"{abs(value / theirs - 1):.1%} better" if theirs else "better"
    text = f"{how} in {objective.replace('_', ' ')}"
    gains = {name: worse[key] - better[key] for key, name in PARTS.items()}
    named = {name: gain for name, gain in gains.items() if abs(gain) > LEAST_MS}
    words = told(named, lambda gain: f"{abs(gain):.1f} ms", 2)
    ours, others = f"{better['concurrency']:,.0f}", f"{worse['concurrency']:,.0f}"
    if ours != others:
        words.append(f"{ours} instead of {others} requests under way")
    return f"{text}: {', '.join(words)}" if words else text


def around(
    request: ServedSearchRequest, best: Row, outcome: SearchOutcome, good: Sequence[Row]
) -> list[dict[str, Any]]:
    """What each change of one axis of the best row costs (:func:`..answer.cost_of`); None for a row that is not
    ``good``, which users would not have what they expect of.

    Of a change to pools apart and back, and of their ratio, the best row that differs in nothing else counts.
    """
    objective = request.objectives[0]
    figure = OF_SERVING[objective].figure
    cheapest: dict[tuple[str, Any], dict[str, Any]] = {}
    meets = {id(row) for row in good}
    for row in outcome.rows:
        differs = set(changes(best, row)) - {"ratio"}
        if "pools" in differs:
            differs -= {"prefill_cluster", *OF_PREFILL}
        cost = cost_of(best, row, objective)
        if len(differs) != 1 or cost is None:
            continue
        axis = differs.pop()
        entry = {"axis": axis, "value": row[axis], "instead_of": best[axis], "status": row["status"]}
        entry |= {"cost": cost, figure: row[figure], "why": difference(best, row)}
        if id(row) not in meets:
            entry |= {"cost": None, "status": "not what is asked for"}
        best_of_value = cheapest.get((axis, row[axis]))
        if best_of_value is None or cheapness(entry) < cheapness(best_of_value):
            cheapest[axis, row[axis]] = entry
    return list(cheapest.values())


def difference(one: Row, other: Row) -> str:
    """What a user notices of a change."""
    ttft = f"TTFT {other['ttft_ms']:,.0f} ms instead of {one['ttft_ms']:,.0f}"
    return f"{ttft}, TPOT {other['tpot_ms']:.1f} instead of {one['tpot_ms']:.1f}"
