"""Predictors as scikit-learn estimators: its protocol, its tools, our answers."""

from __future__ import annotations

import pickle

import numpy as np
import pandas
import pyarrow as pa
import pytest

from opcast.datasets.devices import Device
from opcast.datasets.ops import OpError
from opcast.models.candidates import Options
from opcast.models.estimator import OpLatencyRegressor, predict_frame
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
