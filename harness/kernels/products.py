"""A triton kernel for products in fp8 whose blocks of 128 share scales. Sums are in fp32."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import SCALE_BLOCK, product_tile


@triton.jit
def _block_scaled_mm(
    a,
    b,
    scales_a,
    scales_b,
    c,
    m,
    n,
    k,
    blocks,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Programs go down GROUP tiles of rows before they go on along n, so that what they read stays in the L2.
    tiles_m, tiles_n = tl.cdiv(m, ROWS), tl.cdiv(n, COLS)
    group = tl.program_id(0) // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    inside_group = tl.program_id(0) % (GROUP * tiles_n)
    row = (group * GROUP + inside_group % height) * ROWS + tl.arange(0, ROWS)
    first = (inside_group // height) * COLS
    col = first + tl.arange(0, COLS)
    lane = tl.arange(0, BLOCK)
    from_a = a + row.to(tl.int64)[:, None] * k + lane[None, :]
    from_b = b + col.to(tl.int64)[None, :] * k + lane[:, None]
    scale_of_row = scales_a + row.to(tl.int64) * blocks
    scale_of_tile = scales_b + (first // BLOCK) * blocks
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for step in range(blocks):
        left = k - step * BLOCK
        x = tl.load(from_a, mask=(row < m)[:, None] & (lane < left)[None, :], other=0.0)
        y = tl.load(from_b, mask=(lane < left)[:, None] & (col < n)[None, :], other=0.0)
        scale = tl.load(scale_of_row + step, mask=row < m, other=0.0) * tl.load(scale_of_tile + step)
        total += tl.dot(x, y) * scale[:, None]
        from_a += BLOCK
        from_b += BLOCK
    tl.store(
        c + row.to(tl.int64)[:, None] * n + col[None, :],
        total.to(c.dtype.element_ty),
        mask=(row < m)[:, None] & (col < n)[None, :],
    )


def block_scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scales_a: torch.Tensor, scales_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """A [m, k] times B [n, k] transposed, both e4m3 and contiguous, into ``dtype``.

    Scales are fp32: A's [m, ceil(k / 128)] for 128 elements of a row, B's [ceil(n / 128), ceil(k / 128)] for a square.
    """
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty(m, n, dtype=dtype, device=a.device)
    t = product_tile(m)
    grid = (triton.cdiv(m, t.rows) * triton.cdiv(n, t.cols),)
    _block_scaled_mm[grid](
        a,
        b,
        scales_a,
        scales_b,
        c,
        m,
        n,
        k,
        triton.cdiv(k, SCALE_BLOCK),
        BLOCK=SCALE_BLOCK,
        ROWS=t.rows,
        COLS=t.cols,
        GROUP=t.group,
        num_warps=t.warps,
        num_stages=t.stages,
    )
    return c
