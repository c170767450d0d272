"""At which clock rows were timed, beside that of bursts: what a power limit had left of it."""

from __future__ import annotations

import math

import numpy as np

BURST, STEADY = "burst", "steady"  # of the column ``clocks``: at boost clocks, or at those that a power limit leaves


def burst_mhz(clocks: np.ndarray, mhz: np.ndarray, usual_mhz: float) -> float:
    """The clock of bursts: the median of those among rows [n], as a data sheet's is often not what a GPU runs at.

    ``clocks`` are the words of the column, ``mhz`` what was counted (NaN: nothing). ``usual_mhz`` where no row tells.
    """
    bursts = mhz[(clocks == BURST) & np.isfinite(mhz) & (mhz > 0)]
    return float(np.median(bursts)) if len(bursts) else usual_mhz


def relative_clocks(clocks: np.ndarray, mhz: np.ndarray, top_mhz: float) -> np.ndarray:
    """The clock of rows [n] over that of bursts, in (0, 1]; 1 for bursts, and where a row does not tell."""
    steady = (clocks == STEADY) & (mhz > 0) & (mhz < top_mhz)
    return np.where(steady, mhz, top_mhz) / top_mhz if math.isfinite(top_mhz) else np.ones(len(mhz))
