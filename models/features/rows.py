"""Features of kernels that stream rows or elements."""

from __future__ import annotations

import numpy as np

from ..analytical.setting import Dims, Setting
from .pieces import Columns, alignment, used

HINTS = ("rows_per_unit", "row_bytes")


def rows(dims: Dims, setting: Setting) -> Columns:
    count = dims.rows if hasattr(dims, "rows") else dims.tokens
    cols = next(
        getattr(dims, name) for name in ("cols", "hidden", "head_dim", "vocab", "experts") if hasattr(dims, name)
    )
    waves = count / setting.units
    return {
        "align_cols": alignment(cols),
        "pad_cols256": used(cols, 256),
        "tail_rows": waves / np.ceil(waves),
        "blocks": np.log2(waves),
    }


def flat(dims: Dims, setting: Setting) -> Columns:
    size = next(getattr(dims, name) for name in ("numel", "size_bytes", "length") if hasattr(dims, name))
    return {"align_size": alignment(size), "blocks": np.log2(np.maximum(size, 0.5) / (1024.0 * setting.units))}
