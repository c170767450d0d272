"""Matrix products: tiles, waves over compute units, split K, and operands re-read past the cache.

A GPU GEMM is a grid of output tiles. Each of ``units`` compute units takes one tile at a time, so that time comes
in whole waves; a kernel that splits K (stream-K, arXiv 2301.03598) shares the last wave out at the cost of a
fix-up. The law takes the fastest of the candidate tiles and both schedules, as a library's heuristic tries to.

Fill, join, ramp and shared loads were fitted together on 2,500 rows of each of five bf16 tables (H100, H200, L40S,
two of B200), of three fifths of the (n, k) sites, none with n > 8192. Grouped evaluations do score those sites.
"""

from __future__ import annotations

import numpy as np

from .setting import ONE_MEMORY, Array, Dims, Setting, Terms

# (rows, columns) of output a compute unit holds at a time: the shapes that cuBLAS and CUTLASS kernels come in.
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64))
# Of matrix units of 256 x 256 that share one memory: blocks as wide as a unit and wider, up to the 1024 that JAX's
# guide to products in Pallas takes (docs/pallas/tpu/matmul.md). Judged: XLA does not tell its own
SHARED_TILES = ((1024, 1024), (512, 1024), (256, 512), (256, 256), (128, 256), (64, 256), (32, 256), (8, 256))
K_BYTES = 128.0  # depth of one main-loop step, in bytes of an operand row
FILL_CLOCKS = 1100.0  # first loads from memory until the main loop runs, and the way out
JOIN_CLOCKS = 6000.0  # units that share a tile wait for each other, or a second kernel adds their parts up
RAMP_CLOCKS = 1500.0  # a product bound by memory still waits for its first loads and its last stores
PACK_CLOCKS = 2.0  # of a core for each element it loads, transposes and stores
SHARED_LOADS = 0.63  # neighbours fetch the same operand rows at once: multicast, or one L2 request for both


def gemm(d: Dims, s: Setting) -> Terms:
    """One (batched) matrix product."""
    if s.cpu:
        return _gemm_cpu(d.batch, d.m, d.n, d.k, s)
    return _tiled(d.batch, d.m, d.n, d.k, 0.0, s)


def grouped_gemm(d: Dims, s: Setting) -> Terms:
    """One product per expert in one launch: tiles of all experts share the waves, each pads its own last tile.

    With uneven experts a last tile is half empty on average; the busiest expert's row is the longest chain.
    """
    busy = np.minimum(d.experts, d.tokens)
    rows = d.tokens / busy
    if s.cpu:
        terms = _gemm_cpu(busy, rows, d.n, d.k, s)
        return Terms(terms.compute, terms.memory, terms.overhead + (busy - 1) * s.device.dispatch_us, hints=terms.hints)
    return _tiled(busy, rows, d.n, d.k, 0.5 * np.minimum(d.imbalance / 100.0 - 1.0, 1.0), s)


def _gemm_cpu(batch: Array, m: Array, n: Array, k: Array, s: Setting) -> Terms:
    """Register blocks of 4 x 16, and a copy of both operands into packed panels (Goto and van de Geijn, 2008).

    A single row needs no panels; for a few rows the copy still costs more than the arithmetic.
    """
    size = batch * (m * k * s.itemsize + k * n * s.weight_itemsize + m * n * s.out_itemsize)
    blocks = batch * np.ceil(m / 4.0) * np.ceil(n / 16.0)
    compute = 2.0 * blocks * 64.0 * k / s.tensor_rate
    packed = np.where(m > 1.0, batch * k * (m * n / (n + 4.0) + n * m / (m + 4.0)), 0.0)
    packing = packed * PACK_CLOCKS / (s.units * s.device.clock_mhz)
    hints = {"blocks_per_thread": blocks / s.units}
    return Terms(compute, s.traffic_us(size), s.device.launch_us + packing, hints=hints)


def _tiled(batch: Array, m: Array, n: Array, k: Array, ragged: Array, s: Setting) -> Terms:
    """Fastest tile and schedule; ``ragged`` is the share of a tile that uneven batches waste beside padding."""
    tiles = np.array(_tiles(s), dtype=np.float64)
    rows, cols = tiles[:, :1], tiles[:, 1:]
    count = batch * np.ceil(m / rows + ragged) * np.ceil(n / cols)
    steps = np.ceil(k * s.itemsize / K_BYTES)
    step, fixed, fixup = _tile_times(rows, cols, s)
    waves = np.ceil(count / s.units)
    total_us = waves * (steps * step + fixed)
    split = np.ceil(count * (steps / s.units)) * step + (fixed + fixup)
    loads = count * (steps * (_loaded(rows, cols, s) * SHARED_LOADS)) / s.loads_rate
    compute = np.maximum(np.minimum(total_us, split), loads)
    best = np.argmin(compute, axis=0)
    pick = (best, np.arange(best.size))
    memory = _memory_us(batch, m, n, k, s) + RAMP_CLOCKS / s.device.clock_mhz
    hints = {
        "tile": best + 1.0,
        "waves": (count / s.units)[pick],
        "tail": (count / (waves * s.units))[pick],
        "split_gain": (total_us / split)[pick],
        "loads_share": 1.0 + (loads / compute)[pick],
    }
    return Terms(compute[pick], memory, s.device.launch_us, hints=hints)


def _tiles(s: Setting) -> tuple[tuple[int, int], ...]:
    """Shapes of output that a unit of the device may hold."""
    return SHARED_TILES if s.device.architecture in ONE_MEMORY else TILES


def _tile_times(rows: Array, cols: Array, s: Setting) -> tuple[Array, Array, Array]:
    """us of one main-loop step, of a tile's way in and out, and of joining a tile that two units share."""
    depth = K_BYTES / s.itemsize
    arithmetic = 2.0 * rows * cols * depth * s.units / s.tensor_rate
    step = np.maximum(arithmetic, _loaded(rows, cols, s) / s.unit_rate)
    clock_us = 1.0 / s.device.clock_mhz
    fixed = FILL_CLOCKS * clock_us + rows * cols * s.out_itemsize / s.unit_rate
    fixup = JOIN_CLOCKS * clock_us + rows * cols * 8.0 / s.unit_rate
    return step, fixed, fixup


def _loaded(rows: Array, cols: Array, s: Setting) -> Array:
    """Bytes of one main-loop step: weights (columns) may weigh less than activations (rows)."""
    return (rows + cols * (s.weight_itemsize / s.itemsize)) * K_BYTES


def _memory_us(batch: Array, m: Array, n: Array, k: Array, s: Setting) -> Array:
    """Compulsory traffic, and operands read again by later waves once they do not stay in the cache.

    A wave covers a square of ``reach`` x ``reach`` outputs, so A passes n / reach times and B m / reach times.
    """
    a, b = m * k * s.itemsize, k * n * s.weight_itemsize
    size = batch * (a + b + m * n * s.out_itemsize)
    reach = np.sqrt(s.units * max(rows * cols for rows, cols in _tiles(s)))
    again = batch * (a * np.maximum(n / reach - 1.0, 0.0) + b * np.maximum(m / reach - 1.0, 0.0))
    missed = 1.0 - s.resident(a + b)
    return s.traffic_us(size) + again * missed / s.memory_rate
