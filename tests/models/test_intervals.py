"""Intervals keep their promise on new data, and widen outside; the envelope knows inside from outside."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.models.envelope import Envelope, surround
from opcast.models.intervals import UNCALIBRATED_FACTOR, Intervals, calibrate, calibrate_grouped, quantile

NAMES = ("size_m", "size_n", "choice_layout", "dtype", "flops")


def residuals(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Heavy-tailed residuals whose spread falls with size, and sizes over five decades."""
    rng = np.random.default_rng(seed)
    size = 10 ** rng.uniform(0, 5, count)
    return rng.standard_t(3, count) * 0.2 / np.log(size + 3), size


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95])
def test_coverage_on_new_data_is_what_was_stated(coverage: float) -> None:
    held = []
    for seed in range(20):
        made = calibrate(*residuals(400, seed), np.zeros(400), coverage)
        errors, sizes = residuals(2000, 1000 + seed)
        held.append(np.mean(np.abs(errors) <= made.widths(sizes, np.zeros(len(sizes)), np.zeros(len(sizes)))))
    assert np.mean(held) == pytest.approx(coverage, abs=0.015)


def test_each_size_band_keeps_the_promise_on_its_own() -> None:
    errors, sizes = residuals(3000, 0)
    made = calibrate(errors, sizes, np.zeros(3000), 0.9)
    errors, sizes = residuals(20_000, 1)
    inside = np.abs(errors) <= made.widths(sizes, np.zeros(len(sizes)), np.zeros(len(sizes)))
    for low, high in ((1, 10), (10, 1000), (1000, 1e5)):
        band = (sizes >= low) & (sizes < high)
        assert np.mean(inside[band]) == pytest.approx(0.9, abs=0.04)
    assert made.half_width[0, 0] > 2 * made.half_width[0, -1]


@given(st.lists(st.floats(0, 10), min_size=1, max_size=60), st.floats(0.05, 0.95))
@settings(max_examples=80)
def test_the_quantile_covers_its_share_of_its_own_scores(scores: list[float], coverage: float) -> None:
    limit = quantile(np.array(scores), coverage)
    assert np.mean(np.array(scores) <= limit) >= coverage


def test_intervals_widen_outside_and_survive_storage() -> None:
    made = calibrate(*residuals(200, 0), np.zeros(200), 0.9)
    again = Intervals.from_arrays(made.arrays())
    sizes = np.array([10.0, 10.0, 10.0])
    widths = again.widths(sizes, np.array([0.0, 1.0, 1e9]), np.zeros(3))
    assert widths[1] == pytest.approx(2 * widths[0])
    assert widths[2] == pytest.approx(widths[0] + np.log(UNCALIBRATED_FACTOR))  # physics itself is off by no more
    assert widths.tolist() == made.widths(sizes, np.array([0.0, 1.0, 1e9]), np.zeros(3)).tolist()


def test_each_class_keeps_the_promise_on_its_own() -> None:
    """One pooled width would cover the precise class always and the other too rarely."""
    errors, sizes = residuals(4000, 0)
    classes = np.tile([3.0, 5.0], 2000)
    made = calibrate(np.where(classes == 3.0, 0.1, 1.0) * errors, sizes, classes, 0.9)
    errors, sizes = residuals(20_000, 1)
    for name, factor in ((3.0, 0.1), (5.0, 1.0)):
        held = np.abs(errors * factor) <= made.widths(sizes, np.zeros(len(sizes)), np.full(len(sizes), name))
        assert np.mean(held) == pytest.approx(0.9, abs=0.02)
    unknown = made.widths(sizes, np.zeros(len(sizes)), np.full(len(sizes), 4.0))
    assert (unknown > made.widths(sizes, np.zeros(len(sizes)), np.full(len(sizes), 3.0))).all()


def test_few_groups_are_believed_less() -> None:
    """Ten groups, each with an error of its own: a plain quantile covers new groups too rarely."""
    plain, grouped = [], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        group = np.repeat(np.arange(10), 40)
        errors = (0.1 * rng.standard_normal(10))[group] + 0.02 * rng.standard_normal(400)
        ones, zeros = np.ones(400), np.zeros(400)
        new = 0.1 * rng.standard_normal(300) + 0.02 * rng.standard_normal(300)
        for made, held in (
            (calibrate(errors, ones, zeros, 0.9), plain),
            (calibrate_grouped(errors, ones, zeros, group % 5, 0.9), grouped),
        ):
            assert made.coverage == 0.9
            held.append(np.mean(np.abs(new) <= made.widths(np.ones(300), np.zeros(300), np.zeros(300))))
    assert np.mean(plain) < 0.875
    assert np.mean(grouped) == pytest.approx(0.9, abs=0.025)
    assert np.mean(grouped) > np.mean(plain) + 0.01


def test_growth_is_what_the_far_end_asks_for() -> None:
    """Errors that grow by 0.3 an octave beyond the data are covered there as promised, and those inside as before."""
    rng = np.random.default_rng(0)
    made = calibrate(0.05 * rng.standard_normal(2000), np.ones(2000), np.zeros(2000), 0.9)

    def beyond(count: int) -> tuple[np.ndarray, np.ndarray]:
        octaves = rng.uniform(0.1, 3.0, count)
        return (0.05 + 0.3 * octaves) * rng.standard_normal(count), octaves

    errors, octaves = beyond(2000)
    wide = made.widened(errors, np.ones(2000), octaves, np.zeros(2000))
    errors, octaves = beyond(5000)
    ones, zeros = np.ones(5000), np.zeros(5000)
    assert np.mean(np.abs(errors) <= made.widths(ones, octaves, zeros)) < 0.6
    assert np.mean(np.abs(errors) <= wide.widths(ones, octaves, zeros)) > 0.88
    assert (wide.widths(ones, zeros, zeros) == made.widths(ones, zeros, zeros)).all()


@pytest.mark.parametrize("coverage", [0.0, 1.0, 9.0])
def test_a_coverage_that_is_no_share_is_refused(coverage: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        calibrate(np.ones(5), np.ones(5), np.ones(5), coverage)


def ops(sizes: list[tuple[float, float]], layout: float = 1.0, dtype: float = 3.0) -> np.ndarray:
    return np.array([(m, n, layout, dtype, m + n) for m, n in sizes], dtype=np.float32)


def grid() -> np.ndarray:
    """All m with all n, but not large with large: an L-shaped region that a box would fill."""
    return ops([(m, n) for m in np.arange(0, 13, 0.5) for n in np.arange(0, 13, 0.5) if min(m, n) < 5])


def test_training_ops_and_their_neighbours_are_inside() -> None:
    envelope = surround(grid(), NAMES)
    assert (envelope.excess(grid()) == 0).all()
    assert envelope.excess(ops([(3.25, 7.75)])).tolist() == [0.0]


def test_a_combination_never_seen_is_outside_though_each_size_was() -> None:
    envelope = surround(grid(), NAMES)
    corner, beyond = envelope.excess(ops([(12.0, 12.0), (16.0, 2.0)]))
    assert corner > 0.5
    assert beyond > 0.0


def test_excess_grows_with_distance() -> None:
    envelope = surround(grid(), NAMES)
    excess = envelope.excess(ops([(13.0 + step, 2.0) for step in range(1, 8)]))
    assert (np.diff(excess) > 0).all()


def test_a_code_never_seen_is_outside() -> None:
    envelope = surround(grid(), NAMES)
    assert (envelope.excess(ops([(3.0, 3.0)], layout=2.0)) > 1.0).all()
    assert (envelope.excess(ops([(3.0, 3.0)], dtype=1.0)) > 1.0).all()


def test_a_size_that_never_varied_reaches_about_an_octave() -> None:
    envelope = surround(ops([(3.0, n) for n in np.arange(0, 12, 0.5)]), NAMES)
    near, far = envelope.excess(ops([(3.1, 4.0), (6.0, 4.0)]))
    assert near == 0.0
    assert far > 1.0


def test_an_envelope_survives_storage_and_one_row() -> None:
    envelope = surround(grid()[:1], NAMES)
    again = Envelope.from_arrays(envelope.arrays())
    assert again.excess(grid()).tolist() == envelope.excess(grid()).tolist()
    assert again.excess(grid()[:1]).tolist() == [0.0]
