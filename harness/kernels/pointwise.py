"""Triton kernels that touch each element once: silu_mul, rope, quantize. Arithmetic is in fp32."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import PER_PROGRAM, PER_WARP, power_of_two, tile

SMALLEST_MAXIMUM = 1e-12  # an all-zero block still gets a positive scale
ROUNDING = 12582912.0  # 1.5 · 2^23: adding and subtracting it rounds an fp32 to the nearest even integer


@triton.jit
def _silu_mul(x, y, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    col = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    inside = (row < rows) & (col < cols)
    gate = tl.load(x + row * 2 * cols + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * cols + cols + col, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(y + row * cols + col, result.to(y.dtype.element_ty), mask=inside)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(a) · b of a contiguous [rows, 2·cols] matrix whose halves are a and b."""
    rows, cols = x.shape[0], x.shape[1] // 2
    y = torch.empty(rows, cols, dtype=x.dtype, device=x.device)
    t = tile(rows, min(cols, PER_PROGRAM // 4))
    grid = (triton.cdiv(rows, t.rows), triton.cdiv(cols, t.cols))
    _silu_mul[grid](x, y, rows, cols, ROWS=t.rows, COLS=t.cols, num_warps=t.warps)
    return y


@triton.jit
def _rope(x, cos, sin, y, heads, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (pair < half)
    c = tl.load(cos + token * half + pair, mask=pair < half, other=0.0).to(tl.float32)
    s = tl.load(sin + token * half + pair, mask=pair < half, other=0.0).to(tl.float32)
    low = (token * heads + head) * 2 * half + pair
    a = tl.load(x + low, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + low + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + low, (a * c - b * s).to(y.dtype.element_ty), mask=inside)
    tl.store(y + low + half, (b * c + a * s).to(y.dtype.element_ty), mask=inside)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotated contiguous [tokens, heads, head_dim]; element i pairs with i + head_dim/2.

    cos and sin are [tokens, head_dim/2], one for each pair.
    """
    tokens, heads, head_dim = x.shape
    half = head_dim // 2
    y = torch.empty_like(x)
    width = power_of_two(half)
    block = max(1, min(power_of_two(heads), PER_PROGRAM // 2 // width))
    warps = max(1, min(8, 2 * block * width // PER_WARP))
    grid = (tokens, triton.cdiv(heads, block))
    _rope[grid](x, cos, sin, y, heads, half, HEADS=block, HALF=width, num_warps=warps)
    return y


@triton.jit
def _scaled(value, scale, largest, rounding, INTEGER: tl.constexpr):
    scaled = tl.minimum(tl.maximum(value / scale[:, None], -largest), largest)
    if INTEGER:
        scaled = (scaled + rounding) - rounding
    return scaled


@triton.jit
def _quantize(
    x,
    q,
    scales,
    groups,
    per_row,
    cols,
    block,
    largest,
    smallest,
    rounding,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    INTEGER: tl.constexpr,
):
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    first = (group % per_row) * block
    start = ((group // per_row).to(tl.int64) * cols + first)[:, None]
    length = tl.where(group < groups, tl.minimum(block, cols - first), 0)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    if STEPS == 1:
        value = tl.load(x + start + lane, mask=lane < length, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(value), axis=1), smallest) / largest
        scaled = _scaled(value, scale, largest, rounding, INTEGER)
        tl.store(q + start + lane, scaled.to(q.dtype.element_ty), mask=lane < length)
    else:
        top = tl.zeros((GROUPS, BLOCK), dtype=tl.float32)
        for step in range(STEPS):
            offset = step * BLOCK
            value = tl.load(x + start + offset + lane, mask=offset + lane < length, other=0.0).to(tl.float32)
            top = tl.maximum(top, tl.abs(value))
        scale = tl.maximum(tl.max(top, axis=1), smallest) / largest
        for step in range(STEPS):
            offset = step * BLOCK
            value = tl.load(x + start + offset + lane, mask=offset + lane < length, other=0.0).to(tl.float32)
            scaled = _scaled(value, scale, largest, rounding, INTEGER)
            tl.store(q + start + offset + lane, scaled.to(q.dtype.element_ty), mask=offset + lane < length)
    tl.store(scales + group, scale, mask=group < groups)


def quantize(x: torch.Tensor, block: int, dtype: torch.dtype, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous [rows, cols] matrix in ``dtype`` and its fp32 scales [rows, ceil(cols / block)].

    scale = max(abs(block)) / largest, element = x / scale; integers are rounded to the nearest even.
    """
    rows, cols = x.shape
    per_row = triton.cdiv(cols, block)
    groups = rows * per_row
    q = torch.empty_like(x, dtype=dtype)
    scales = torch.empty(rows, per_row, dtype=torch.float32, device=x.device)
    t = tile(groups, block)
    _quantize[(triton.cdiv(groups, t.rows),)](
        x,
        q,
        scales,
        groups,
        per_row,
        cols,
        block,
        largest,
        SMALLEST_MAXIMUM,
        ROUNDING,
        GROUPS=t.rows,
        BLOCK=t.cols,
        STEPS=t.steps,
        INTEGER=not dtype.is_floating_point,
        num_warps=t.warps,
    )
    return q, scales
