"""Predictors as scikit-learn estimators, for simulators that accept one.

A frame of ops has one row per op: a column per dimension of the kind (choices by name or index), and optionally
``dtype`` (default bf16), ``out_dtype`` (default: dtype) and ``cache`` (default warm). :class:`OpLatencyRegressor`
answers latency in microseconds and speaks scikit-learn's protocol (parameters, tags, learned state that ends in ``_``)
without inheriting from it, so that nothing loads scikit-learn before scikit-learn is used.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets.devices import Device
from ..datasets.dtypes import canonical_dtype
from ..datasets.vocabulary import OpError, kind
from .candidates import Options
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


class OpLatencyRegressor:
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

    def score(self, frame: Any, latency_us: np.ndarray) -> float:
        """R² of the logarithms: errors are relative, and latencies span six decades."""
        from sklearn.metrics import r2_score

        return float(r2_score(np.log(latency_us), np.log(self.predict(frame))))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **parameters: Any) -> Any:
        for name, value in parameters.items():
            if name not in self.get_params():
                raise ValueError(f"OpLatencyRegressor has no parameter {name!r}; it has {', '.join(self.get_params())}")
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


def _names(ops: pd.DataFrame, column: str, default: np.ndarray) -> np.ndarray:
    if column not in ops.columns:
        return default
    return np.array([canonical_dtype(str(value)) for value in ops[column]])
