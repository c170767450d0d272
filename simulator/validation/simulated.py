"""Steps as a calibration simulated them, in a Parquet file: what ``opcast calibrate steps=`` writes.

The file holds what opcast said of each run, and no measured time: who has the tables can fit again without simulating.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..question.calibration import RunKind
from .observed import ObservedStep

if TYPE_CHECKING:
    import pyarrow as pa


def as_table(observed: Sequence[ObservedStep], physics: Mapping[str, float]) -> pa.Table:
    """A row for each step; ``physics`` are its errors without effects (ln of measured over answered), by id.

    ``predicted`` is with the effects ``applied`` (ln), ``physics`` without any. ``share`` is of ``predicted``.
    """
    import pyarrow as pa

    return pa.Table.from_pylist(
        [
            {
                "id": each.id,
                "table": each.table,
                "group": each.group,
                "settings": [{"kind": kind} | asdict(of) for kind, of in each.settings.items()],
                "predicted": each.predicted,
                "physics": float(each.measured / np.exp(physics[each.id])),
                "parts": [
                    {"cell": cell, "regime": regime, "share": share, "applied": each.applied.get((cell, regime), 0.0)}
                    for (cell, regime), share in each.parts.items()
                ],
            }
            for each in observed
        ]
    )


def read_steps(path: Path, measured: Mapping[str, float]) -> tuple[list[ObservedStep], dict[str, float]]:
    """The steps of a file that have a measured time, by id, and their errors without effects."""
    import pyarrow.parquet as pq

    found, physics = [], {}
    for row in pq.read_table(path).to_pylist():
        if row["id"] not in measured:
            continue
        settings = {of.pop("kind"): RunKind(**of) for of in row["settings"]}
        parts = {(of["cell"], of["regime"]): of for of in row["parts"]}
        found.append(
            ObservedStep(
                row["id"],
                row["table"],
                row["group"],
                settings,
                row["predicted"],
                measured[row["id"]],
                {part: of["share"] for part, of in parts.items()},
                {part: of["applied"] for part, of in parts.items()},
            )
        )
        physics[row["id"]] = float(np.log(measured[row["id"]] / row["physics"]))
    return found, physics
