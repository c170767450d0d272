"""Pipelines: every task once, in an order that can run, in the time that the papers give for it."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.simulator.question.orders import BACKWARD, FORWARD, INPUT, SCHEDULES, WEIGHT, Orders, make_orders
from opcast.simulator.question.plan import PlanError
from opcast.simulator.timing.schedule.pipeline import PipelineTimes, in_flight, run_pipeline


@st.composite
def orders(draw: st.DrawFn, schedules: tuple[str, ...] = tuple(SCHEDULES)) -> Orders:
    schedule = draw(st.sampled_from(schedules))
    stages = draw(st.integers(1, 6)) * (2 if schedule == "dualpipe" else 1)
    virtual = draw(st.integers(1, 4)) if schedule == "interleaved" else 1
    micro_batches = draw(st.integers(1, 12))
    if schedule == "interleaved":
        micro_batches *= stages
    if schedule == "dualpipe":
        micro_batches = 2 * (stages + micro_batches - 1)
    return make_orders(schedule, stages, micro_batches, virtual)


@st.composite
def timed(draw: st.DrawFn) -> tuple[Orders, dict[str, Any]]:
    """Orders with times of their own for every chunk."""
    made = draw(orders())
    shape = (made.stages, made.chunks)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    backward = random.uniform(1, 20, shape)
    times = {
        "forward_us": random.uniform(1, 10, shape),
        "backward_us": backward,
        "weight_us": backward * random.uniform(0, 1, shape),
        "send_us": random.uniform(0, 3, shape) * draw(st.integers(0, 1)),
        "first_forward_us": random.uniform(10, 20, shape),
        "last_backward_us": backward + random.uniform(0, 5, shape),
        "blocking": draw(st.booleans()),
    }
    return made, times


def ends(result: PipelineTimes, *kinds: int) -> dict[tuple[int, int, int], tuple[float, float]]:
    """(start, end) of the tasks of some kinds by (stage, chunk, micro-batch)."""
    made = result.orders
    which = np.flatnonzero(np.isin(made.kind, kinds))
    keys = zip(made.stage[which], made.chunk[which], made.micro_batch[which], strict=True)
    return dict(zip(keys, zip(result.start_us[which], result.end_us[which], strict=True), strict=True))


@settings(deadline=None)
@given(orders())
def test_every_stage_runs_every_task_once_and_in_a_possible_order(made: Orders) -> None:
    for stage, row in enumerate(made.rows()):
        done: dict[int, set[tuple[int, int]]] = {kind: set() for kind in (FORWARD, BACKWARD, INPUT, WEIGHT)}
        for kind, *what in zip(made.kind[row], made.chunk[row], made.micro_batch[row], strict=True):
            key = (int(what[0]), int(what[1]))
            before = {FORWARD: None, BACKWARD: FORWARD, INPUT: FORWARD, WEIGHT: INPUT}[int(kind)]
            assert key not in done[int(kind)]
            assert before is None or key in done[before]
            done[int(kind)].add(key)
        held = {
            (int(chunk), micro_batch)
            for number, route in enumerate(made.routes)
            for at, chunk in route
            for micro_batch in range(number, made.micro_batches, len(made.routes))
            if at == stage
        }
        assert done[FORWARD] == held
        assert done[BACKWARD] | done[INPUT] == held
        assert not done[BACKWARD] & done[INPUT]
        assert done[WEIGHT] == done[INPUT]


@settings(deadline=None)
@given(timed())
def test_no_stage_does_two_things_at_once_and_nothing_starts_too_early(case: tuple[Orders, dict[str, Any]]) -> None:
    made, times = case
    times |= {"first_forward_us": None, "last_backward_us": None}
    result = run_pipeline(made, **times)
    for row in made.rows():
        alone = ~np.roll(made.paired[row], 1)
        assert (result.start_us[row][1:] >= result.end_us[row][:-1] - 1e-9)[alone[1:]].all()
    send = times["send_us"]
    for kinds, step in (((FORWARD,), 1), ((BACKWARD, INPUT), -1)):
        found = ends(result, *kinds)
        for number, route in enumerate(made.routes.tolist()):
            way = route[::step]
            for (stage, chunk), (to, to_chunk) in itertools.pairwise(way):
                for micro_batch in range(number, made.micro_batches, len(made.routes)):
                    ready = found[stage, chunk, micro_batch][1] + (send[stage, chunk] if to != stage else 0.0)
                    assert found[to, to_chunk, micro_batch][0] >= ready - 1e-9
    assert (result.busy_us + result.sending_us + result.bubble_us).max() == pytest.approx(result.makespan_us)


@settings(deadline=None)
@given(timed(), st.sampled_from(["forward_us", "backward_us", "send_us"]), st.data())
def test_a_longer_task_never_shortens_the_pipeline(
    case: tuple[Orders, dict[str, Any]], which: str, data: st.DataObject
) -> None:
    made, times = case
    times |= {"first_forward_us": None, "last_backward_us": None}
    before = run_pipeline(made, **times).makespan_us
    longer = times[which].copy()
    longer[data.draw(st.integers(0, made.stages - 1)), data.draw(st.integers(0, made.chunks - 1))] += 5.0
    assert run_pipeline(made, **times | {which: longer}).makespan_us >= before - 1e-9


@settings(deadline=None)
@given(orders(("gpipe", "1f1b", "interleaved", "zb-h1")), st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_more_micro_batches_never_raise_the_share_of_bubbles(
    made: Orders, forward: int, backward: int, send: int
) -> None:
    if made.schedule == "interleaved" and made.chunks == 1:
        send = 0  # runs twice as far ahead as 1F1B; how much of a send that hides depends on the number of turns
    more = make_orders(made.schedule, made.stages, made.micro_batches + made.stages, made.chunks)
    weight = backward / 2
    shares = [run_pipeline(o, forward, backward, weight, send_us=send).bubble_share.max() for o in (made, more)]
    assert shares[1] <= shares[0] + 1e-9


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (4, 4), (4, 12), (8, 32)])
def test_bubbles_are_those_of_the_papers(stages: int, micro_batches: int) -> None:
    forward, backward, weight = 3.0, 6.0, 3.0
    ideal = micro_batches * (forward + backward)

    def idle(schedule: str, virtual: int = 1) -> float:
        times = np.array([forward, backward, weight]) / virtual
        result = run_pipeline(make_orders(schedule, stages, micro_batches, virtual), *times)
        assert np.allclose(result.bubble_us, result.makespan_us - ideal)
        return result.makespan_us - ideal

    expected = (stages - 1) * (forward + backward)
    assert idle("1f1b") == pytest.approx(expected)
    assert idle("gpipe") == pytest.approx(expected)
    assert idle("zb-h1") == pytest.approx((stages - 1) * (forward + backward - 2 * weight))
    for virtual in (2, 4):
        assert idle("interleaved", virtual) == pytest.approx(expected / virtual)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (8, 20), (16, 60)])
@pytest.mark.parametrize("together", [9.0, 8.0])
def test_the_bubble_of_dualpipe_is_that_of_its_paper(stages: int, micro_batches: int, together: float) -> None:
    forward, backward, weight = 3.0, 6.0, 3.0
    made = make_orders("dualpipe", stages, micro_batches)
    result = run_pipeline(made, forward, backward, weight, paired_us=together)
    bubble = (stages / 2 - 1) * (together + backward - 3 * weight)
    assert result.bubble_us.max() == pytest.approx(bubble)
    assert (in_flight(made).sum(axis=1) == stages + 1).all() or stages == 2


def test_micro_batches_in_flight() -> None:
    assert in_flight(make_orders("1f1b", 4, 8))[:, 0].tolist() == [4, 3, 2, 1]
    assert in_flight(make_orders("1f1b", 4, 2))[:, 0].tolist() == [2, 2, 2, 1]
    assert in_flight(make_orders("gpipe", 4, 8))[:, 0].tolist() == [8] * 4
    assert in_flight(make_orders("zb-h1", 4, 8))[:, 0].tolist() == [4] * 4
    interleaved = in_flight(make_orders("interleaved", 4, 8, 2))
    assert interleaved.sum(axis=1).tolist() == [11, 9, 7, 5]  # 2 (stages - stage - 1) + (virtual - 1) stages, and one


def test_the_fullest_moment_depends_on_what_chunks_hold() -> None:
    made = make_orders("interleaved", 4, 8, 2)
    heavy_last = in_flight(made, np.array([[0.0, 1.0]] * 4))
    assert heavy_last[0, 1] >= in_flight(made)[0, 1]


def test_an_interleaved_row_is_the_one_that_everybody_draws() -> None:
    made = make_orders("interleaved", 2, 4, 2)
    row = next(made.rows())
    letters = [
        f"{'fb'[kind]}{chunk}.{micro_batch}"
        for kind, chunk, micro_batch in zip(made.kind[row], made.chunk[row], made.micro_batch[row], strict=True)
    ]
    assert " ".join(letters) == ("f0.0 f0.1 f1.0 f1.1 f0.2 b1.0 f0.3 b1.1 f1.2 b0.0 f1.3 b0.1 b1.2 b1.3 b0.2 b0.3")


def test_sends_that_block_cost_more_than_sends_that_overlap() -> None:
    made = make_orders("1f1b", 4, 16)
    free, overlapped, blocking = (
        run_pipeline(made, 3.0, 6.0, send_us=send, blocking=block)
        for send, block in ((0.0, False), (0.5, False), (0.5, True))
    )
    assert free.makespan_us < overlapped.makespan_us < blocking.makespan_us
    assert not overlapped.sending_us.any()
    assert blocking.sending_us.tolist() == [8.0, 16.0, 16.0, 8.0]
    assert overlapped.makespan_us == pytest.approx(free.makespan_us + 2 * 3 * 0.5, rel=0.1)


def test_first_and_last_micro_batches_may_take_longer() -> None:
    made = make_orders("1f1b", 1, 4)
    times = run_pipeline(made, 1.0, 2.0, first_forward_us=5.0, last_backward_us=9.0)
    assert (times.end_us - times.start_us).tolist() == [5, 2, 1, 2, 1, 2, 1, 9]
    split = run_pipeline(make_orders("zb-h1", 1, 2), 1.0, 2.0, 1.0, last_backward_us=9.0)
    assert (split.end_us - split.start_us).tolist() == [1, 1, 1, 1, 1, 8]


def test_gathering_and_reducing_are_done_by_all_stages_at_once() -> None:
    made = make_orders("1f1b", 8, 16)
    usual = run_pipeline(made, 1.0, 2.0).makespan_us
    assert run_pipeline(made, 1.0, 2.0, last_backward_us=7.0).makespan_us == pytest.approx(usual + 5.0)
    assert run_pipeline(made, 1.0, 2.0, first_forward_us=6.0).makespan_us == pytest.approx(usual + 5.0)


def test_chunks_are_gathered_and_reduced_while_others_are_computed() -> None:
    made = make_orders("interleaved", 2, 8, 4)
    usual = run_pipeline(made, 1.0, 2.0).makespan_us
    behind, apart = (
        run_pipeline(made, 1.0, 2.0, first_forward_us=1.5, last_backward_us=3.5, behind=how) for how in (True, False)
    )
    assert behind.makespan_us == pytest.approx(usual + 0.5 + 1.5)
    assert apart.makespan_us == pytest.approx(usual + 4 * 0.5 + 4 * 1.5)
    assert (behind.start_us[made.offsets[:-1]] >= 0).all()


@settings(deadline=None)
@given(timed(), st.booleans())
def test_gathering_and_reducing_cost_at_least_nothing_and_at_most_their_time(
    case: tuple[Orders, dict[str, Any]], behind: bool
) -> None:
    made, times = case
    ends = {"first_forward_us": times.pop("first_forward_us"), "last_backward_us": times.pop("last_backward_us")}
    usual = run_pipeline(made, **times)
    with_ends = run_pipeline(made, **times, **ends, behind=behind)
    more = ends["first_forward_us"] - times["forward_us"] + ends["last_backward_us"] - times["backward_us"]
    assert usual.makespan_us - 1e-9 <= with_ends.makespan_us <= usual.makespan_us + more.sum() + 1e-9
    assert (with_ends.end_us >= with_ends.start_us).all()
    assert with_ends.start_us.min() >= 0.0


def test_micro_batches_may_differ() -> None:
    forward = np.arange(1.0, 5.0).reshape(1, 1, 4)
    result = run_pipeline(make_orders("gpipe", 1, 4), forward, 2.0)
    assert result.end_us.tolist() == [1, 3, 6, 10, 12, 14, 16, 18]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("interleaved", 4, 10, 2), "divisible by parallel.pp=4, not 10; take 8 micro-batches"),
        (("interleaved", 8, 3, 2), "take 8 micro-batches"),
        (("1f1b", 4, 8, 2), "take vpp=1 or interleaved"),
        (("dualpipe", 3, 8), "even number of stages, not parallel.pp=3; take pp=4"),
        (("dualpipe", 4, 6), "at least 2 x parallel.pp = 8, not 6; take 8 micro-batches"),
        (("dualpipe", 4, 11), "take 12 micro-batches"),
        (("zbv", 4, 8), "is not one of gpipe, 1f1b"),
    ],
)
def test_what_a_schedule_cannot_do_is_one_line_with_the_nearest_choice(arguments: tuple[Any, ...], line: str) -> None:
    with pytest.raises(PlanError, match=line) as caught:
        make_orders(*arguments)
    assert "\n" not in str(caught.value)


def test_wrong_times_are_named() -> None:
    made = make_orders("zb-h1", 2, 4)
    with pytest.raises(PlanError, match=r"shape \(2, 1\), not \(3, 1\)"):
        run_pipeline(made, np.ones((3, 1)), 2.0)
    with pytest.raises(PlanError, match="must not exceed"):
        run_pipeline(made, 1.0, 2.0, 3.0)


def test_a_hundred_thousand_tasks_take_linear_time() -> None:
    def seconds(micro_batches: int) -> float:
        started = time.process_time()
        run_pipeline(make_orders("interleaved", 16, micro_batches, 8), 1.0, 2.0)
        return time.process_time() - started

    seconds(16)
    assert min(seconds(512) for _ in range(3)) < 8 * min(seconds(128) for _ in range(3))
