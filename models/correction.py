"""What learning adds to physics: ln(measured / analytical) as offset + forest + kriging + lines, each part optional.

All of it is plain arrays, so that a trained model is saved, hashed and loaded without pickle or any ML library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .forest import Forest
from .interpolant import Interpolant
from .kriging import Kriging

LIMIT = 7.0  # |ln ratio| beyond which an answer is nonsense: a factor of 1,100


@dataclass(frozen=True, eq=False)
class Correction:
    """``offset`` is the calibration (median ln ratio in training); ``features`` counts the columns it reads."""

    features: int
    offset: float = 0.0
    forest: Forest | None = None
    kriging: Kriging | None = None
    lines: Interpolant | None = None

    def expect(self, rows: int) -> None:
        """Get ready for so many rows in all, asked for in parts (:meth:`.forest.Forest.expect`)."""
        if self.forest is not None:
            self.forest.expect(rows)

    def predict(self, matrix: np.ndarray) -> np.ndarray:
        """ln(latency / analytical) of each row: float64 [n] for float32 [n, features]."""
        out = np.full(len(matrix), self.offset)
        if self.forest is not None:
            out += self.forest.predict(matrix)
        if self.kriging is not None:
            out += self.kriging.predict(matrix)
        if self.lines is not None:
            out += self.lines.predict(matrix)
        return np.clip(out, -LIMIT, LIMIT)

    def arrays(self) -> dict[str, np.ndarray]:
        out = {"features": np.array(self.features), "offset": np.array(self.offset)}
        for name, model in (("forest", self.forest), ("kriging", self.kriging), ("lines", self.lines)):
            if model is not None:
                out.update(nested(name, model.arrays()))
        return out

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Correction:
        forest, kriging, lines = (part(arrays, name) for name in ("forest", "kriging", "lines"))
        return cls(
            int(arrays["features"]),
            float(arrays["offset"]),
            Forest.from_arrays(forest) if forest else None,
            Kriging.from_arrays(kriging) if kriging else None,
            Interpolant.from_arrays(lines) if lines else None,
        )


def nested(name: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """``arrays`` with ``name.`` before each key."""
    return {f"{name}.{key}": value for key, value in arrays.items()}


def part(arrays: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """The arrays that :func:`nested` put under ``name``."""
    return {key.removeprefix(f"{name}."): value for key, value in arrays.items() if key.startswith(f"{name}.")}
