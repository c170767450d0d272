"""Max-min fairness against a brute-force solver, and what no sharing may break."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.simulator.network import sharing
from opcast.simulator.network.sharing import Activities, max_min, run_activities


def activities(usage: list[dict[int, float]], sizes: list[float] | None = None, waits: list[list[int]] | None = None):
    lengths = [len(each) for each in usage]
    waits = waits or [[] for _ in usage]
    return Activities(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.array([link for each in usage for link in each], dtype=np.int64),
        np.array([weight for each in usage for weight in each.values()], dtype=np.float64),
        np.array(sizes or [1.0] * len(usage)),
        np.zeros(len(usage)),
        np.zeros(len(usage)),
        np.concatenate([[0], np.cumsum([len(each) for each in waits])]).astype(np.int64),
        np.array([each for row in waits for each in row], dtype=np.int64),
    )


def brute_force(usage: list[dict[int, float]], capacity: np.ndarray) -> np.ndarray:
    """Raise all rates by one small equal step after the other with linear programming: lexicographic max-min."""
    from scipy.optimize import linprog

    n = len(usage)
    matrix = np.zeros((len(capacity), n))
    for column, each in enumerate(usage):
        for link, weight in each.items():
            matrix[link, column] = weight
    fixed: dict[int, float] = {}
    while len(fixed) < n:
        free = [i for i in range(n) if i not in fixed]
        left = capacity - matrix[:, list(fixed)] @ np.array([fixed[i] for i in fixed])
        level = linprog([-1.0], A_ub=matrix[:, free].sum(axis=1)[:, None], b_ub=left, bounds=[(0, None)]).x[0]
        full = left - matrix[:, free].sum(axis=1) * level <= 1e-9 * np.maximum(capacity, 1.0)
        stopped = [i for i in free if (matrix[full, i] > 0).any()]
        fixed.update(dict.fromkeys(stopped, level))
    return np.array([fixed[i] for i in range(n)])


cases = st.integers(1, 6).flatmap(
    lambda links: st.tuples(
        st.lists(st.floats(0.5, 50.0), min_size=links, max_size=links),
        st.lists(
            st.dictionaries(st.integers(0, links - 1), st.sampled_from([1.0, 1.0, 2.0, 3.5]), min_size=1),
            min_size=1,
            max_size=8,
        ),
    )
)


@settings(deadline=None)
@given(cases)
def test_rates_are_those_of_a_brute_force_solver(case: tuple[list[float], list[dict[int, float]]]) -> None:
    capacity, usage = np.array(case[0]), case[1]
    assert max_min(activities(usage), capacity) == pytest.approx(brute_force(usage, capacity), rel=1e-6)


@settings(deadline=None)
@given(cases, st.data())
def test_bytes_are_conserved_and_no_link_carries_more_than_it_can(case, data) -> None:
    capacity, usage = np.array(case[0]), case[1]
    sizes = data.draw(st.lists(st.floats(1.0, 1e6), min_size=len(usage), max_size=len(usage)))
    done = run_activities(activities(usage, sizes), capacity, tolerance=0.0)
    expected = np.zeros(len(capacity))
    for each, size in zip(usage, sizes, strict=True):
        for link, weight in each.items():
            expected[link] += weight * size
    assert done.carried_bytes == pytest.approx(expected)
    assert (expected <= capacity * 1e3 * done.total_us * (1 + 1e-6)).all()


def naive_ends(usage, sizes: list[float], releases: list[float], capacity: np.ndarray) -> np.ndarray:
    """Ends when every event shares all links out anew."""
    made = activities(usage, sizes)
    left, end, now = np.array(sizes), np.full(len(sizes), np.nan), 0.0
    while np.isnan(end).any():
        active = (np.array(releases) <= now) & np.isnan(end)
        coming = [r for r in releases if r > now]
        rate = max_min(made, capacity * 1e3, active) if active.any() else np.zeros(len(sizes))
        lasts = np.where(active, left / np.maximum(rate, 1e-300), np.inf)
        step = min([float(lasts.min()), *(r - now for r in coming)])
        left, now = left - np.where(active, rate * step, 0.0), now + step
        end[active & (lasts <= step * (1 + 1e-12))] = now
    return end


@settings(deadline=None)
@given(cases, st.data())
def test_sharing_out_only_what_an_event_touches_changes_nothing(case, data) -> None:
    capacity, usage = np.array(case[0]), case[1]
    count = len(usage)
    sizes = data.draw(st.lists(st.floats(1e3, 1e6), min_size=count, max_size=count))
    releases = data.draw(st.lists(st.sampled_from([0.0, 0.0, 5.0, 40.0]), min_size=count, max_size=count))
    made = dataclasses.replace(activities(usage, sizes), release_us=np.array(releases))
    assert run_activities(made, capacity, 0.0).end_us == pytest.approx(
        naive_ends(usage, sizes, releases, capacity), rel=1e-5
    )


@settings(deadline=None)
@given(cases, st.data())
def test_compiled_loops_give_what_plain_ones_give(case, data) -> None:
    pytest.importorskip("numba")
    capacity, usage = np.array(case[0]), case[1]
    sizes = data.draw(st.lists(st.floats(1e3, 1e6), min_size=len(usage), max_size=len(usage)))
    made = activities(usage, sizes)
    plain = run_activities(made, capacity, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "MAX_PLAIN_WORK", -1)
        compiled = run_activities(made, capacity, 0.0)
    assert compiled.end_us.tolist() == plain.end_us.tolist()
    assert compiled.carried_bytes.tolist() == plain.carried_bytes.tolist()


@settings(deadline=None)
@given(cases, st.floats(1.0, 4.0), st.data())
def test_more_bandwidth_everywhere_is_never_slower(case, factor: float, data) -> None:
    capacity, usage = np.array(case[0]), case[1]
    sizes = data.draw(st.lists(st.floats(1.0, 1e6), min_size=len(usage), max_size=len(usage)))
    made = activities(usage, sizes)
    assert run_activities(made, capacity * factor, 0.0).total_us <= run_activities(made, capacity, 0.0).total_us * (
        1 + 1e-9
    )


def test_an_early_end_costs_no_more_than_the_tolerance() -> None:
    rng = np.random.default_rng(0)
    usage = [{int(a): 1.0, int(b): 1.0} for a, b in rng.integers(0, 20, (200, 2))]
    made = activities(usage, list(rng.uniform(1e3, 1e6, 200)))
    exact, quick = run_activities(made, np.ones(20), 0.0), run_activities(made, np.ones(20), 1e-3)
    assert quick.end_us == pytest.approx(exact.end_us, rel=5e-3)
    assert quick.total_us == pytest.approx(exact.total_us, rel=1e-3)


def test_one_waits_for_another() -> None:
    done = run_activities(activities([{0: 1.0}, {0: 1.0}, {}], [1e3, 2e3, 0.0], [[], [0], [1]]), np.array([1.0]))
    assert done.start_us.tolist() == [0.0, 1.0, 3.0]
    assert done.end_us.tolist() == pytest.approx([1.0, 3.0, 3.0])


def test_a_circle_of_waiting_is_refused() -> None:
    with pytest.raises(ValueError, match="circle"):
        run_activities(activities([{0: 1.0}, {0: 1.0}], None, [[1], [0]]), np.array([1.0]))
