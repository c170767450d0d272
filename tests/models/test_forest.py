"""Trees as arrays: the libraries' own answers, to the last bit, and no way to walk outside the arrays."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opcast.models.forest import Forest, ForestError, _float32_below, empty, from_lightgbm, from_sklearn

lightgbm = pytest.importorskip("lightgbm")
ensemble = pytest.importorskip("sklearn.ensemble")


def data(rows: int, columns: int = 12, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((rows, columns)).astype(np.float32)
    matrix[:, 1] = np.round(matrix[:, 1])  # ties: splits fall between equal values
    return matrix, np.sin(3 * matrix[:, 0]) + matrix[:, 1] * matrix[:, 2] + 0.1 * rng.standard_normal(rows)


def boosted(matrix: np.ndarray, target: np.ndarray, **parameters: object) -> lightgbm.Booster:
    options = {"objective": "regression_l1", "num_leaves": 15, "verbosity": -1, "num_threads": 1, **parameters}
    return lightgbm.train(options, lightgbm.Dataset(matrix, target), num_boost_round=30)


@pytest.fixture(scope="module")
def forest() -> Forest:
    return from_lightgbm(boosted(*data(800)))


@pytest.mark.parametrize("objective", ["regression", "regression_l1", "huber"])
@pytest.mark.parametrize("compiled", [False, True], ids=["numpy", "numba"])
def test_lightgbm_agrees_to_the_last_bit(objective: str, compiled: bool) -> None:
    if compiled:
        pytest.importorskip("numba")
    booster = boosted(*data(800), objective=objective)
    probe, _ = data(5000, seed=1)
    assert from_lightgbm(booster).predict(probe, compiled).tolist() == booster.predict(probe).tolist()


@pytest.mark.parametrize("model", ["RandomForestRegressor", "ExtraTreesRegressor"])
@pytest.mark.parametrize("compiled", [False, True], ids=["numpy", "numba"])
def test_sklearn_forests_agree_to_the_last_bit(model: str, compiled: bool) -> None:
    if compiled:
        pytest.importorskip("numba")
    fitted = getattr(ensemble, model)(n_estimators=20, random_state=0, n_jobs=1).fit(*data(500))
    probe, _ = data(3000, seed=1)
    assert from_sklearn(fitted).predict(probe, compiled).tolist() == fitted.predict(probe).tolist()


def test_the_training_rows_themselves_fall_on_the_right_side_of_their_splits() -> None:
    matrix, target = data(400)
    fitted = ensemble.RandomForestRegressor(n_estimators=5, random_state=0).fit(matrix, target)
    assert from_sklearn(fitted).predict(matrix).tolist() == fitted.predict(matrix).tolist()


@given(st.floats(-(2.0**100), 2.0**100), st.floats(-(2.0**100), 2.0**100, width=32))
@settings(max_examples=200)
def test_a_float32_threshold_asks_the_same_question(threshold: float, value: float) -> None:
    rounded = _float32_below(np.array([threshold]))[0]
    assert (np.float32(value) <= rounded) == (float(value) <= threshold)


def test_a_single_row_and_no_row(forest: Forest) -> None:
    probe, _ = data(3, seed=2)
    assert forest.predict(probe[:1]).tolist() == forest.predict(probe)[:1].tolist()
    assert forest.predict(probe[:0]).shape == (0,)
    assert empty(12).predict(probe).tolist() == [0.0, 0.0, 0.0]


def test_constant_targets_make_single_leaves() -> None:
    matrix, _ = data(200)
    booster = boosted(matrix, np.full(200, 2.5))
    assert from_lightgbm(booster).predict(matrix[:4]).tolist() == booster.predict(matrix[:4]).tolist()


def test_arrays_make_the_same_forest_again(forest: Forest) -> None:
    probe, _ = data(100, seed=3)
    assert Forest.from_arrays(forest.arrays()).predict(probe).tolist() == forest.predict(probe).tolist()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("left", lambda a: a + 100_000),
        ("left", lambda a: a * 0 - 1),
        ("feature", lambda a: a + 99),
        ("feature", lambda a: a.astype(np.int64)),
        ("threshold", lambda a: a[:-1]),
        ("roots", lambda a: a[:-1]),
        ("depths", lambda a: a[:-1]),
    ],
)
def test_arrays_that_would_lead_outside_are_refused(forest: Forest, name: str, change: object) -> None:
    arrays = forest.arrays()
    arrays[name] = change(arrays[name])  # type: ignore[operator]
    with pytest.raises(ForestError):
        Forest.from_arrays(arrays)


def test_other_columns_are_refused(forest: Forest) -> None:
    with pytest.raises(ForestError, match="12 features"):
        forest.predict(np.zeros((1, 11), dtype=np.float32))


def test_what_the_arrays_cannot_hold_is_refused() -> None:
    matrix, target = data(400)
    matrix[::3, 0] = np.nan
    with pytest.raises(ForestError, match="missing"):
        from_lightgbm(boosted(matrix, target))
    matrix, target = data(400)
    codes = np.abs(np.round(matrix))
    options = {"verbosity": -1, "min_data_per_group": 1, "cat_smooth": 0.0}
    booster = lightgbm.train(options, lightgbm.Dataset(codes, codes[:, 1] % 2, categorical_feature=[1]), 5)
    with pytest.raises(ForestError):
        from_lightgbm(booster)
    two = ensemble.RandomForestRegressor(n_estimators=2).fit(matrix, np.stack([target, target], axis=1))
    with pytest.raises(ForestError, match="one output"):
        from_sklearn(two)


def test_a_single_warm_prediction_is_well_under_a_millisecond() -> None:
    forest = from_lightgbm(boosted(*data(800), num_leaves=31, max_depth=8))
    probe, _ = data(1)
    times = []
    for _ in range(50):
        began = time.perf_counter()
        forest.predict(probe)
        times.append(time.perf_counter() - began)
    assert np.median(times) < 1e-3
