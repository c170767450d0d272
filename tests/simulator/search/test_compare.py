"""Two points: the parts of their difference add up, and each op is counted once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from opcast.simulator.search.request import SearchRequest
from opcast.simulator.workbench import Workbench

Asking = Callable[..., SearchRequest]


def test_a_difference_adds_up(asking: Asking, bench: Workbench) -> None:
    found = bench.compare(asking({}), "tp=1 micro_batch=4", "tp=2,recompute=full")
    *parts, step = found.parts
    assert step.name == "step"
    assert sum(each.more for each in parts) == pytest.approx(step.more, rel=1e-6)
    assert [each.axis for each in found.axes] == ["tp", "micro_batch", "recompute"]
    assert found.axes[-1].step_time_s == step.other
    assert any("all_reduce" in each.name or "reduce_scatter" in each.name for each in found.ops if not each.one)
    assert {"axes", "parts", "memory", "ops"} <= set(found.to_dict())
    same = bench.compare(asking({}), "tp=2", "tp=2")
    assert not any(each.more for each in (*same.parts, *same.ops, *same.memory))


def test_ranks_are_those_of_a_search_that_was_kept(asking: Asking, bench: Workbench, tmp_path: Path) -> None:
    request = asking({"pp": (1,)})
    kept = bench.search(request, points=tmp_path)
    found = bench.compare(request, "1", "2", tmp_path)
    assert [found.one["step_time_s"], found.other["step_time_s"]] == [row["step_time_s"] for row in kept.best[:2]]
    for words, says in (("99", "99 is no rank"), ("0", "0 is no rank"), ("tq=2", "'tq=2' is no axis=value")):
        with pytest.raises(ValueError, match=says):
            bench.compare(request, "1", words, tmp_path)
    with pytest.raises(ValueError, match="points=FOLDER"):
        bench.compare(request, "1", "2")
