"""Reads what ``opcast calibrate steps=`` wrote, so that who has the measured times can fit again without simulating."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from opcast.simulator.question.calibration import RunKind
from opcast.simulator.validation.observed import ObservedStep
from opcast.simulator.validation.simulated import ANSWERS


def read_steps(path: Path, measured: Mapping[str, float]) -> tuple[list[ObservedStep], dict[str, dict[str, float]]]:
    """The steps of a file that have a measured time, by id, and their errors by what was left out."""
    found: list[ObservedStep] = []
    errors: dict[str, dict[str, float]] = {way: {} for way in ANSWERS}
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
                row["half"],
            )
        )
        for way, predicted in row["answers"].items():
            errors[way][row["id"]] = float(np.log(measured[row["id"]] / predicted))
    return found, errors
