"""Tables of published results: one row is one run with what is needed to simulate it, and what was measured.

Others use :func:`read_table`, the rows it returns, :func:`.dimensions.dimensions_of` and :class:`TruthError`.
"""

from .rows import (
    DecodeWorkers,
    FailedRow,
    Hardware,
    InferenceRow,
    NetworkRow,
    OperatorRow,
    PublishedLayout,
    Row,
    ServingRow,
    TrainingRow,
    TruthError,
    TruthTable,
    UnsupportedRow,
)
from .tables import read_table

__all__ = [
    "DecodeWorkers",
    "FailedRow",
    "Hardware",
    "InferenceRow",
    "NetworkRow",
    "OperatorRow",
    "PublishedLayout",
    "Row",
    "ServingRow",
    "TrainingRow",
    "TruthError",
    "TruthTable",
    "UnsupportedRow",
    "read_table",
]
