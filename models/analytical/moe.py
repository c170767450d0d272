"""A rank's experts in one go: routing, two grouped products with the gate between them, and the weighted sum.

The busiest expert parallel rank is the one that counts. Its experts' loads (:mod:`....datasets.experts`) decide how
many read their weights and how many tiles there are: each expert pads its own last tile.
"""

from __future__ import annotations

import numpy as np

from ...datasets.dtypes import weight_itemsize
from ...datasets.experts import expert_loads, rows_and_touched
from .matmul import FILL_CLOCKS
from .setting import Array, Dims, Setting, Terms

KERNELS = 5.0  # sort, permute, first products with the gate, second products, sum
TILES = ((16, 128), (32, 128), (64, 128), (128, 128), (128, 256))  # rows of an expert, columns
TOKEN_PASSES = 4.0  # reads and writes of all tokens: quantized, gathered, zeroed, summed
ROUTE_BYTES = 24.0  # of each token and expert chosen: scores, indices, offsets, sorted


def fused_moe(d: Dims, s: Setting) -> Terms:
    """Products over the experts that have a row, weights read once each, and passes over all ranks' tokens."""
    count, tokens_per_expert = expert_loads(d.tokens, d.topk, d.experts, d.ep, d.skew)
    rows, touched = rows_and_touched(count, tokens_per_expert)
    width = d.inter / d.tp
    up, hints = _products(count, tokens_per_expert, (1.0 + d.gated) * width, d.hidden, s)
    down, _ = _products(count, tokens_per_expert, d.hidden, width, s)
    weights = touched * (2.0 + d.gated) * d.hidden * width * weight_itemsize(s.dtype)
    moved = rows * (d.hidden * (s.itemsize + s.out_itemsize) + width * ((1.0 + d.gated) * s.out_itemsize + s.itemsize))
    passes = d.tokens * (d.hidden * TOKEN_PASSES * s.out_itemsize + d.topk * ROUTE_BYTES + 4.0 * d.experts)
    around = s.traffic_us(moved + passes)
    hints = {
        **hints,
        "touched": np.maximum(touched, 1.0),
        "rows_per_expert": np.maximum(rows / np.maximum(touched, 1.0), 1.0),
        "busiest_rows": np.maximum(tokens_per_expert[0], 1.0),
        "rank_rows": np.maximum(rows, 1.0),
        "around": around,
    }
    memory = s.traffic_us(weights)
    return Terms(up + down + around, memory + around, KERNELS * s.device.launch_us, hints=hints)


def _products(count: Array, rows_each: Array, n: Array, k: Array, s: Setting) -> tuple[Array, dict[str, Array]]:
    """us of one grouped product by the fastest tile, tiles of all experts sharing the waves; figures on the way."""
    if s.cpu:
        rows, _ = rows_and_touched(count, rows_each)
        time = 2.0 * rows * n * k / s.tensor_rate
        return time, {
            "waves": np.maximum(rows / s.units, 1.0),
            "tail": np.ones_like(time),
            "padding": np.ones_like(time),
        }
    heights = np.array(TILES, dtype=np.float64)[:, :1]
    columns = np.array(TILES, dtype=np.float64)[:, 1:]
    blocks = np.stack([(count * np.where(rows_each > 1.0, np.ceil(rows_each / h), rows_each)).sum(0) for h, _ in TILES])
    tiles = np.maximum(blocks, 1.0) * np.ceil(n / columns)
    arithmetic = 2.0 * heights * columns * k * s.units / s.tensor_rate
    loads = k * (heights * s.itemsize + columns * weight_itemsize(s.dtype)) / s.unit_rate
    fixed = FILL_CLOCKS / s.device.clock_mhz + heights * columns * s.out_itemsize / s.unit_rate
    waves = np.ceil(tiles / s.units)
    time = waves * (np.maximum(arithmetic, loads) + fixed)
    best = np.argmin(time, axis=0)
    pick = (best, np.arange(best.size))
    rows, _ = rows_and_touched(count, rows_each)
    padding = (blocks * heights)[pick] / np.maximum(rows, 1e-6)
    return time[pick], {
        "waves": (tiles / s.units)[pick],
        "tail": (tiles / (waves * s.units))[pick],
        "padding": np.maximum(padding, 1.0),
    }
