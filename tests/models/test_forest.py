"""Trees as arrays: the libraries' own answers but for float16 leaves, to the last bit, and no way to walk outside."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.models.forest import Forest, ForestError, empty, joined, packed
from opcast.models.trees import _float32_below, from_lightgbm, from_sklearn


def data(rows: int, columns: int = 12, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((rows, columns)).astype(np.float32)
    matrix[:, 1] = np.round(matrix[:, 1])  # ties: splits fall between equal values
    return matrix, np.sin(3 * matrix[:, 0]) + matrix[:, 1] * matrix[:, 2] + 0.1 * rng.standard_normal(rows)


def boosted(matrix: np.ndarray, target: np.ndarray, **parameters: object) -> Any:
    import lightgbm

    options = {"objective": "regression_l1", "num_leaves": 15, "verbosity": -1, "num_threads": 1, **parameters}
    return lightgbm.train(options, lightgbm.Dataset(matrix, target), num_boost_round=30)


@pytest.fixture(scope="module")
def forest() -> Forest:
    return from_lightgbm(boosted(*data(800)))


def rounded(booster: Any) -> Any:
    """The same booster with leaves as a forest keeps them."""
    for tree, info in enumerate(booster.dump_model()["tree_info"]):
        for leaf in range(info["num_leaves"]):
            booster.set_leaf_output(tree, leaf, float(np.float16(booster.get_leaf_output(tree, leaf))))
    return booster


@pytest.mark.parametrize("objective", ["regression", "regression_l1", "huber"])
@pytest.mark.parametrize("compiled", [False, True], ids=["numpy", "numba"])
def test_lightgbm_agrees_to_the_last_bit_but_for_its_leaves(objective: str, compiled: bool) -> None:
    if compiled:
        pytest.importorskip("numba")
    booster = boosted(*data(800), objective=objective)
    probe, _ = data(5000, seed=1)
    made = from_lightgbm(booster).predict(probe, compiled)
    assert made == pytest.approx(booster.predict(probe), abs=30 * 2.0**-12)
    assert made.tolist() == rounded(booster).predict(probe).tolist()


@pytest.mark.parametrize("model", ["RandomForestRegressor", "ExtraTreesRegressor"])
@pytest.mark.parametrize("compiled", [False, True], ids=["numpy", "numba"])
def test_sklearn_forests_agree_to_the_last_bit_but_for_their_leaves(model: str, compiled: bool) -> None:
    if compiled:
        pytest.importorskip("numba")
    from sklearn import ensemble

    fitted = getattr(ensemble, model)(n_estimators=20, random_state=0, n_jobs=1).fit(*data(500))
    probe, _ = data(3000, seed=1)
    leaves = [tree.tree_.value[tree.apply(probe), 0, 0] for tree in fitted.estimators_]
    expected = sum(np.float16(values / 20.0).astype(np.float64) for values in leaves)
    made = from_sklearn(fitted).predict(probe, compiled)
    assert made.tolist() == expected.tolist()
    assert made == pytest.approx(fitted.predict(probe), rel=1e-3, abs=1e-3)


def test_the_training_rows_themselves_fall_on_the_right_side_of_their_splits() -> None:
    from sklearn import ensemble

    matrix, target = data(400)
    fitted = ensemble.RandomForestRegressor(n_estimators=1, bootstrap=False, max_features=1.0).fit(matrix, target)
    assert from_sklearn(fitted).predict(matrix).tolist() == np.float16(target).tolist()


@given(leaves=st.integers(2, 400), trees=st.integers(1, 6), columns=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_both_ways_through_any_forest_agree(leaves: int, trees: int, columns: int, seed: int) -> None:
    """Random shapes of trees, bytes and longer codes, chains included."""
    pytest.importorskip("numba")
    rng = np.random.default_rng(seed)
    inner = np.concatenate([random_tree(leaves, rng) for _ in range(trees)])
    splits = int(inner.sum())
    feature = rng.integers(0, columns, splits)
    threshold = rng.integers(-9, 9, splits).astype(np.float32)
    forest = packed(inner, feature, threshold, rng.standard_normal(len(inner) - splits), columns)
    probe = rng.integers(-10, 10, (700, columns)).astype(np.float32)
    assert forest.predict(probe, True).tolist() == forest.predict(probe, False).tolist()
    assert forest.predict(probe[:40], False).tolist() == [by_hand(forest, row) for row in probe[:40]]


def random_tree(leaves: int, rng: np.random.Generator) -> np.ndarray:
    """Bits of a tree in pre-order: leaves split at random into a left and a right share, often all but one."""
    if leaves == 1:
        return np.zeros(1, dtype=bool)
    left = 1 if leaves > 60 or rng.random() < 0.3 else int(rng.integers(1, leaves))
    if leaves > 60 and rng.random() < 0.5:
        left = leaves // 2
    return np.concatenate([[True], random_tree(left, rng), random_tree(leaves - left, rng)])


def by_hand(forest: Forest, row: np.ndarray) -> float:
    """The definition, one node after another."""
    total, node, split, leaf = 0.0, 0, 0, 0

    def walk(taken: bool) -> None:
        nonlocal total, node, split, leaf
        node += 1
        if not forest.inner[node - 1]:
            total += float(forest.leaf[leaf]) if taken else 0.0
            leaf += 1
            return
        above = row[forest.feature[split]] > forest.split_threshold[split]
        split += 1
        walk(taken and not above)
        walk(taken and bool(above))

    for _ in range(forest.trees):
        walk(True)
    return total


def test_codes_beyond_a_byte() -> None:
    from sklearn import ensemble

    pytest.importorskip("numba")
    matrix, target = data(3000)
    fitted = ensemble.RandomForestRegressor(n_estimators=3, random_state=0).fit(matrix, target)
    forest = from_sklearn(fitted)
    assert forest.cut.dtype == np.uint16
    probe, _ = data(600, seed=1)
    assert forest.predict(probe, True).tolist() == forest.predict(probe, False).tolist()


def test_joined_forests_add_up(forest: Forest) -> None:
    other = from_lightgbm(boosted(*data(800, seed=5), num_leaves=7))
    probe, _ = data(200, seed=3)
    both = joined(forest, other)
    assert both.trees == forest.trees + other.trees
    assert both.predict(probe) == pytest.approx(forest.predict(probe) + other.predict(probe), abs=1e-12)
    with pytest.raises(ForestError, match="12 and 3 features"):
        joined(forest, empty(3))


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
    assert from_lightgbm(booster).predict(matrix[:4]).tolist() == [2.5] * 4
    assert from_lightgbm(booster).predict(np.tile(matrix, (4, 1)), True).tolist() == [2.5] * 800


def test_arrays_make_the_same_forest_again(forest: Forest) -> None:
    probe, _ = data(100, seed=3)
    assert Forest.from_arrays(forest.arrays()).predict(probe).tolist() == forest.predict(probe).tolist()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("splits", lambda a: a ^ 1),
        ("splits", lambda a: a[:-1]),
        ("splits", lambda a: ~a),
        ("feature", lambda a: a + 99),
        ("feature", lambda a: a.astype(np.int64)),
        ("cut", lambda a: a + np.uint8(100)),
        ("cut", lambda a: a[:-1]),
        ("leaf", lambda a: a[:-1]),
        ("leaf", lambda a: a * np.float16(np.inf)),
        ("threshold", lambda a: a[::-1].copy()),
        ("threshold", lambda a: a[:-1]),
        ("starts", lambda a: a[:-1]),
        ("starts", lambda a: -a),
    ],
)
def test_arrays_that_would_lead_outside_are_refused(forest: Forest, name: str, change: object) -> None:
    arrays = forest.arrays()
    arrays[name] = change(arrays[name])  # type: ignore[operator]
    with pytest.raises(ForestError):
        Forest.from_arrays(arrays)


def test_a_forest_is_small(forest: Forest) -> None:
    splits = len(forest.feature)
    assert sum(each.nbytes for each in forest.arrays().values()) < 8.5 * splits


def test_leaves_beyond_float16_are_refused() -> None:
    with pytest.raises(ForestError, match="beyond what a forest holds"):
        packed(np.zeros(1, bool), np.zeros(0, int), np.zeros(0, np.float32), np.array([1e6]), 2)


def test_other_columns_are_refused(forest: Forest) -> None:
    with pytest.raises(ForestError, match="12 features"):
        forest.predict(np.zeros((1, 11), dtype=np.float32))


def test_what_the_arrays_cannot_hold_is_refused() -> None:
    import lightgbm
    from sklearn import ensemble

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
        began = time.process_time()
        forest.predict(probe)
        times.append(time.process_time() - began)
    assert np.median(times) < 1e-3
