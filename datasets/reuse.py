"""How cold a call is by what was touched since it was last made: curves that were measured on a machine.

``share`` is the part of the way from the latency in a loop (warm) to that after the whole cache was read (cold).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

USUAL = "pointwise"  # the family whose curves stand for those that have none
LEAST_BYTES = 1024.0  # distances below count as this one


@dataclass(frozen=True)
class ReuseCurves:
    """``code`` and ``data`` hold shares by family of ops, a value for each of ``distances`` (bytes, ascending).

    ``code`` is that of calls on next to no data, which take ``code_us`` longer cold than warm; ``data`` that of calls
    on data. ``host_us`` are microseconds of Python that modelling code spends around one operator.
    """

    distances: tuple[float, ...]
    code: Mapping[str, tuple[float, ...]]
    data: Mapping[str, tuple[float, ...]]
    code_us: float
    host_us: tuple[float, ...] = field(default=())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ReuseCurves:
        """The curves from their plain values; ValueError for what are none."""
        loaded = cls(**values)
        curves = [*loaded.code.values(), *loaded.data.values(), *([loaded.host_us] if loaded.host_us else [])]
        if not loaded.distances or USUAL not in loaded.code or USUAL not in loaded.data:
            raise ValueError(f"reuse curves need distances and a curve of {USUAL}")
        if not isinstance(loaded.code_us, (int, float)) or not 0 <= loaded.code_us < float("inf"):
            raise ValueError(f"reuse.code_us={loaded.code_us!r} must be microseconds")
        if any(len(curve) != len(loaded.distances) or not np.isfinite(curve).all() for curve in curves):
            raise ValueError("each reuse curve needs a number for each distance")
        return loaded

    @cached_property
    def _places(self) -> np.ndarray:
        return np.log2(np.maximum(np.asarray(self.distances, dtype=float), LEAST_BYTES))

    def share(self, part: str, family: str, distance: np.ndarray) -> np.ndarray:
        """Shares after so many bytes [n]; ``part`` is ``code`` or ``data``."""
        curves: Mapping[str, tuple[float, ...]] = self.code if part == "code" else self.data
        return self._read(curves.get(family, curves[USUAL]), distance)

    def host(self, distance: np.ndarray) -> np.ndarray:
        """Microseconds of Python around one operator after so many bytes [n]."""
        return self._read(self.host_us, distance) if self.host_us else np.zeros(np.shape(distance))

    def _read(self, curve: tuple[float, ...], distance: np.ndarray) -> np.ndarray:
        log_distance = np.log2(np.clip(distance, LEAST_BYTES, 2.0**60))
        return np.interp(log_distance, self._places, curve)
