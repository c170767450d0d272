"""What MLflow knows of a predictor: its loader, its signature and an example of its input.

``load_model("models:/opcast-gemm@h100_sxm")`` calls the loader: an MLflow model holds the predictor's own folder and
the name of this module; nothing in it is pickled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..datasets.vocabulary import kind
from .estimator import predict_frame
from .predictor import Predictor, load
from .table import MeasurementTable

if TYPE_CHECKING:
    import pandas as pd
    from mlflow.models import ModelSignature

NAMES = ("dtype", "out_dtype", "cache")  # columns of text, each with a default
SHOWN = 3  # rows of an example


class LoadedPredictor:
    """What MLflow wraps: ``predict`` takes a frame of ops as in :mod:`.estimator` and returns latencies in us."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        return predict_frame(self.predictor, model_input)


def _load_pyfunc(data_path: str) -> LoadedPredictor:
    return LoadedPredictor(load(data_path))


def signature_of(kind_name: str) -> ModelSignature:
    """The columns of a frame of ops and of its answer. A dim with choices takes a name or its number."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema
    from mlflow.types.schema import AnyType

    dims = [
        ColSpec(AnyType() if dim.choices else "long", dim.name, required=dim.default is None)
        for dim in kind(kind_name).dims
    ]
    names = [ColSpec("string", name, required=False) for name in NAMES]
    answer = [ColSpec("double", name) for name in ("latency_us", "low_us", "high_us")]
    return ModelSignature(Schema([*dims, *names]), Schema([*answer, ColSpec("boolean", "in_envelope")]))


def example_of(table: MeasurementTable) -> pd.DataFrame:
    """Some of the ops that a predictor was trained on, as its input."""
    import pandas as pd

    some = range(min(SHOWN, len(table)))
    columns: dict[str, list[Any]] = {}
    for dim in kind(table.kind).dims:
        numbers = [int(table.columns[dim.name][row]) for row in some]
        columns[dim.name] = [dim.choices[number] for number in numbers] if dim.choices else numbers
    return pd.DataFrame({**columns, **{name: [str(getattr(table, name)[row]) for row in some] for name in NAMES}})
