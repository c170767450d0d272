"""Which features a trained correction leans on: permutation importance (Breiman, "Random Forests", 2001, sec. 10)."""

from __future__ import annotations

import numpy as np

from .correction import Correction

ROWS = 400


def permutation_importance(correction: Correction, matrix: np.ndarray, target: np.ndarray, seed: int = 0) -> np.ndarray:
    """How much the mean absolute log error grows when one column is shuffled: float64 [f].

    ``matrix`` float32 [n, f] and ``target`` ln(measured / analytical) [n]; at most 400 rows are used. Columns that
    never vary are zero. Deterministic for a seed.
    """
    rng = np.random.default_rng(seed)
    if len(matrix) > ROWS:
        rows = np.sort(rng.choice(len(matrix), ROWS, replace=False))
        matrix, target = matrix[rows], target[rows]
    before = np.mean(np.abs(target - correction.predict(matrix)))
    out = np.zeros(matrix.shape[1])
    for column in np.flatnonzero(np.ptp(matrix, axis=0) > 0):
        shuffled = matrix.copy()
        shuffled[:, column] = matrix[rng.permutation(len(matrix)), column]
        out[column] = np.mean(np.abs(target - correction.predict(shuffled))) - before
    return out
