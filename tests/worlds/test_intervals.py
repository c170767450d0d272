"""How sure predictors of own rows are: intervals hold ops that no kernel was timed on, in worlds of known laws."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.kernels import is_eager, lacking
from opcast.datasets.ops import KINDS
from opcast.harness.plan import Case
from opcast.models.few_rows import mended
from opcast.models.registry import Registry
from opcast.models.table import MeasurementTable
from opcast.models.training import SHIPPED, fit
from opcast.tests.worlds.chain import plan_of
from opcast.tests.worlds.chip import WORLDS, World, make_world
from opcast.tests.worlds.kernels import kernel_behind
from opcast.tests.worlds.laws import latency_us


def rows_of(world: World, kind: str, cases: Iterable[Case]) -> dict[str, MeasurementTable]:
    """What a world measures of the kernels of a kind that are one launch or library's call, by backend."""
    by_backend: dict[str, list[Case]] = {}
    for case in cases:
        one_call = not is_eager(kind, case.backend) and case.backend != "torch"
        if case.op.kind == kind and one_call and not lacking(case.op, case.backend, world.device):
            by_backend.setdefault(case.backend, []).append(case)
    return {backend: _table(world, backend, some) for backend, some in by_backend.items()}


def _table(world: World, backend: str, cases: list[Case]) -> MeasurementTable:
    kind = cases[0].op.kind
    dims = np.array([case.op.dims for case in cases], dtype=np.int64).T
    states = [(case.op.dtype, case.op.out_dtype, case.cache) for case in cases]
    us = [latency_us(world, case.op, kernel_behind(world, case.op, backend, None), case.cache) for case in cases]
    columns = dict(zip(KINDS[kind].names, dims, strict=True))
    texts, sources = map(np.array, zip(*states, strict=True)), {"source": ["harness"]}
    return MeasurementTable(kind, world.device, backend, columns, *texts, np.array(us), sources=sources)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_intervals_of_experts_hold_shapes_that_no_kernel_was_timed_on(name: str, tmp_path: Path) -> None:
    """Kernels are timed on the same shapes: what one is off another there says nothing of how well both know others."""
    world, registry = make_world(name, 12), Registry(tmp_path)
    plan, another = plan_of("full"), plan_of("full", "campaign.settings.seed=99")
    measured, timed = rows_of(world, "fused_moe", plan.cases), {(case.op, case.cache) for case in plan.cases}
    fresh = rows_of(world, "fused_moe", [case for case in another.cases if (case.op, case.cache) not in timed])
    inside = []
    for table in sorted(measured.values(), key=lambda table: -len(table)):
        outcome = mended(fit(table), [registry, Registry(SHIPPED)], list(measured.values()))
        answered = registry.register(outcome.predictor, True).predict_frame(fresh[table.backend].frame())
        asked_us = fresh[table.backend].latency_us
        inside.append((answered.low_us <= asked_us) & (asked_us <= answered.high_us))
    assert 0.8 < np.concatenate(inside).mean() < 0.98
