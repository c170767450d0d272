"""Features of matrix products: tiles, waves, alignment, reach of each operand."""

from __future__ import annotations

import numpy as np

from ..analytical.setting import Dims, Setting
from .pieces import Columns, alignment, used

HINTS = ("tile", "waves", "tail", "split_gain", "loads_share", "blocks_per_thread")
CANDIDATE_TILES = ((256, 128), (128, 128), (64, 64))


def product(dims: Dims, setting: Setting) -> Columns:
    batch = dims.batch if hasattr(dims, "batch") else np.minimum(dims.experts, dims.tokens)
    m = dims.m if hasattr(dims, "m") else dims.tokens / batch
    out: Columns = {"skew": np.log2(m / dims.n), "group": np.log2(m)}
    for name, values in (("m", m), ("n", dims.n), ("k", dims.k)):
        out[f"align_{name}"] = alignment(values)
    for block in (64, 128, 256):
        out[f"pad_m{block}"] = used(m, block)
        out[f"pad_n{block}"] = used(dims.n, block)
    for rows, cols in CANDIDATE_TILES:
        waves = batch * np.ceil(m / rows) * np.ceil(dims.n / cols) / setting.units
        out[f"tail_{rows}x{cols}"] = waves / np.ceil(waves)
        out[f"waves_{rows}x{cols}"] = np.log2(waves)
    out["reach_a"] = np.log2(batch * m * dims.k * setting.itemsize / setting.l2_bytes)
    out["reach_b"] = np.log2(batch * dims.n * dims.k * setting.itemsize / setting.l2_bytes)
    return out
