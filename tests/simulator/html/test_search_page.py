"""The page of a search: the front with every point, the ranked table, one change, what was left out."""

from __future__ import annotations

from typing import Any

from opcast.simulator.html.page import Figure, render
from opcast.simulator.html.search import page


def row(rank: int, seconds: float, gib: float) -> dict[str, Any]:
    figures = dict.fromkeys(("compute_s", "exposed_comm_s", "bubble_s", "optimizer_s", "host_s"), seconds / 5)
    own = {"step_time_s": seconds, "low_s": seconds * 0.9, "high_s": seconds * 1.1, "peak_gib": gib, "mfu": 0.4}
    said = {"tie": "noise" if rank == 2 else "", "reason": "2 % better <of what>", "tp": rank, "dp": 2, "devices": 8}
    return {"rank": rank, **figures, **own, **said, "tokens_per_s_per_gpu": 1000.0}


FOUND: dict[str, Any] = {
    "model": "<tiny>",
    "points": 12,
    "combinations": 20,
    "objectives": ["step_time", "memory"],
    "constraints": ["peak_gib < 70"],
    "evaluated": 3,
    "pruned": 9,
    "ties": 1,
    "best": [row(1, 1.0, 60.0), row(2, 1.01, 50.0)],
    "pareto": [row(1, 1.0, 60.0), row(2, 1.01, 50.0)],
    "sensitivity": [
        {"axis": "tp", "value": 2, "instead_of": 1, "cost": 0.01, "why": "10 ms more bubble", "status": "evaluated"},
        {"axis": "pp", "value": 2, "instead_of": 1, "cost": None, "why": "99 GiB of 79", "status": "memory"},
    ],
    "measure_next": [{"op": {"kind": "gemm", "m": 8}, "difference_s": 0.01}],
    "pruned_by": {"memory_bound": {"count": 9, "example": {"tp": 1}, "why": "needs 99 GiB"}},
    "left_out": {"tp divides the heads": 8},
}


def test_every_point_is_in_the_picture_and_text_is_escaped() -> None:
    rows = [*FOUND["best"], row(3, 2.0, 80.0), {"tp": 9, "status": "memory", "why": ""}]
    made = page(FOUND, rows, ["step_time_s", "peak_gib"], lambda each: f"tp={each['tp']} <&>")
    drawn = next(part for part in made.sections[0].parts if isinstance(part, Figure))
    assert [len(trace["x"]) for trace in drawn.variants[""]["data"]] == [3, 2, 1]
    assert [section.id for section in made.sections] == ["front", "best", "around", "left"]
    text = render(made)
    assert "&lt;tiny&gt;" in text
    assert "<tiny>" not in text
    assert "10 ms more bubble" in text
    assert "99 GiB of 79" in text
    alone = page({**FOUND, "sensitivity": []}, rows, ["step_time_s"], lambda each: "x")
    assert [section.id for section in alone.sections] == ["best", "left"]
