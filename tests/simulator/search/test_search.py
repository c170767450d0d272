"""A search finds what asking about every point finds; bounds are bounds; what cannot be is said in one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opcast.datasets.ops import Op, make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.simulator.question.network import NetworkChoice
from opcast.simulator.question.stragglers import Straggler
from opcast.simulator.search.bounds import bound, standing
from opcast.simulator.search.evaluate import Evaluator
from opcast.simulator.search.explain import reason_between
from opcast.simulator.search.rank import dominated, front, losses, ranked
from opcast.simulator.search.request import SearchRequest, request_of, set_up
from opcast.simulator.search.result import SearchReport
from opcast.simulator.search.run import space_of
from opcast.simulator.search.space import AXES
from opcast.simulator.search.workers import Workers
from opcast.simulator.workbench import Workbench

Asking = Callable[..., SearchRequest]
SPACES: list[dict[str, Any]] = [
    {"axes": {"pp": (1, 2), "vpp": (1, 3), "zero_stage": (0, 1), "recompute": ("none", "full")}, "memory_gib": 1.6},
    {"axes": {"zero_stage": (0, 3), "sequence_parallel": (False, True), "pp": (1,)}, "objectives": ("mfu",), "top": 2},
    {"axes": {"tp": (1,), "pp": (2,), "schedule": ("gpipe", "1f1b", "zb-h1")}, "memory_gib": 4.0, "top": 3},
    {"axes": {"tp": (1,), "ep": (1, 4), "pp": (1, 2)}, "kind": "qwen3_moe", "objectives": ("cost", "memory"), "top": 2},
    {"axes": {"cp": (1, 2), "precision": ("bf16", "fp8"), "micro_batch": (1,)}, "objectives": ("energy",), "top": 1},
]


def best(found: SearchReport) -> list[tuple[Any, ...]]:
    """The points of the answer, in order."""
    return [point(row) for row in (*found.best, *found.pareto)]


def point(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The values of its axes."""
    return tuple(row[name] for name in AXES)


@pytest.fixture(scope="module")
def whole(asking: Asking, bench: Workbench) -> list[SearchReport]:
    """Every space with nothing pruned."""
    return [bench.search(asking(**space, prune=())) for space in SPACES]


@pytest.mark.parametrize("at", range(len(SPACES)))
def test_what_bounds_leave_out_was_not_best(
    at: int, asking: Asking, bench: Workbench, whole: list[SearchReport]
) -> None:
    found = bench.search(asking(**SPACES[at]))
    assert best(found) == best(whole[at])
    assert found.points == found.evaluated + found.pruned == whole[at].points
    assert found.evaluated <= whole[at].evaluated


def test_every_kind_of_pruning_was_at_work(asking: Asking, bench: Workbench) -> None:
    rules = {"axes": {**SPACES[0]["axes"], "rules": ("tp * pp <= 2",)}}
    found = bench.search(asking(**{**SPACES[0], **rules}))
    assert {"rule: tp * pp <= 2", "memory_bound"} <= set(found.pruned_by)
    assert all(each.count and each.why and set(AXES) <= set(each.example) for each in found.pruned_by.values())


@pytest.mark.parametrize("at", range(len(SPACES)))
def test_bounds_are_below_what_is_simulated(
    at: int, asking: Asking, bench: Workbench, whole: list[SearchReport]
) -> None:
    made = set_up(asking(**SPACES[at]))
    crew = Workers(Evaluator(made, bench))
    points, _ = space_of(made)
    bounds = bound(points, crew.probes(standing(points), lambda done: None), crew.evaluator)
    rows = {point(row): row for row in whole[at].rows}
    tight = []
    for place in range(len(points)):
        row = rows[tuple(points.at(place).values())]
        assert bounds.memory_gib[place] <= row["peak_gib"]
        if row["status"] == "evaluated":
            assert bounds.time_s[place] <= row["step_time_s"]
            tight.append(bounds.time_s[place] / row["step_time_s"])
    assert np.median(tight) > 0.5, "a bound that is near nothing leaves nothing out"


def test_a_bound_leaves_out_what_a_row_beats_in_every_objective_alone() -> None:
    lower = np.array([[2.0, 5.0], [2.0, 1.0], [1.0, 9.0], [0.5, 9.0], [2.0, 3.0]])
    assert dominated(lower, np.array([[1.0, 3.0]])).tolist() == [True, False, False, False, True]


def test_the_front_is_what_no_point_beats(whole: list[SearchReport]) -> None:
    for found in whole:
        timed = [row for row in found.rows if row["status"] == "evaluated"]
        loss, edge = losses(timed, found.objectives), losses(found.pareto, found.objectives)
        for own in loss:
            assert (edge <= own).all(axis=1).any()
        for own in edge:
            assert not ((loss <= own).all(axis=1) & (loss < own).any(axis=1)).any()
        assert front(found.pareto, found.objectives) == list(found.pareto)


def test_an_answer_explains_itself(whole: list[SearchReport]) -> None:
    found = whole[0]
    assert [row["rank"] for row in found.best] == list(range(1, len(found.best) + 1))
    assert "better in step time" in found.best[0]["reason"]
    assert {each["axis"] for each in found.sensitivity} >= {"tp", "pp", "micro_batch", "recompute"}
    costs = [each["cost"] for each in found.sensitivity if each["cost"] is not None]
    assert costs == sorted(costs)
    assert costs[0] >= 0, "a neighbour is better than the best"
    made = found.to_dict()
    assert {"evaluated", "pruned", "best", "pareto", "wall_time_s"} <= set(made)
    assert len(found.to_pandas()) == len(found.rows)


def test_a_slower_change_is_explained_by_what_takes_longer() -> None:
    best = {"step_time_s": 10.0, "compute_s": 7.0, "exposed_dp_s": 2.0, "bubble_s": 1.0}
    slower = {"step_time_s": 10.1, "compute_s": 7.1, "exposed_dp_s": 1.7, "bubble_s": 1.3 - 1e-3}
    assert reason_between(best, slower) == "299 ms more pipeline bubble"
    assert reason_between(slower, best) == "299 ms less pipeline bubble"


def test_what_has_no_tensor_parallelism_has_no_sequence_parallelism(whole: list[SearchReport]) -> None:
    rows = [row for found in whole for row in found.rows]
    assert {row["sequence_parallel"] for row in rows if row["tp"] == 1} == {False}
    assert True in {row["sequence_parallel"] for row in rows if row["tp"] > 1}
    assert all(each["status"] != "does not fit together" for each in whole[0].sensitivity if each["axis"] == "tp")


def test_a_search_that_was_ended_goes_on(asking: Asking, bench: Workbench, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    request = asking(**SPACES[0])
    first = bench.search(request, points=tmp_path / "found")
    parts = sorted((tmp_path / "found").glob("part-*.parquet"))
    assert sum(pq.read_metadata(part).num_rows for part in parts) == len(first.rows)
    asked_for: list[Any] = []
    original = Evaluator.row

    def counted(self: Evaluator, point: Any) -> Any:
        asked_for.append(point)
        return original(self, point)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "row", counted)
        again = bench.search(request, points=tmp_path / "found")
    assert best(again) == best(first)
    assert len(asked_for) <= len(first.sensitivity), "points of the folder were simulated again"
    with pytest.raises(ValueError, match="the points of another search"):
        bench.search(replace(request, top=3), points=tmp_path / "found")
    parts[0].write_bytes(b"no")
    with pytest.raises(ValueError, match="is no Parquet"):
        bench.search(request, points=tmp_path / "found")


@pytest.mark.parametrize(
    ("axes", "own", "says"),
    [
        ({"rules": ("tp > 9",)}, {}, "the space is empty: none of .* meets the rule 'tp > 9'"),
        ({"rules": ("tp == 1", "tp == 2")}, {}, "no point can meet both 'tp == 2' and 'tp == 1'"),
        ({"tp": (3,)}, {}, "the space is empty: .* tp x cp x pp divides the devices"),
        ({"rules": ("tp > 1",)}, {"constraints": ("tp < 2",)}, "no point meets 'tp < 2' and the rules before it"),
        ({"tp": (0,)}, {}, "space.tp=0 must be a whole number of at least 1"),
        ({"recompute": ("ful",)}, {"prune": ("memry",)}, "prune='memry' is not one of memory, time"),
        ({}, {"objectives": ("speed",)}, "objectives='speed' is not one of"),
        ({}, {"constraints": ("memory < 3",)}, "unknown name 'memory'"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    axes: dict[str, Any], own: dict[str, Any], says: str, asking: Asking, bench: Workbench
) -> None:
    with pytest.raises(ValueError, match=says) as found:
        bench.search(asking(axes, **own))
    assert "\n" not in str(found.value)


def test_a_space_in_which_nothing_fits_says_what_is_needed(asking: Asking, bench: Workbench) -> None:
    found = bench.search(asking({}, memory_gib=0.6))
    assert not found.best
    assert "no point of the space can run" in found.notes[0]
    none = bench.search(asking({}, constraints=("step_time_s < 1e-9",)))
    assert "no point meets step_time_s < 1e-9" in none.notes[0]


@pytest.mark.parametrize("name", ["peak_gib", "step_time_s"])
def test_what_a_bound_says_of_a_constraint_is_not_simulated(
    name: str, asking: Asking, bench: Workbench, whole: list[SearchReport]
) -> None:
    middle = float(np.median([row[name] for row in whole[0].rows if row.get(name)]))
    text = f"{name} <= {middle}"
    found = bench.search(asking(**SPACES[0], constraints=(text,)))
    good = asking(**SPACES[0], constraints=(text,)).good([row for row in whole[0].rows if row["status"] == "evaluated"])
    order = ranked(good, found.objectives)[: len(found.best)]
    assert best(found) == [point(row) for row in (*order, *front(good, found.objectives))]
    assert found.best
    assert found.pruned_by[f"constraint: {text}"].count > 0
    none = bench.search(asking(**SPACES[0], constraints=(f"{name} <= 1e-9",)))
    assert (none.evaluated, none.best) == (0, ())
    assert none.notes[0].startswith(f"no point meets {name} <= 1e-9; 0 were simulated; ")


def test_requests_go_through_json(asking: Asking) -> None:
    for space in SPACES:
        request = asking(**space)
        assert SearchRequest.from_json(request.to_json()) == request
        assert SearchRequest.from_json(request.to_json()).key() == request.key()
    assert asking({}).key() != asking({}, top=3).key()


def test_what_the_space_says_goes_not_into_the_step_too(asking: Asking) -> None:
    request = asking({})
    wide = replace(request.base, parallel=replace(request.base.parallel, tp=2))
    with pytest.raises(ValueError, match=r"parallel.tp=2 is an axis of the search: take space.tp=\[…\]"):
        replace(request, base=wide)
    alone = replace(request.base, work=replace(request.base.work, global_batch=None))
    with pytest.raises(ValueError, match=r"workload.global_batch=1024"):
        replace(request, base=alone)


def test_what_a_search_does_not_simulate_is_refused(asking: Asking) -> None:
    request = asking({})
    for other in ({"network": NetworkChoice("flow")}, {"stragglers": (Straggler(1.5, device=0),)}):
        with pytest.raises(ValueError, match="by formula on healthy devices"):
            replace(request, base=replace(request.base, **other))


def test_what_is_said_to_settle_a_tie_does(asking: Asking, tmp_path: Path) -> None:
    """Of tied layouts the ops are named that nobody measured and whose time differs most; measured, none is left."""
    axes = {"tp": (2,), "pp": (1,), "micro_batch": (1, 2), "recompute": ("none",), "zero_stage": (1,)}
    request = asking(axes, noise_floor=0.9, prune=())
    sources = replace(request.base.sources, store=str(tmp_path / "store"))
    request = replace(request, base=replace(request.base, sources=sources))
    own = Workbench(sources)
    found = own.search(request)
    assert found.ties > 0
    spent: dict[str, list[float]] = {}
    for place, row in enumerate(found.best[: found.ties + 1][:4]):
        step = own.simulate(request_of(set_up(request), {name: row[name] for name in AXES}))
        for each in step.measure_next:
            spent.setdefault(str(each.op), [0.0] * min(found.ties + 1, 4))[place] = each.time_s
    differ = sorted((max(times) - min(times) for times in spent.values()), reverse=True)
    said = [each["difference_s"] for each in found.measure_next]
    assert said == pytest.approx(differ[: len(said)])
    assert len(said) == min(5, sum(each > 1e-6 for each in differ)) > 0
    named = [op_of(each["op"]) for each in found.measure_next]
    about = {"device_id": "h100_sxm", "run_id": "test", "measured_at": datetime(2026, 1, 1, tzinfo=UTC)}
    Store(tmp_path / "store").write([Measurement(op=op, latency_us=9.0, **about) for op in named], "test")
    again = own.search(request)
    assert not {op_of(each["op"]) for each in again.measure_next} & set(named)
    assert own.search(replace(request, noise_floor=0.0)).measure_next == ()


def op_of(said: dict[str, Any]) -> Op:
    """The op that an answer names."""
    return make_op(said["kind"], **{name: value for name, value in said.items() if name != "kind"})
