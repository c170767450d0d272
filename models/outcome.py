"""What training gives: a predictor, and what it answered to rows that it had not seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .candidates import Options
from .learning import Learned
from .predictor import Predictor
from .table import MeasurementTable


@dataclass(frozen=True, eq=False)
class TrainingOutcome:
    """A trained predictor with its evaluation.

    ``held_out_us`` [s] are the answers to rows ``held_out`` of models that had not seen them; ``options`` are those
    of the kind, with what a search found. ``learned`` is what the rows taught by themselves.
    """

    predictor: Predictor
    table: MeasurementTable
    held_out: np.ndarray
    held_out_us: np.ndarray
    result: Mapping[str, Any]
    options: Options
    learned: Learned
