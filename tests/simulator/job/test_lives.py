"""Laws of lives of a job: what more interruptions, or slower checkpoints, can never do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.simulator.job.checkpoints import best_interval_s, daly_s
from opcast.simulator.job.failures import JobCause, JobEvents, JobRates, NextEvents, drawn_events
from opcast.simulator.job.lives import JobLives, live
from opcast.simulator.job.request import JobRestart, SlowSpells
from opcast.simulator.job.schedule import JobTimeline, PhaseSteps, timeline

HOUR = 3600.0
Happening = tuple[float, float, float]  # moment, seconds down, seconds held
MOMENTS = st.floats(1.0, 40 * HOUR)
HAPPENINGS = st.lists(
    st.one_of(
        st.tuples(MOMENTS, st.floats(1.0, 2 * HOUR), st.just(0.0)),
        st.tuples(MOMENTS, st.just(0.0), st.floats(1.0, HOUR)),
    ),
    max_size=12,
)


def told(happenings: Sequence[Happening]) -> NextEvents:
    """The events of one life, as they are listed; then nothing more."""
    ordered = sorted(happenings)
    gaps = np.diff([0.0, *(moment for moment, _, _ in ordered)])
    rows = iter([(gap, down, held) for gap, (_, down, held) in zip(gaps, ordered, strict=True)])

    def events(which: np.ndarray) -> JobEvents:
        gap, down, held = next(rows, (math.inf, 0.0, 0.0))
        arrays = (np.array([value]) for value in (gap, down, held))
        return JobEvents(*arrays, replaced=np.array([down > 0.0]), cause=np.zeros(1, dtype=np.int64))

    return events


def job_of(interval: int, blocking_s: float, durable_s: float = 0.0, steps: int = 1000) -> JobTimeline:
    """A job of a thousand steps of a minute."""
    return timeline([PhaseSteps(steps, 1024, 16, 60.0)], interval, False, blocking_s, durable_s)


def one_life(job: JobTimeline, happenings: Sequence[Happening], **more: float) -> JobLives:
    return live(job, np.ones(1), told(happenings), **more)


def many(rate: float, job: JobTimeline, lives: int = 500, seed: int = 0) -> JobLives:
    """Lives with so many interruptions an hour."""
    rates = JobRates((JobCause("any", rate / HOUR, replaced=True),) if rate else (), 0.0, 0.0, "test")
    restart = JobRestart(minutes=10.0, spread=0.0)
    return live(job, np.ones(lives), drawn_events(rates, restart, SlowSpells(), 0.0, 0.0, lives, seed))


@given(HAPPENINGS, st.tuples(MOMENTS, st.floats(1.0, HOUR)), st.integers(1, 400), st.floats(0, 600), st.floats(0, 900))
def test_one_more_interruption_never_ends_a_life_earlier(
    happenings: list[Happening], more: tuple[float, float], interval: int, blocking_s: float, durable_s: float
) -> None:
    job = job_of(interval, blocking_s, durable_s)
    without = one_life(job, happenings).total_s[0]
    with_one = one_life(job, [*happenings, (*more, 0.0)]).total_s[0]
    assert with_one >= without - 1e-6


@given(HAPPENINGS, st.integers(1, 400), st.floats(0, 600), st.floats(0, 900), st.floats(1.0, 5.0))
def test_more_bandwidth_of_checkpoints_never_ends_a_life_later(
    happenings: list[Happening], interval: int, blocking_s: float, durable_s: float, faster: float
) -> None:
    slow = one_life(job_of(interval, blocking_s, durable_s), happenings).total_s[0]
    fast = one_life(job_of(interval, blocking_s / faster, durable_s / faster), happenings).total_s[0]
    assert fast <= slow + 1e-6


@given(HAPPENINGS, st.integers(1, 1200), st.floats(0, 600), st.floats(0, 900), st.floats(0, 7200))
def test_parts_of_a_life_add_up(
    happenings: list[Happening], interval: int, blocking_s: float, durable_s: float, begin_s: float
) -> None:
    lived = one_life(job_of(interval, blocking_s, durable_s), happenings, begin_s=begin_s)
    parts = lived.steps_s + lived.other_s + lived.lost_s + lived.down_s + lived.held_s + lived.begin_s
    assert parts[0] == pytest.approx(lived.total_s[0], rel=1e-9)
    assert min(map(float, (lived.lost_s[0], lived.down_s[0], lived.held_s[0]))) >= -1e-6


@given(st.integers(1, 1200), st.floats(0, 600), st.integers(0, 300), st.floats(1, 600))
def test_without_interruptions_a_job_is_its_steps_and_checkpoints(
    interval: int, blocking_s: float, every: int, pause_s: float
) -> None:
    job = timeline([PhaseSteps(1000, 1024, 16, 60.0)], interval, False, blocking_s, 0.0, every, pause_s)
    checkpoints = math.ceil(1000 / interval)
    pauses = 1000 // every if every else 0
    assert job.checkpoints == checkpoints
    expected = 1000 * 60.0 + checkpoints * blocking_s + pauses * pause_s
    assert many(0.0, job, lives=3).total_s == pytest.approx([expected] * 3)


def test_a_failure_costs_the_work_since_the_last_checkpoint_and_the_restart() -> None:
    job = job_of(100, 60.0)  # 100 steps of a minute, then a minute of checkpoint
    lived = one_life(job, [(150 * 60.0, 600.0, 0.0)])
    assert lived.lost_s[0] == pytest.approx(49 * 60.0)
    assert lived.total_s[0] == pytest.approx(1000 * 60.0 + 10 * 60.0 + 49 * 60.0 + 600.0)
    late = one_life(job_of(100, 60.0, durable_s=1800.0), [(115 * 60.0, 600.0, 0.0)])
    assert late.lost_s[0] == pytest.approx(115 * 60.0), "a checkpoint that is still being written cannot be read"


def test_a_hold_loses_no_work() -> None:
    job = job_of(100, 60.0)
    assert one_life(job, [(150 * 60.0, 0.0, 900.0)]).total_s[0] == pytest.approx(job.undisturbed_s + 900.0)


def test_spares_that_are_used_up_make_a_job_wait() -> None:
    job = job_of(100, 0.0)
    hits = [(60.0 * 60, 600.0, 0.0), (120.0 * 60, 600.0, 0.0)]
    ends = [one_life(job, hits, spares=spares, repair_s=24 * HOUR).total_s[0] for spares in (0, 1, 2)]
    assert ends[0] > ends[1] > ends[2]
    assert ends[2] == one_life(job, hits).total_s[0]


def test_more_frequent_failures_lengthen_the_mean_life() -> None:
    job = job_of(30, 30.0)
    means = [many(rate, job).total_s.mean() for rate in (0.0, 0.05, 0.2, 0.8)]
    assert means == sorted(means)
    assert means[-1] > 1.1 * means[0]


def test_seeds_repeat() -> None:
    job = job_of(30, 30.0)
    once, again, other = (many(0.3, job, seed=seed) for seed in (1, 1, 2))
    assert (once.total_s == again.total_s).all()
    assert (once.total_s != other.total_s).any()


def test_a_life_that_would_not_end_is_given_up() -> None:
    lived = many(3.0, job_of(1000, 0.0), lives=20)
    assert lived.given_up.all()


@pytest.mark.parametrize(("cost_s", "mean_h"), [(60.0, 12.0), (300.0, 24.0), (20.0, 3.0)])
def test_the_best_interval_is_near_dalys(cost_s: float, mean_h: float) -> None:
    daly = daly_s(cost_s, mean_h * HOUR)
    phases = [PhaseSteps(60_000, 1024, 16, 10.0)]

    def mean_s(interval_s: float) -> float:
        return float(many(1.0 / mean_h, timeline(phases, interval_s, True, cost_s, 0.0), lives=400).total_s.mean())

    best = best_interval_s(daly, 600_000.0, mean_s)
    assert daly / 1.5 <= best <= 1.5 * daly
    assert mean_s(daly) <= 1.003 * mean_s(best)


def test_daly_is_youngs_where_checkpoints_cost_little() -> None:
    assert daly_s(1.0, 1e8) == pytest.approx(math.sqrt(2e8), rel=1e-3)
    assert daly_s(10.0, 4.0) == 4.0
