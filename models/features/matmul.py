"""Features of matrix products: tiles, waves, alignment, reach of each operand."""

from __future__ import annotations

import numpy as np

from ..analytical.setting import Dims, Setting
from .pieces import Columns, alignment, used

HINTS = ("tile", "waves", "tail", "split_gain", "loads_share", "blocks_per_thread")
# Shapes that libraries choose from, beyond the law's own: each wastes its last wave at other sizes.
CANDIDATE_TILES = ((256, 128), (128, 256), (192, 128), (128, 192), (128, 128), (128, 64), (64, 128), (64, 64))
WAVE_TILES = ((256, 128), (128, 128), (64, 64))  # those whose number of waves is a feature: others follow from it


def product(dims: Dims, setting: Setting) -> Columns:
    batch = dims.batch if hasattr(dims, "batch") else np.minimum(dims.experts, dims.tokens)
    m = dims.m if hasattr(dims, "m") else dims.tokens / batch
    out: Columns = {"skew": np.log2(m / dims.n), "group": np.log2(m)}
    for name, values in (("m", m), ("n", dims.n), ("k", dims.k)):
        out[f"align_{name}"] = alignment(values)
    out["pad_m128"] = used(m, 128)
    out["pad_n128"] = used(dims.n, 128)
    for rows, cols in CANDIDATE_TILES:
        waves = batch * np.ceil(m / rows) * np.ceil(dims.n / cols) / setting.units
        out[f"tail_{rows}x{cols}"] = waves / np.ceil(waves)
        if (rows, cols) in WAVE_TILES:
            out[f"waves_{rows}x{cols}"] = np.log2(waves)
    out["reach_a"] = np.log2(batch * m * dims.k * setting.itemsize / setting.l2_bytes)
    out["reach_b"] = np.log2(batch * dims.n * dims.k * setting.weight_itemsize / setting.l2_bytes)
    return out
