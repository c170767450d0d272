"""Steps as a calibration simulated them, in a Parquet file: what ``opcast calibrate steps=`` writes.

The file holds what opcast said of each run, and no measured time: who has the tables can fit again without simulating
(``tests/evidence/steps.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from .holdout import CONSTANT_SHARE, PHYSICS, ROOFLINE, WAYS
from .observed import ObservedStep

if TYPE_CHECKING:
    import pyarrow as pa

ANSWERS = (*WAYS, PHYSICS, ROOFLINE, CONSTANT_SHARE)  # what a step is answered by, beside all that is known


def as_table(observed: Sequence[ObservedStep], errors: Mapping[str, Mapping[str, float]]) -> pa.Table:
    """A row for each step; ``errors`` are ln of measured over answered, by what was left out and id.

    ``predicted`` is with the effects ``applied`` (ln), ``answers`` are without what was left out (:mod:`.holdout`).
    ``share`` is of ``predicted``.
    """
    return pa.Table.from_pylist(
        [
            {
                "id": step.id,
                "table": step.table,
                "group": step.group,
                "half": step.half,
                "settings": [{"kind": kind} | asdict(of) for kind, of in step.settings.items()],
                "predicted": step.predicted,
                "answers": {way: float(step.measured / np.exp(errors[way][step.id])) for way in ANSWERS},
                "parts": [
                    {"cell": cell, "regime": regime, "share": share, "applied": step.applied.get((cell, regime), 0.0)}
                    for (cell, regime), share in step.parts.items()
                ],
            }
            for step in observed
        ]
    )
