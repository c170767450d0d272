"""Interpolation: passes near its points, falls back to zero far away, and its gradient is the gradient."""

from __future__ import annotations

import numpy as np
import pytest

from opcast.models import kriging

NAMES = ("size_m", "size_n", "choice_layout", "flops", "align_m")


def table(count: int, noise: float = 0.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    m, n = rng.uniform(0, 12, (2, count))
    layout = rng.integers(0, 2, count)
    matrix = np.stack([m, n, layout, m + n, rng.integers(0, 8, count)], axis=1).astype(np.float32)
    target = 0.4 * np.sin(m / 2) + 0.2 * layout + noise * rng.standard_normal(count)
    return matrix, target - 0.1


def fitted(count: int, noise: float = 0.0) -> kriging.Kriging:
    matrix, target = table(count, noise)
    return kriging.fit(matrix, target, np.ones(count), kriging.search(matrix, NAMES, target, 150, 0))


def test_a_smooth_law_is_found_between_the_points() -> None:
    made = fitted(150, 0.01)
    matrix, target = table(400, seed=1)
    assert np.median(np.abs(made.predict(matrix) - target)) < 0.02


def test_far_from_all_data_it_says_nothing() -> None:
    made = fitted(100)
    far = np.array([[60.0, 60.0, 9.0, 120.0, 60.0]], dtype=np.float32)
    assert abs(made.predict(far)[0]) < 0.02


def test_an_outlier_bends_little() -> None:
    matrix, target = table(120, 0.01)
    scales = kriging.search(matrix, NAMES, target, 120, 0)
    clean = kriging.fit(matrix, target, np.ones(120), scales).predict(matrix)
    target[5] += 1.5
    bent = kriging.fit(matrix, target, np.ones(120), scales).predict(matrix)
    assert np.median(np.abs(bent - clean)) < 0.01
    assert abs(bent[5] - clean[5]) < 0.5


def test_the_gradient_is_the_gradient() -> None:
    matrix, target = table(40, 0.05)
    scaled = (matrix - matrix.mean(0)) / matrix.std(0)
    squares = np.stack([kriging._square_distances(part, part).ravel() for part in (scaled[:, :2], scaled[:, 2:])])
    at, start = np.log([0.2, 0.05, 0.1]), np.log([0.1, 0.1, 0.05])
    _, slope = kriging._negative_posterior(at, squares, target / target.std(), start)
    for index in range(3):
        step = np.zeros(3)
        step[index] = 1e-5
        above = kriging._negative_posterior(at + step, squares, target / target.std(), start)[0]
        below = kriging._negative_posterior(at - step, squares, target / target.std(), start)[0]
        assert slope[index] == pytest.approx((above - below) / 2e-5, rel=1e-3)


def test_columns_that_never_vary_are_left_out_and_none_may_be_left() -> None:
    matrix, target = table(30)
    matrix[:, :] = 1.0
    scales = kriging.search(matrix, NAMES, target, 30, 0)
    made = kriging.fit(matrix, target, np.ones(30), scales)
    assert len(scales.columns) == 0
    assert made.predict(matrix).tolist() == pytest.approx([target.mean()] * 30, abs=0.05)


def test_arrays_make_the_same_answer_again_in_any_batch() -> None:
    made = fitted(50)
    again = kriging.Kriging.from_arrays(made.arrays())
    matrix, _ = table(100, seed=2)
    assert again.predict(matrix).tolist() == made.predict(matrix).tolist()
    assert made.predict(matrix[:1])[0] == pytest.approx(made.predict(matrix)[0], abs=1e-12)
