"""Kernels bound by memory: norms, gates, softmax, elementwise, gathers, the optimizer, copies.

Small ones do not reach the bandwidth: a launch comes first, and a compute unit draws only so many bytes a clock,
so that few rows leave most units idle.
"""

from __future__ import annotations

import numpy as np

from ...datasets.ops import FUNCTIONS
from .setting import ONE_MEMORY, Array, Dims, Setting, Terms

SECTOR_BYTES = {"cpu": 64.0, "gpu": 32.0}  # smallest piece a memory system delivers
LANES_USED = 0.5  # ordinary lanes also compute addresses, convert and reduce
TENSORS_PER_LAUNCH = 64.0  # of a multi-tensor optimizer kernel
ELEMENT_BLOCK = 1024.0  # elements that one block of threads takes
# torch.cat of tensors with gaps: two blocks of 512 threads a compute unit and tensor (getCatGrid in ATen's Shape.cu),
# whose threads take one element after the other and wait for each: 0.8 us in eager steps on H200, read off the
# profiler's traces in datasets/measured/h200.
JOIN_THREADS, JOIN_WAIT_US = 1024.0, 0.8
# Clocks of one compute unit for an element that a thread takes by itself (launch_legacy_kernel and
# launch_unrolled_kernel of ATen's CUDALoops.cuh): one whose place in memory it finds by dividing, because an operand
# has gaps or is broadcast, and one that it converts by a switch over formats. What lies contiguous in one format goes
# several elements a load, and fp32 to 16 bits has a kernel of its own (Copy.cu). Medians of rows of at least four
# million elements in datasets/measured/h200/store: 0.54 of 18 of elementwise with gaps and 0.53 of 13 of copy,
# whatever run and format, and 0.68 of six casts from 16 bits. Loads of single elements are a part of both, so the
# larger counts. No model's step is in them.
INDEXED_CLOCKS, CONVERTED_CLOCKS = 0.55, 0.68
NARROWED = ("fp32", ("bf16", "fp16"))
CAST = FUNCTIONS.index("cast")


# Clocks of one compute unit that torch.topk takes for an element of a row, and for a row: routers of 16,384 tokens in
# torch on H100 take 137, 254, 293 and 458 us for 128, 256, 288 and 512 experts, softmax and sum with them
# (FlashML-org/FreeToken, pull request 319; sbtopk::gatherTopK, a block of threads a row)
SELECTION_CLOCKS, SELECTED_ROW_CLOCKS = 12.3, 440.0


def by_rows(d: Dims, s: Setting) -> Terms:
    """Rows of a matrix, one block of threads a row."""
    rows = d.rows if hasattr(d, "rows") else d.tokens
    return _streaming(rows, 1.0 / rows, s)


def by_rows_with_weight_gradient(d: Dims, s: Setting) -> Terms:
    """A norm's backward: the weight's gradient is summed over rows by a second, smaller kernel."""
    terms = _streaming(d.rows, 1.0 / d.rows, s)
    partial = 4.0 * np.minimum(d.rows, 4.0 * s.units) * d.cols * 2.0 / (s.device.l2_gbps * 1e3)
    return Terms(terms.compute, terms.memory + partial, terms.overhead + s.device.launch_us, hints=terms.hints)


def elements(d: Dims, s: Setting) -> Terms:
    """``numel`` elements, each on its own, that lie contiguous."""
    return _flat(d.numel, ELEMENT_BLOCK, s)


def rope(d: Dims, s: Setting) -> Terms:
    return _streaming(d.tokens, 1.0 / d.tokens, s)


def elementwise(d: Dims, s: Setting) -> Terms:
    """Short contiguous runs cost whole sectors of memory, and on a GPU elements with gaps or casts clocks."""
    width = np.where(d.run > 0, d.run, d.numel) * max(s.itemsize, s.out_itemsize)
    terms = _flat(d.numel, ELEMENT_BLOCK, s, _waste(width, s))
    narrowed = s.dtype == NARROWED[0] and s.out_dtype in NARROWED[1]
    casts = (d.fn == CAST) & (s.dtype != s.out_dtype and not narrowed)  # a compiler's kernel of several is no cast
    return _each(terms, d.numel, np.maximum(np.where(d.run > 0, INDEXED_CLOCKS, 0.0), CONVERTED_CLOCKS * casts), s)


def reduce(d: Dims, s: Setting) -> Terms:
    """Sum over the middle axis: one block of threads a result; few long sums are shared by many blocks."""
    results = d.outer * d.inner
    blocks = results if s.cpu else np.maximum(results, np.ceil(results * d.length / (4.0 * ELEMENT_BLOCK)))
    return _streaming(blocks, 1.0 / blocks, s)


def embedding(d: Dims, s: Setting) -> Terms:
    return _streaming(d.tokens, 1.0 / d.tokens, s, _waste(d.hidden * s.itemsize, s))


def embedding_backward(d: Dims, s: Setting) -> Terms:
    """Zeroes the table, then adds rows with atomics: two kernels."""
    terms = _streaming(d.tokens, 1.0 / d.tokens, s)
    return Terms(terms.compute, terms.memory, terms.overhead + s.device.launch_us, hints=terms.hints)


def moe_route(d: Dims, s: Setting) -> Terms:
    """Softmax, top-k and renormalisation: several short kernels over a small matrix."""
    terms = _streaming(d.tokens, 1.0 / d.tokens, s)
    sort = d.tokens * d.experts * d.topk / (s.vector_rate * LANES_USED)
    if not s.cpu:
        clocks = d.tokens * (d.experts * SELECTION_CLOCKS + SELECTED_ROW_CLOCKS)
        sort = np.where(d.kernels > 0, np.maximum(clocks / (s.units * s.device.clock_mhz), sort), sort)
    return Terms(terms.compute + sort, terms.memory, terms.overhead + 2.0 * s.device.launch_us, hints=terms.hints)


def moe_permute(d: Dims, s: Setting) -> Terms:
    return _streaming(d.tokens * d.topk, 1.0 / (d.tokens * d.topk), s, _waste(d.hidden * s.itemsize, s))


def adamw(d: Dims, s: Setting) -> Terms:
    """One pass over parameters, gradients and moments; many small tensors take several launches."""
    terms = _flat(d.numel, ELEMENT_BLOCK, s)
    launch = s.device.dispatch_us if s.cpu else s.device.launch_us
    launches = np.ceil(d.tensors / TENSORS_PER_LAUNCH) - 1.0
    return Terms(terms.compute, terms.memory, terms.overhead + launches * launch, hints=terms.hints)


def copy(d: Dims, s: Setting) -> Terms:
    """Inside the memory at its bandwidth; to and from the host over PCIe, where a CPU has no such border."""
    width = np.where(d.run_bytes > 0, d.run_bytes, d.size_bytes)
    terms = _flat(d.size_bytes, 4096.0, s, _waste(width, s))
    if s.cpu:
        return terms
    if s.device.architecture in ONE_MEMORY:
        return _crossing(terms, d, s)
    gaps = (d.run_bytes > 0) & (d.run_bytes < d.size_bytes) & (d.joins == 0) & (d.direction == 0)
    terms = _each(terms, d.size_bytes / s.itemsize, np.where(gaps, INDEXED_CLOCKS, 0.0), s)
    rounds = np.ceil(d.size_bytes / s.itemsize / np.maximum(d.joins, 1) / (JOIN_THREADS * s.units))
    waits = np.where(d.joins > 0, rounds * JOIN_WAIT_US, 0.0)
    terms = Terms(terms.compute, np.maximum(terms.memory, waits), terms.overhead, hints=terms.hints)
    return _crossing(terms, d, s)


def _crossing(terms: Terms, d: Dims, s: Setting) -> Terms:
    """The same where a copy leaves the device or enters it, over PCIe."""
    if not s.device.pcie_gbps:
        return terms
    outside = d.direction > 0
    crossing = np.where(outside, d.size_bytes / (s.device.pcie_gbps * 1e3), 0.0)
    setup = np.where(outside, s.device.dispatch_us, 0.0)
    return Terms(terms.compute, np.maximum(terms.memory, crossing), terms.overhead + setup, hints=terms.hints)


def _each(terms: Terms, numel: Array, clocks: Array, s: Setting) -> Terms:
    """The same where each element takes a compute unit of a GPU so many clocks beside its arithmetic.

    A TPU has no threads that find an element's place: whole registers of 8 x 128 are moved (How To Scale Your Model).
    """
    if s.cpu or s.device.architecture in ONE_MEMORY:
        return terms
    compute_us = numel * clocks / (s.units * s.device.clock_mhz)
    return Terms(terms.compute + compute_us, terms.memory, terms.overhead, hints=terms.hints)


def _waste(width_bytes: Array, s: Setting) -> Array:
    """How many bytes move for each one wanted, when ``width_bytes`` lie contiguous."""
    sector = SECTOR_BYTES["cpu" if s.cpu else "gpu"]
    return np.maximum(sector / np.maximum(width_bytes, 0.5), 1.0)


def _flat(numel: Array, block: float, s: Setting, waste: Array = 1.0) -> Terms:
    """Elements in blocks of one size, the last one shorter."""
    return _streaming(np.ceil(numel / block), np.minimum(block / np.maximum(numel, 1.0), 1.0), s, waste)


def _streaming(rows: Array, share: Array, s: Setting, waste: Array = 1.0) -> Terms:
    """``rows`` blocks of threads, each with a ``share`` of all bytes: the bandwidth of all, or of units with a block.

    ``waste`` is how many bytes move for each one wanted.
    """
    rows = np.maximum(rows, 1.0)
    size, row_bytes = s.cost.bytes * waste, s.cost.bytes * share
    longest = 0.0 if s.cpu else np.ceil(rows / s.units) * row_bytes / s.unit_rate
    compute = s.cost.flops / (s.vector_rate * LANES_USED)
    hints = {"rows_per_unit": rows / s.units, "row_bytes": 1.0 + row_bytes}
    return Terms(compute, np.maximum(s.traffic_us(size), longest), s.device.launch_us, hints=hints)
