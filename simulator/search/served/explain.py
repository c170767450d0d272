"""Why one way to serve is better than the next, what a change around the best costs, and what would settle ties."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...report.answer import InferenceReport
from ..explain import settling
from ..objectives import OF_SERVING
from .request import OF_POINT, OF_PREFILL, ServedSearchRequest

PARTS = {  # figures of a row, as a person calls them
    "decode_ms": "for an iteration that decodes",
    "prompt_ms": "for prompts beside it",
    "queue_ms": "of waiting for a prompt's turn",
    "transfer_ms": "of moving the cache",
}
LEAST_MS = 0.05  # of difference: less is not worth a word
SETTLED = 4  # tied rows whose ops are compared
Row = Mapping[str, Any]
Reporting = Callable[[Row], InferenceReport]


def settings(row: Row) -> str:
    """A way to serve in short, as a person reads it."""
    shown = [f"{name}={row[name]}" for name in ("tp", "pp", "dp", "ep") if row[name] != 1 or name == "tp"]
    said = f"{' '.join(shown)} batch={row['batch']}"
    if row["pools"] == "together":
        return f"{said} max_tokens={row['max_tokens']}"
    other = " ".join(f"{name[8:]}={row[name]}" for name in OF_PREFILL if row[name] != 1 or name == "prefill_tp")
    ratio = f"{row['ratio']} " if row.get("ratio") else ""
    return f"{ratio}prefill {other} max_tokens={row['max_tokens']}, decode {said}"


def changes(one: Row, other: Row) -> dict[str, tuple[Any, Any]]:
    """The axes in which two rows differ, with the value of each."""
    return {name: (one[name], other[name]) for name in OF_POINT if one[name] != other[name]}


def reason(better: Row, worse: Row, objective: str) -> str:
    """Why a row is better than another: by how much, and what of their times makes it."""
    figure, _ = OF_SERVING[objective]
    own, theirs = better[figure], worse[figure]
    said = f"{abs(own / theirs - 1):.1%} better in {objective}" if theirs else f"better in {objective}"
    gains = {name: worse[key] - better[key] for key, name in PARTS.items()}
    named = sorted(((n, g) for n, g in gains.items() if abs(g) > LEAST_MS), key=lambda each: -abs(each[1]))
    shown = [f"{abs(gain):.1f} ms {'less' if gain > 0 else 'more'} {name}" for name, gain in named[:2]]
    if better["concurrency"] != worse["concurrency"]:
        shown.append(f"{better['concurrency']:,.0f} instead of {worse['concurrency']:,.0f} requests under way")
    return f"{said}: {', '.join(shown)}" if shown else said


def tie(one: Row, other: Row, request: ServedSearchRequest) -> str:
    """Why two rows cannot be told apart: ``noise``, ``interval`` (of their times) or empty."""
    figure, _ = OF_SERVING[request.objectives[0]]
    own, theirs = one[figure], other[figure]
    if abs(own - theirs) <= request.noise_floor * max(abs(own), abs(theirs)):
        return "noise"
    if figure == "devices" or "low" not in one or "low" not in other:
        return ""
    spans = [(value * row["low"], value * row["high"]) for value, row in ((own, one), (theirs, other))]
    return "interval" if max(spans[0][0], spans[1][0]) <= min(spans[0][1], spans[1][1]) else ""


def explained(
    order: Sequence[Row], request: ServedSearchRequest, report: Reporting
) -> tuple[list[dict[str, Any]], list[Row]]:
    """The best rows with rank, interval, tie with the row before and why each is better than the next; and all rows
    that the noise floor does not tell from the first.

    ``low`` and ``high`` are times of iterations by that of the answer, at the coverage of its report.
    """
    first = request.objectives[0]
    known: dict[tuple[Any, ...], tuple[float, float]] = {}
    shown: list[dict[str, Any]] = []
    for row in order[: request.top + 1]:
        key = tuple(row[name] for name in ("cluster", "precision", "policy", "tp", "pp", "dp", "ep", "batch"))
        if key not in known:
            own = report(row)
            known[key] = own.low_ms / own.e2e_ms, own.high_ms / own.e2e_ms
        shown.append({**row, "low": known[key][0], "high": known[key][1]})
    best = []
    for at, made in enumerate(shown[: request.top]):
        after = shown[at + 1] if at + 1 < len(shown) else None
        differs = {} if after is None else {name: list(pair) for name, pair in changes(made, after).items()}
        said = "" if after is None else reason(made, after, first)
        before = tie(shown[at - 1], made, request) if at else ""
        best.append({"rank": at + 1, **made, "tie": before, "reason": said, "differs_from_next": differs})
    tied = [row for row in order if row is order[0] or tie(order[0], row, request) == "noise"]
    return best, tied


def settled(tied: Sequence[Row], report: Reporting) -> list[dict[str, Any]]:
    """The measurements that say most of rows that cannot be told apart: one of each layout that is among them."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in tied:
        found.setdefault(tuple(row[name] for name in ("cluster", "policy", "tp", "pp", "dp", "ep", "batch")), row)
    return settling([report(row) for row in list(found.values())[:SETTLED]]) if len(found) > 1 else []


def around(best: Row, rows: Sequence[Row], good: Sequence[Row], objective: str) -> list[dict[str, Any]]:
    """What each change of one axis of the best row costs, cheapest first (0.02 is 2 % worse); None for a row that is
    not ``good``, which users would not have what they expect of.

    Of a change to pools apart and back, and of their ratio, the best row that differs in nothing else counts.
    """
    figure, sign = OF_SERVING[objective]
    found: dict[tuple[str, Any], dict[str, Any]] = {}
    meets = {id(row) for row in good}
    for row in rows:
        differs = set(changes(best, row)) - {"ratio"}
        if "pools" in differs:
            differs -= set(OF_PREFILL)
        if len(differs) != 1 or not best[figure]:
            continue
        axis = differs.pop()
        ratio = row[figure] / best[figure] if sign > 0 else best[figure] / row[figure] if row[figure] else float("inf")
        entry = {"axis": axis, "value": row[axis], "instead_of": best[axis], "status": row["status"]}
        entry |= {"cost": ratio - 1.0, figure: row[figure], "why": difference(best, row)}
        if id(row) not in meets:
            entry |= {"cost": None, "status": "not what is asked for"}
        known = found.get((axis, row[axis]))
        if known is None or cheapness(entry) < cheapness(known):
            found[axis, row[axis]] = entry
    return sorted(found.values(), key=cheapness)


def cheapness(entry: Mapping[str, Any]) -> tuple[bool, float]:
    """What changes are ordered by."""
    return entry["cost"] is None, entry["cost"] or 0.0


def difference(one: Row, other: Row) -> str:
    """What a user notices of a change."""
    ttft = f"TTFT {other['ttft_ms']:,.0f} ms instead of {one['ttft_ms']:,.0f}"
    return f"{ttft}, TPOT {other['tpot_ms']:.1f} instead of {one['tpot_ms']:.1f}"
