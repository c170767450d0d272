"""The page of a search: the front with every point, the ranked table, one change, what was left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from opcast.simulator.html.page import Figure, render
from opcast.simulator.search.result import Left, SearchReport
from opcast.simulator.search.shown import LAYOUTS
from opcast.simulator.search.view import headline, page


def row(rank: int, seconds: float, gib: float) -> dict[str, Any]:
    figures = dict.fromkeys(("compute_s", "exposed_comm_s", "bubble_s", "optimizer_s", "host_s"), seconds / 5)
    own = {"step_time_s": seconds, "low_s": seconds * 0.9, "high_s": seconds * 1.1, "peak_gib": gib, "mfu": 0.4}
    said = {
        "tie": "noise" if rank == 2 else "",
        "reason": "2 % better <of what>",
        "tp": rank,
        "devices": 8,
        "status": "evaluated",
    }
    return {"rank": rank, **figures, **own, **said, "tokens_per_s_per_gpu": 1000.0}


FOUND = SearchReport(
    model="<tiny>",
    sampler="exhaustive",
    objectives=("step_time", "memory"),
    constraints=("peak_gib < 70",),
    axes={"tp": [1, 2]},
    combinations=20,
    points=12,
    left_out={"tp divides the heads": 8},
    evaluated=3,
    pruned=9,
    pruned_by={"memory_bound": Left(9, row(1, 1.0, 99.0), "needs 99 GiB")},
    best=(row(1, 1.0, 60.0), row(2, 1.01, 50.0)),
    pareto=(row(1, 1.0, 60.0), row(2, 1.01, 50.0)),
    ties=1,
    sensitivity=(
        {"axis": "tp", "value": 2, "instead_of": 1, "cost": 0.01, "why": "10 ms more bubble", "status": "evaluated"},
        {"axis": "pp", "value": 2, "instead_of": 1, "cost": None, "why": "99 GiB of 79", "status": "memory"},
    ),
    measure_next=({"op": {"kind": "gemm", "m": 8}, "difference_s": 0.01},),
    notes=(),
    wall_time_s=1.0,
)
VIEW = replace(LAYOUTS, name=lambda each: f"tp={each['tp']} <&>", place=lambda each: "x", title=lambda each: "x")


def test_every_point_is_in_the_picture_and_text_is_escaped() -> None:
    rows = (*FOUND.best, row(3, 2.0, 80.0), {"tp": 9, "status": "memory", "why": "", "peak_gib": 99.0})
    made = page(replace(FOUND, rows=rows), VIEW)
    drawn = next(part for part in made.sections[0].parts if isinstance(part, Figure))
    assert [len(trace["x"]) for trace in drawn.variants[""]["data"]] == [3, 2, 1]
    assert [section.id for section in made.sections] == ["front", "best", "around", "left"]
    text = render(made)
    assert "&lt;tiny&gt;" in text
    assert "<tiny>" not in text
    assert "10 ms more bubble" in text
    assert "99 GiB of 79" in text
    alone = page(replace(FOUND, sensitivity=(), objectives=("step_time",)), VIEW)
    assert [section.id for section in alone.sections] == ["best", "left"]


def test_the_headline_names_the_whole_layout_and_ties_are_a_sentence() -> None:
    best = row(1, 1.0, 60.0) | {"pp": 1, "dp": 8, "devices": 8, "zero_stage": 1, "micro_batch": 2}
    best |= dict.fromkeys(("vpp", "cp", "ep", "etp"), 1) | {"schedule": "1f1b", "recompute": "none"}
    made = page(replace(FOUND, best=(best,)), replace(LAYOUTS, place=lambda each: "x", name=lambda each: "x"))
    assert "tp=1 pp=1" in made.title
    assert "micro_batch=2, dp=8 on 8 GPUs" in made.title
    assert made.subtitle.endswith("layouts by step time")
    assert made.cards[-1].verdict.startswith("One other layout cannot be told apart")
    assert page(replace(FOUND, ties=0), VIEW).cards[-1].verdict == "No other layout is as good."


def test_one_of_a_thing_has_no_plural_in_the_line_above_the_tables() -> None:
    from types import SimpleNamespace

    counts = SimpleNamespace(combinations=1, points=1, evaluated=1, pruned=0, wall_time_s=0.1)
    view = SimpleNamespace(grid="layout", looked="looked at")
    assert headline(counts, view) == "1 layout, 1 point; 1 looked at, 0 left out, in 0.1 s"  # type: ignore[arg-type]
    counts.combinations = counts.points = 2000
    assert headline(counts, view).startswith("2,000 layouts, 2,000 points;")  # type: ignore[arg-type]
