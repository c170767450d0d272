"""Predictors as scikit-learn estimators over a documented frame of ops, for simulators that accept one.

A frame has one row per op: a column per dimension of the kind (choices by name or index), and optionally ``dtype``
(default bf16), ``out_dtype`` (default: dtype) and ``cache`` (default warm). The answer is latency in microseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets.devices import Device
from ..datasets.dtypes import canonical_dtype
from ..datasets.vocabulary import OpError, kind
from .candidates import Options
from .predictor import Predictor
from .training import Table, fit

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
        part = {name: values[rows] for name, values in columns.items()}
        made = predictor.predict(part, str(each_dtype), str(each_out), cache=str(each_cache))
        for name, values in out.items():
            values[rows] = getattr(made, name)
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
    out_dtype = _names(ops, "out_dtype", dtype)
    cache = np.asarray(ops["cache"] if "cache" in ops.columns else ["warm"] * len(ops)).astype(str)
    return columns, dtype, out_dtype, cache


class OpLatencyRegressor:
    """A scikit-learn regressor of one op kind on one device: ``fit(frame, latency_us)``, ``predict(frame)``.

    It speaks scikit-learn's protocol (parameters, tags, ``predictor_`` once fitted) without inheriting from it, so
    that nothing loads scikit-learn before scikit-learn is used; clone, pipelines and cross-validation take it.
    """

    def __init__(self, kind: str, device: Device, options: Options | None = None) -> None:
        self.kind = kind
        self.device = device
        self.options = options

    @classmethod
    def of(cls, predictor: Predictor) -> OpLatencyRegressor:
        """A fitted regressor that answers as a trained predictor does."""
        made = cls(predictor.kind, predictor.device)
        made.predictor_ = predictor
        return made

    def fit(self, frame: pd.DataFrame, latency_us: np.ndarray) -> OpLatencyRegressor:
        """Train on a frame of ops [n] and their latencies in us [n]; what was learned before is forgotten."""
        columns, dtype, out_dtype, cache = ops_of_frame(self.kind, frame)
        latency = np.asarray(latency_us, dtype=np.float64)
        table = Table(self.kind, self.device, "frame", columns, dtype, out_dtype, cache, latency)
        self.predictor_ = fit(table, self.options).predictor
        return self

    def predict(self, frame: pd.DataFrame) -> np.ndarray:
        """Latencies in us [n] of a frame of ops."""
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self)
        return np.asarray(predict_frame(self.predictor_, frame)["latency_us"])

    def score(self, frame: pd.DataFrame, latency_us: np.ndarray) -> float:
        """R² of the logarithms: errors are relative, and latencies span six decades."""
        from sklearn.metrics import r2_score

        return float(r2_score(np.log(latency_us), np.log(self.predict(frame))))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {"kind": self.kind, "device": self.device, "options": self.options}

    def set_params(self, **parameters: Any) -> OpLatencyRegressor:
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
