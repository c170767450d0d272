"""The program of :class:`.walks.TreeProgram` as machine code: numba, cached on disk, loaded only for large batches.

Written so that LLVM turns the inner loops into SIMD over rows: constant block length, unsigned indices, both children
read before the choice, and a target that is never a source.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

BLOCK = 512  # rows evaluated together: their bins and slots stay in the first-level cache


@lru_cache(maxsize=1)
def evaluate() -> Callable[..., None]:
    """The compiled kernel, kept on disk where the package's folder or the user's cache can be written."""
    import numba

    try:
        return numba.njit(_SIGNATURES, cache=True, nogil=True)(_evaluate)
    except RuntimeError:  # no folder for the cache
        return numba.njit(_SIGNATURES, nogil=True)(_evaluate)


def loaded() -> bool:
    """Whether the kernel is in memory already."""
    return evaluate.cache_info().currsize > 0


_SIGNATURES = [
    f"void(float32[:,::1],int64[::1],float32[:,::1],{code}[:,::1],{'int64[::1],' * 3}float32[::1],int64,float64[::1])"
    for code in ("uint8", "uint16")
]


def _evaluate(
    columns: np.ndarray,
    used: np.ndarray,
    tables: np.ndarray,
    code: np.ndarray,
    first: np.ndarray,
    base: np.ndarray,
    root: np.ndarray,
    leaf: np.ndarray,
    slots: int,
    out: np.ndarray,
) -> None:
    """``out`` [n] for ``columns`` float32 [features, n]."""
    rows = columns.shape[1]
    bins = np.empty((len(used), BLOCK), code.dtype)
    slot = np.zeros((slots, BLOCK), code.dtype)
    below = np.empty(BLOCK, np.uint32)
    value = np.empty(BLOCK, np.float32)
    total = np.empty(BLOCK)
    for start in range(0, rows, BLOCK):
        count = min(BLOCK, rows - start)
        for place in range(len(used)):
            for row in range(count):
                value[row] = columns[used[place], start + row]
            for row in range(BLOCK):
                below[row] = 0
            half = np.uint32(tables.shape[1] // 2)
            while half:
                for row in range(BLOCK):
                    here = below[row]
                    if tables[place, here + half - np.uint32(1)] < value[row]:
                        here += half
                    below[row] = here
                half //= np.uint32(2)
            for row in range(BLOCK):
                bins[place, row] = below[row]
        for row in range(BLOCK):
            total[row] = 0.0
        for tree in range(len(root)):
            for split in range(first[tree + 1] - 1, first[tree] - 1, -1):
                column, cut = np.uint64(code[split, 0]), code[split, 1]
                low, low_number = np.uint64(code[split, 2]), code[split, 3]
                high, high_number = np.uint64(code[split, 4]), code[split, 5]
                target = np.uint64(code[split, 6])
                for row in range(BLOCK):
                    left, right = slot[low, row] | low_number, slot[high, row] | high_number
                    slot[target, row] = right if bins[column, row] > cut else left
            top, offset = np.uint64(root[tree]), np.uint64(base[tree])
            for row in range(BLOCK):
                total[row] += leaf[offset + np.uint64(slot[top, row])]
        for row in range(count):
            out[start + row] = total[row]
