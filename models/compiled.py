"""The program of :class:`.walks.TreeProgram` as machine code: numba, cached on disk, loaded only for large batches.

Written so that LLVM turns the inner loops into SIMD over rows: constant block length, unsigned indices, both children
read before the choice, and a target that is never a source.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

BLOCK = 1024  # rows evaluated together: their bins and slots stay in the second-level cache
TOGETHER = 4  # trees whose leaves are added in one go
ALIGNED = 64  # bytes: a wide load that crosses a cache line takes twice as long


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
    f"void(float32[:,::1],int64[::1],float32[:,::1],{code}[:,::1],{'int64[::1],' * 3}float64[::1],int64,float64[::1])"
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
    rows, places = columns.shape[1], len(used)
    size = (places + slots) * BLOCK * code.itemsize
    buffer = np.zeros(size + ALIGNED, np.uint8)
    buffer = buffer[(-buffer.ctypes.data) % ALIGNED :][:size].view(code.dtype)
    bins, slot = buffer[: places * BLOCK].reshape((places, BLOCK)), buffer[places * BLOCK :].reshape((slots, BLOCK))
    below = np.empty(BLOCK, np.uint32)
    value = np.empty(BLOCK, np.float32)
    total = np.empty(BLOCK)
    for start in range(0, rows, BLOCK):
        count = min(BLOCK, rows - start)
        for position in range(places):
            for row in range(count):
                value[row] = columns[used[position], start + row]
            for row in range(BLOCK):
                below[row] = 0
            half = np.uint32(1)
            while 2 * half < tables.shape[1] and tables[position, 2 * half - 1] < np.inf:
                half *= np.uint32(2)
            while half:
                for row in range(BLOCK):
                    here = below[row]
                    if tables[position, here + half - np.uint32(1)] < value[row]:
                        here += half
                    below[row] = here
                half //= np.uint32(2)
            for row in range(BLOCK):
                bins[position, row] = below[row]
        for row in range(BLOCK):
            total[row] = 0.0
        for group in range(0, len(root), TOGETHER):
            until = min(group + TOGETHER, len(root))
            for split in range(first[until] - 1, first[group] - 1, -1):
                at = np.uint64(split)
                column, cut = np.uint64(code[at, 0]), code[at, 1]
                low, low_number = np.uint64(code[at, 2]), code[at, 3]
                high, high_number = np.uint64(code[at, 4]), code[at, 5]
                target = np.uint64(code[at, 6])
                for row in range(BLOCK):
                    left, right = slot[low, row] | low_number, slot[high, row] | high_number
                    slot[target, row] = right if bins[column, row] > cut else left
            if until - group < TOGETHER:
                for tree in range(group, until):
                    top, offset = np.uint64(root[tree]), np.uint64(base[tree])
                    for row in range(BLOCK):
                        total[row] += leaf[offset + np.uint64(slot[top, row])]
                continue
            one, two, three, four = root[group], root[group + 1], root[group + 2], root[group + 3]
            a, b = np.uint64(base[group]), np.uint64(base[group + 1])
            c, d = np.uint64(base[group + 2]), np.uint64(base[group + 3])
            for row in range(BLOCK):  # in the order of the trees, so that sums are the same to the last bit
                half_way = (total[row] + leaf[a + np.uint64(slot[one, row])]) + leaf[b + np.uint64(slot[two, row])]
                total[row] = (half_way + leaf[c + np.uint64(slot[three, row])]) + leaf[d + np.uint64(slot[four, row])]
        for row in range(count):
            out[start + row] = total[row]
