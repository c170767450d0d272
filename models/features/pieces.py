"""What features of several families are made of.

Features are float32, but their logarithms are taken in float64: in float32 their last digit differs from processor to
processor, and a tree then answers from another leaf.
"""

from __future__ import annotations

import numpy as np

Columns = dict[str, np.ndarray | float]

ALIGNED = 4096
_LARGEST = float(np.finfo(np.float32).max)
_ALIGNMENTS = np.log2([ALIGNED] + [value & -value for value in range(1, ALIGNED)]).astype(np.float32)


def log2(values: np.ndarray | float) -> np.ndarray:
    """float32 log2 of positive numbers."""
    return np.asarray(np.log2(np.minimum(values, _LARGEST), dtype=np.float64), dtype=np.float32)


def alignment(values: np.ndarray) -> np.ndarray:
    """log2 of the largest power of two that divides each value, up to 4096."""
    return np.asarray(_ALIGNMENTS.take(np.maximum(values, 1.0).astype(np.int64) & (ALIGNED - 1)))


def used(values: np.ndarray, block: int) -> np.ndarray:
    """Share of whole blocks that is used."""
    return values / (np.ceil(values / block) * block)
