"""The loader that MLflow calls for a registered predictor: ``load_model("models:/opcast-gemm@h100_sxm")``.

An MLflow model holds the predictor's own folder and the name of this module; nothing in it is pickled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .estimator import predict_frame
from .predictor import Predictor, load

if TYPE_CHECKING:
    import pandas as pd


class LoadedPredictor:
    """What MLflow wraps: ``predict`` takes a frame of ops as in :mod:`.estimator` and returns latencies in us."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        return predict_frame(self.predictor, model_input)


def _load_pyfunc(data_path: str) -> LoadedPredictor:
    return LoadedPredictor(load(data_path))
