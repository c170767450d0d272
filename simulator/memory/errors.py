"""How far predicted peaks of memory are from measured ones, by framework: what P(out of memory) rests on.

``conf/memory_errors.yaml`` holds what was found on published runs. An error is the logarithm of measured over
predicted; it is taken to follow Student's t with four degrees of freedom around no error: a few layouts are far off.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

from ...datasets.reading import read_yaml

ERRORS = Path(__file__).resolve().parents[2] / "conf" / "memory_errors.yaml"
T_QUANTILE_95 = 2.131847  # quantile 0.95 of Student's t with four degrees of freedom
T_STANDARD_DEVIATION = math.sqrt(2.0)  # its standard deviation


def error_spread(*stacks: str) -> float:
    """Root mean square of the log error of peaks under the first of these stacks that has published runs.

    The pooled one where none has.
    """
    spreads = _spreads()
    return next((spreads[name] for name in stacks if name in spreads), spreads[""])


@lru_cache(maxsize=1)
def _spreads() -> dict[str, float]:
    document = read_yaml(ERRORS, ValueError)
    return {"": float(document["pooled"]["spread"])} | {
        name: float(stack["spread"]) for name, stack in document["stacks"].items()
    }


def probability_within(error: float, spread: float) -> float:
    """P(the log error is at most ``error``) under a spread; Student's t with four degrees of freedom in closed form."""
    if spread <= 0.0:
        return 0.5 * (1 + (error > 0.0) - (error < 0.0))
    t = error / spread * T_STANDARD_DEVIATION
    x = t * t / (1.0 + t * t / 4.0)
    return 0.5 + 0.375 * math.copysign(math.sqrt(x), t) * (1.0 - x / 12.0)


def peak_interval(peak: float, spread: float) -> tuple[float, float]:
    """The 90 % interval of a peak, in its unit."""
    factor = math.exp(T_QUANTILE_95 * spread / T_STANDARD_DEVIATION)
    return peak / factor, peak * factor
