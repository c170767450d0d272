"""How tensors lie in memory: sizes, contiguous runs, transposition. Strides are in elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...datasets.dtypes import canonical_dtype, itemsize
from .calls import View

# Formats of torch that opcast has no name for, as the format of the same size that stands for them.
STAND_INS = {"complex64": "fp64", "complex32": "fp32", "uint16": "int16", "uint32": "int32", "uint64": "int64"}


def dtype_of(name: str) -> str:
    """opcast's name of a torch dtype."""
    return canonical_dtype(STAND_INS.get(name, name))


def numel(view: View) -> int:
    return math.prod(view.shape)


def unique_numel(view: View) -> int:
    """Elements in memory: an expanded axis holds one."""
    return math.prod(size for size, stride in zip(view.shape, view.stride, strict=True) if stride or size == 0)


def size_bytes(view: View) -> int:
    """Bytes in memory that the view covers."""
    return int(unique_numel(view) * itemsize(dtype_of(view.dtype)))


def dense(view: View) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in whatever order of axes."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(view.stride, view.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def contiguous_run(views: Sequence[View]) -> int:
    """Elements that one inner loop over all views covers: as far as each lies contiguous, or stands still.

    The views are broadcast to the shape of the first. Axes are taken in its memory order, innermost first, and
    joined as long as every view goes on where the axis inside ends (torch's ``TensorIterator`` loops that way). 0
    when it is everything.
    """
    first = views[0]
    strides = [_broadcast_strides(view, first.shape) for view in views]
    axes = sorted((axis for axis, size in enumerate(first.shape) if size != 1), key=lambda a: (first.stride[a], -a))
    run = 1
    for axis in axes:
        expected = [stride[axes[0]] * run for stride in strides] if run > 1 else None
        steps = [stride[axis] for stride in strides]
        if steps != expected if expected is not None else any(step not in (0, 1) for step in steps):
            break
        run *= first.shape[axis]
    return 0 if run == numel(first) else run


def _broadcast_strides(view: View, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a view repeated over ``shape``: 0 along the axes where it has one element."""
    strides = [stride if size > 1 else 0 for stride, size in zip(view.stride, view.shape, strict=True)]
    return (0,) * (len(shape) - len(strides)) + tuple(strides)


def transposed(matrix: View) -> bool:
    """Whether the last two axes lie column by column."""
    rows, cols = matrix.shape[-2:]
    row_stride, col_stride = matrix.stride[-2:]
    if col_stride == 1 and (row_stride >= cols or rows == 1):
        return False
    return row_stride == 1 and (col_stride >= rows or cols == 1)


def in_memory_order(view: View) -> list[int]:
    """Axes from the outermost in memory to the innermost."""
    return sorted(range(len(view.shape)), key=lambda axis: (-view.stride[axis], axis))
