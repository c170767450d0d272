"""What features of several families are made of."""

from __future__ import annotations

import numpy as np

Columns = dict[str, np.ndarray | float]


def alignment(values: np.ndarray) -> np.ndarray:
    """log2 of the largest power of two that divides each value, up to 4096."""
    whole = np.maximum(values, 1.0).astype(np.int64)
    return np.log2(np.minimum(whole & -whole, 4096))


def used(values: np.ndarray, block: int) -> np.ndarray:
    """Share of whole blocks that is used."""
    return values / (np.ceil(values / block) * block)
