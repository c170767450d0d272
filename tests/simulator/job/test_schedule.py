"""Phases of a job, its ramp, and where its checkpoints stand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.simulator.job.request import BatchRamp, JobPhase
from opcast.simulator.job.schedule import PhaseSteps, phase_steps, timeline
from opcast.simulator.question.canonical import RequestError

NONE = BatchRamp()


def test_a_phase_is_what_the_others_leave() -> None:
    phases = (JobPhase(tokens=1e9, seq_len=1024), JobPhase(seq_len=4096, global_batch=8))
    first, last = phase_steps(phases, NONE, 3e9, None, 2048, 16)
    assert (first.seq_len, first.sequences, first.steps) == (1024, 16, -(-(10**9) // (1024 * 16)))
    assert (last.seq_len, last.sequences) == (4096, 8)
    assert 3e9 <= first.tokens + last.tokens < 3e9 + 4096 * 8
    with pytest.raises(RequestError, match="tokens=5e\\+08 is not more than the phases"):
        phase_steps(phases, NONE, 5e8, None, 2048, 16)


def test_a_ramp_is_megatrons() -> None:
    """BLOOM's first plan: 16 to 2048 by 16 over 9,765,625 samples; 4,805 steps of 16 (bigscience, tr11 README)."""
    made = phase_steps((), BatchRamp(16, 16, 9_765_625), 366e9, None, 2048, 2048)
    assert len(made) == 128
    assert [each.sequences for each in (made[0], made[1], made[-1])] == [16, 32, 2048]
    assert made[0].steps == pytest.approx(4805, abs=2)
    assert sum(each.tokens for each in made[:-1]) == pytest.approx(20e9, rel=0.01)
    with pytest.raises(RequestError, match="does not lead to the batch of 2048"):
        phase_steps((), BatchRamp(16, 100, 1000), 366e9, None, 2048, 2048)


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0.5, 30.0)), min_size=1, max_size=5), st.integers(1, 300))
def test_checkpoints_stand_where_they_are_due(phases: list[tuple[int, float]], interval: int) -> None:
    made = [PhaseSteps(steps, 128, 4, step_s) for steps, step_s in phases]
    job = timeline(made, interval, False, 7.0, 0.0)
    total = sum(steps for steps, _ in phases)
    assert job.steps[-1] == total
    assert (np.diff(job.steps)[:-1] == interval).all()
    assert job.steps_s[-1] == pytest.approx(sum(steps * step_s for steps, step_s in phases))
    assert job.tokens[-1] == total * 128 * 4


def test_a_slow_store_holds_up_the_next_checkpoint() -> None:
    job = timeline([PhaseSteps(100, 128, 4, 10.0)], 10, False, 0.0, 150.0)
    assert job.undisturbed_s == pytest.approx(1000.0 + 9 * 50.0 + 150.0)


def test_no_evaluation_comes_in_a_job_that_is_shorter() -> None:
    job = timeline([PhaseSteps(100, 128, 4, 1.0)], 10, False, 0.0, 0.0, evaluation_every=10**30, evaluation_s=5.0)
    assert job.undisturbed_s == 100.0


def test_too_many_checkpoints_are_refused() -> None:
    with pytest.raises(RequestError, match="save less often"):
        timeline([PhaseSteps(3_000_000, 128, 4, 1.0)], 1, False, 0.0, 0.0)


def test_time_of_an_evaluation_is_time_in_which_a_checkpoint_is_written() -> None:
    job = timeline([PhaseSteps(100, 128, 4, 10.0)], 10, False, 2.0, 150.0, evaluation_every=10, evaluation_s=30.0)
    assert job.evaluation_s == 300.0
    assert job.waits_s == pytest.approx(10 * 2.0 + 9 * 20.0 + 150.0)  # 150 s to write, 100 + 30 s until the next is due
    assert job.undisturbed_s == pytest.approx(1000.0 + job.evaluation_s + job.waits_s)
