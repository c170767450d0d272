"""Samplers find what an exhaustive search knows, and give one answer for one seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from opcast.simulator.search.rank import losses
from opcast.simulator.search.request import SearchRequest
from opcast.simulator.workbench import Workbench

AXES: dict[str, Any] = {"tp": (1, 2, 3), "pp": (1, 2), "vpp": (1, 3), "zero_stage": (0, 1), "rules": ("tp * pp < 4",)}


@pytest.fixture(scope="module")
def known(asking: Callable[..., SearchRequest], bench: Workbench) -> np.ndarray:
    """The front of a small space [points, objectives]."""
    found = bench.search(asking(AXES, prune=(), memory_gib=1.8))
    assert len(found.pareto) > 2
    return losses(found.pareto, found.objectives)


def test_nsga2_finds_the_front(asking: Callable[..., SearchRequest], bench: Workbench, known: np.ndarray) -> None:
    found = bench.search(asking(AXES, sampler="nsga2", trials=512, memory_gib=1.8))
    assert found.sampler == "nsga2"
    assert np.array_equal(losses(found.pareto, found.objectives), known)
    one, again = (bench.search(asking(AXES, sampler="nsga2", trials=128, memory_gib=1.8)) for _ in range(2))
    assert again.rows == one.rows


def test_tpe_finds_the_best(asking: Callable[..., SearchRequest], bench: Workbench, known: np.ndarray) -> None:
    found = bench.search(asking(AXES, sampler="tpe", trials=128, objectives=("step_time",), memory_gib=1.8))
    assert found.best[0]["step_time_s"] == known[0, 0]
    assert all(row["tp"] * row["pp"] < 4 for row in found.rows)


def test_a_space_that_cannot_be_listed_is_sampled(asking: Callable[..., SearchRequest], bench: Workbench) -> None:
    wide = {name: tuple(range(1, 60)) for name in ("tp", "pp", "vpp", "micro_batch")}
    with pytest.raises(ValueError, match="combinations, more than the"):
        bench.search(asking(wide, sampler="exhaustive"))
    found = bench.search(asking(wide, trials=64))
    assert found.sampler == "nsga2"
