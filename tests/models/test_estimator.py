"""Predictors as scikit-learn estimators: its protocol, its tools, our answers."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pandas
import pyarrow as pa
import pytest

from opcast.datasets.devices import Device
from opcast.datasets.ops import OpError
from opcast.models.candidates import Options
from opcast.models.estimator import FeatureRegressor, OpLatencyRegressor, feature_frame, predict_frame
from opcast.models.features import feature_names
from opcast.models.training import TrainingOutcome


@pytest.fixture
def frame(rows: pa.Table) -> tuple[pandas.DataFrame, np.ndarray]:
    ops = rows.to_pandas()
    return ops.drop(columns="latency_us"), ops["latency_us"].to_numpy()


def test_a_trained_predictor_answers_through_it(
    outcome: TrainingOutcome, frame: tuple[pandas.DataFrame, np.ndarray]
) -> None:
    ops, latency = frame
    estimator = OpLatencyRegressor.of(outcome.predictor)
    answers = estimator.predict(ops)
    assert answers.tolist() == predict_frame(outcome.predictor, ops)["latency_us"].tolist()
    assert np.median(np.abs(answers / latency - 1)) < 0.05
    assert estimator.score(ops, latency) > 0.95


def test_choices_may_be_named_and_defaults_left_out(outcome: TrainingOutcome) -> None:
    named = pandas.DataFrame({"m": [64], "n": [1024], "k": [1024], "layout": ["nt"], "dtype": ["float32"]})
    plain = pandas.DataFrame({"m": [64], "n": [1024], "k": [1024], "dtype": ["fp32"]})
    assert predict_frame(outcome.predictor, named).equals(predict_frame(outcome.predictor, plain))
    with pytest.raises(OpError, match="lacks column 'k'"):
        predict_frame(outcome.predictor, plain.drop(columns="k"))


def test_scikit_learns_own_tools_take_it(
    cpu: Device, fast: Options, frame: tuple[pandas.DataFrame, np.ndarray]
) -> None:
    from sklearn.base import clone, is_regressor
    from sklearn.exceptions import NotFittedError
    from sklearn.model_selection import cross_val_score

    ops, latency = frame
    estimator = OpLatencyRegressor("gemm", cpu, fast)
    assert is_regressor(estimator)
    assert clone(estimator).get_params() == estimator.get_params()
    with pytest.raises(NotFittedError):
        estimator.predict(ops)
    assert cross_val_score(estimator, ops, latency, cv=2, error_score="raise").min() > 0.9
    with pytest.raises(ValueError, match="no parameter 'depth'"):
        estimator.set_params(depth=3)


def test_a_fitted_estimator_travels_between_processes(
    outcome: TrainingOutcome, frame: tuple[pandas.DataFrame, np.ndarray]
) -> None:
    estimator = OpLatencyRegressor.of(outcome.predictor)
    again = pickle.loads(pickle.dumps(estimator))
    assert again.predict(frame[0]).tolist() == estimator.predict(frame[0]).tolist()


@pytest.fixture
def described(cpu: Device, frame: tuple[pandas.DataFrame, np.ndarray]) -> pandas.DataFrame:
    return feature_frame("gemm", frame[0], cpu)


def test_the_documented_features_are_enough_to_answer(
    outcome: TrainingOutcome, frame: tuple[pandas.DataFrame, np.ndarray], described: pandas.DataFrame
) -> None:
    estimator = FeatureRegressor.of(outcome.predictor)
    answers = estimator.predict(described)
    assert answers == pytest.approx(predict_frame(outcome.predictor, frame[0])["latency_us"].to_numpy(), rel=1e-5)
    assert estimator.predict(described[described.columns[::-1]]).tolist() == answers.tolist()
    assert estimator.predict(described.to_numpy()).tolist() == answers.tolist()
    assert estimator.feature_names_in_.tolist() == list(feature_names("gemm"))
    assert estimator.n_features_in_ == described.shape[1]


def test_a_feature_regressor_follows_the_protocol(
    fast: Options, frame: tuple[pandas.DataFrame, np.ndarray], described: pandas.DataFrame
) -> None:
    """What scikit-learn's check_estimator asks and a fixed list of columns allows."""
    from sklearn.base import clone, is_regressor
    from sklearn.exceptions import NotFittedError
    from sklearn.model_selection import GroupKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    latency = frame[1]
    estimator = FeatureRegressor("gemm", dataclasses.replace(fast, candidates=("calibrated", "lightgbm")))
    before = estimator.get_params()
    assert is_regressor(estimator)
    with pytest.raises(NotFittedError):
        estimator.predict(described)
    assert estimator.fit(described, latency) is estimator
    assert estimator.get_params() == before
    first = estimator.predict(described)
    again = clone(estimator).fit(described, latency)
    assert again.predict(described).tolist() == first.tolist()
    order = np.random.default_rng(0).permutation(len(latency))
    assert estimator.predict(described.iloc[order]).tolist() == first[order].tolist()
    assert np.concatenate([estimator.predict(described.iloc[[row]]) for row in range(5)]).tolist() == first[:5].tolist()
    other = again.fit(described, 2.0 * latency).predict(described)
    assert np.median(other / first) == pytest.approx(2.0, rel=0.01)
    assert pickle.loads(pickle.dumps(estimator)).predict(described).tolist() == first.tolist()
    assert (
        make_pipeline(FunctionTransformer(), clone(estimator)).fit(described, latency).score(described, latency) > 0.9
    )
    sites = frame[0]["n"].to_numpy() * 10_000 + frame[0]["k"].to_numpy()
    scores = cross_val_score(estimator, described, latency, groups=sites, cv=GroupKFold(2), error_score="raise")
    assert scores.min() > 0.9
    with pytest.raises(ValueError, match="FeatureRegressor has no parameter 'device'"):
        estimator.set_params(device=None)


def test_features_that_do_not_fit_are_named(outcome: TrainingOutcome, described: pandas.DataFrame) -> None:
    estimator = FeatureRegressor.of(outcome.predictor)
    with pytest.raises(OpError, match="lacks feature 'size_k' of gemm"):
        estimator.predict(described.drop(columns="size_k"))
    with pytest.raises(OpError, match=r"columns, not the shape \(3, 2\)"):
        estimator.predict(np.ones((3, 2)))
    with pytest.raises(ValueError, match="must hold 240 positive numbers"):
        estimator.fit(described, np.zeros(len(described)))
