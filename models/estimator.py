"""Predictors as scikit-learn estimators, for simulators that accept one: over ops, or over features of ops.

A frame of ops has one row per op: a column per dimension of the kind (choices by name or index), and optionally
``dtype`` (default bf16), ``out_dtype`` (default: dtype) and ``cache`` (default warm); :class:`OpLatencyRegressor`
takes it. A frame of features has the columns of :func:`.features.feature_names`, which docs/predictors.md explains;
:func:`feature_frame` makes one of the other, and :class:`FeatureRegressor` takes it. Both answer latency in
microseconds and speak scikit-learn's protocol (parameters, tags, learned state that ends in ``_``) without inheriting
from it, so that nothing loads scikit-learn before scikit-learn is used.
"""

from __future__ import annotations

import abc
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets.devices import Device
from ..datasets.dtypes import canonical_dtype
from ..datasets.vocabulary import OpError, kind
from .candidates import Options, Task
from .correction import Correction
from .features import feature_names
from .learning import best, weigh
from .predictor import Predictor
from .training import MeasurementTable, fit

if TYPE_CHECKING:
    import pandas as pd


def predict_frame(predictor: Predictor, ops: pd.DataFrame) -> pd.DataFrame:
    """Columns ``latency_us``, ``low_us``, ``high_us``, ``in_envelope`` for a frame of ops, on its index.

    OpError names a dimension that is missing or malformed.
    """
    import pandas as pd

    columns, dtype, out_dtype, cache = ops_of_frame(predictor.kind, ops)
    keys = np.stack([dtype, out_dtype, cache], axis=1)
    unique, codes = np.unique(keys, axis=0, return_inverse=True)
    out = {name: np.empty(len(ops)) for name in ("latency_us", "low_us", "high_us")}
    out["in_envelope"] = np.empty(len(ops), dtype=bool)
    for index, (each_dtype, each_out, each_cache) in enumerate(unique):
        rows = np.flatnonzero(codes.reshape(-1) == index)
        chunk = {name: values[rows] for name, values in columns.items()}
        prediction = predictor.predict(chunk, str(each_dtype), str(each_out), cache=str(each_cache))
        for name, values in out.items():
            values[rows] = getattr(prediction, name)
    return pd.DataFrame(out, index=ops.index)


def ops_of_frame(kind_name: str, ops: pd.DataFrame) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
    """Dims as int64 columns, then dtype, out_dtype and cache [n], of a frame of ops."""
    columns = {}
    for dim in kind(kind_name).dims:
        if dim.name not in ops.columns and dim.default is None:
            raise OpError(
                f"the frame lacks column {dim.name!r} of {kind_name}; it has {', '.join(map(str, ops.columns))}"
            )
        values = ops[dim.name] if dim.name in ops.columns else [dim.default] * len(ops)
        columns[dim.name] = np.array([dim.parse(kind_name, value) for value in values], dtype=np.int64)
    dtype = _names(ops, "dtype", np.full(len(ops), "bf16"))
    usual = {name: kind(kind_name).usual_output(str(name)) for name in np.unique(dtype)}
    out_dtype = _names(ops, "out_dtype", np.array([usual[name] for name in dtype]))
    cache = np.asarray(ops["cache"] if "cache" in ops.columns else ["warm"] * len(ops)).astype(str)
    return columns, dtype, out_dtype, cache


def feature_frame(kind_name: str, ops: pd.DataFrame, device: Device) -> pd.DataFrame:
    """The features of a frame of ops [n] on a device: float32 columns :func:`.features.feature_names`, on its index."""
    import pandas as pd

    columns, dtype, out_dtype, cache = ops_of_frame(kind_name, ops)
    table = MeasurementTable(kind_name, device, "frame", columns, dtype, out_dtype, cache, np.ones(len(ops)))
    return pd.DataFrame(table.frame().matrix, index=ops.index, columns=list(feature_names(kind_name)))


class _Regressor(abc.ABC):
    """What both estimators share of scikit-learn's protocol."""

    @abc.abstractmethod
    def predict(self, frame: Any) -> np.ndarray:
        """Latencies in us [n] of a frame of n rows."""

    def score(self, frame: Any, latency_us: np.ndarray) -> float:
        """R² of the logarithms: errors are relative, and latencies span six decades."""
        from sklearn.metrics import r2_score

        return float(r2_score(np.log(latency_us), np.log(self.predict(frame))))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **parameters: Any) -> Any:
        for name, value in parameters.items():
            if name not in self.get_params():
                title = type(self).__name__
                raise ValueError(f"{title} has no parameter {name!r}; it has {', '.join(self.get_params())}")
            setattr(self, name, value)
        return self

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import InputTags, RegressorTags, Tags, TargetTags

        return Tags(
            estimator_type="regressor",
            target_tags=TargetTags(required=True, positive_only=True),
            regressor_tags=RegressorTags(),
            input_tags=InputTags(string=True),
        )


class OpLatencyRegressor(_Regressor):
    """A regressor of one op kind on one device: ``fit(ops, latency_us)``, ``predict(ops)``."""

    def __init__(self, kind: str, device: Device, options: Options | None = None) -> None:
        self.kind = kind
        self.device = device
        self.options = options

    @classmethod
    def of(cls, predictor: Predictor) -> OpLatencyRegressor:
        """A fitted regressor that answers as a trained predictor does."""
        regressor = cls(predictor.kind, predictor.device)
        regressor.predictor_ = predictor
        return regressor

    def fit(self, frame: pd.DataFrame, latency_us: np.ndarray) -> OpLatencyRegressor:
        """Train on a frame of ops [n] and their latencies in us [n]; what was learned before is forgotten."""
        columns, dtype, out_dtype, cache = ops_of_frame(self.kind, frame)
        latency = np.asarray(latency_us, dtype=np.float64)
        table = MeasurementTable(self.kind, self.device, "frame", columns, dtype, out_dtype, cache, latency)
        self.predictor_ = fit(table, self.options).predictor
        return self

    def predict(self, frame: pd.DataFrame) -> np.ndarray:
        """Latencies in us [n] of a frame of ops."""
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self)
        return np.asarray(predict_frame(self.predictor_, frame)["latency_us"])


class FeatureRegressor(_Regressor):
    """A regressor of one op kind over its features: ``fit(features, latency_us)``, ``predict(features)``.

    ``features`` is a frame with the columns of :func:`.features.feature_names`, in any order, or an array [n, f] in
    theirs. Any device's ops may stand in it, since the device is among the features.
    """

    def __init__(self, kind: str, options: Options | None = None) -> None:
        self.kind = kind
        self.options = options

    @classmethod
    def of(cls, predictor: Predictor) -> FeatureRegressor:
        """A fitted regressor that answers as a trained predictor does."""
        return cls(predictor.kind)._learned(predictor.correction)

    def fit(self, frame: Any, latency_us: np.ndarray, groups: np.ndarray | None = None) -> FeatureRegressor:
        """Train on features [n, f] and latencies in us [n]; ``groups`` [n] of whole numbers are held out together.

        ValueError names a column that is missing, or what is wrong with the latencies.
        """
        matrix, latency = self._matrix(frame), np.asarray(latency_us, dtype=np.float64)
        if latency.shape != (len(matrix),) or not (latency > 0).all():
            raise ValueError(f"latency_us must hold {len(matrix)} positive numbers, one for each row")
        options = (self.options or Options()).for_kind(self.kind)
        analytical = self._analytical(matrix)
        target, weights = np.log(latency / analytical), weigh(analytical, options.weight_power)
        task = Task(feature_names(self.kind), matrix, target, weights, options.seed)
        return self._learned(best(task, np.arange(len(matrix)) if groups is None else np.asarray(groups), options))

    def predict(self, frame: Any) -> np.ndarray:
        """Latencies in us [n] of features [n, f]."""
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self)
        matrix = self._matrix(frame)
        return self._analytical(matrix) * np.exp(self.correction_.predict(matrix))

    def _learned(self, correction: Correction) -> FeatureRegressor:
        self.correction_ = correction
        self.feature_names_in_ = np.array(feature_names(self.kind), dtype=object)
        self.n_features_in_ = len(self.feature_names_in_)
        return self

    def _analytical(self, matrix: np.ndarray) -> np.ndarray:
        return np.exp2(matrix[:, feature_names(self.kind).index("analytical")].astype(np.float64))

    def _matrix(self, frame: Any) -> np.ndarray:
        names = feature_names(self.kind)
        if hasattr(frame, "columns"):
            missing = [name for name in names if name not in frame.columns]
            if missing:
                raise OpError(f"the frame lacks feature {missing[0]!r} of {self.kind}; docs/predictors.md lists them")
            frame = frame[list(names)].to_numpy()
        matrix = np.asarray(frame, dtype=np.float32)
        if matrix.ndim != 2 or matrix.shape[1] != len(names):
            raise OpError(f"features of {self.kind} have {len(names)} columns, not the shape {matrix.shape}")
        return np.ascontiguousarray(matrix)


def _names(ops: pd.DataFrame, column: str, default: np.ndarray) -> np.ndarray:
    if column not in ops.columns:
        return default
    return np.array([canonical_dtype(str(value)) for value in ops[column]])
