"""Triton kernels that reduce each row of a matrix: rms_norm, softmax. Sums are in fp32."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import tile


@triton.jit
def _rms_norm(x, weight, y, rows, cols, epsilon, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = row.to(tl.int64)[:, None] * cols
    col = tl.arange(0, COLS)
    if STEPS == 1:
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        value = tl.load(x + start + col[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, axis=1) / cols + epsilon)
        gain = tl.load(weight + col, mask=col < cols, other=0.0).to(tl.float32)
        result = value * scale[:, None] * gain[None, :]
        tl.store(y + start + col[None, :], result.to(y.dtype.element_ty), mask=inside)
    else:
        squares = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for step in range(STEPS):
            first = step * COLS
            inside = (row < rows)[:, None] & (first + col < cols)[None, :]
            value = tl.load(x + start + (first + col)[None, :], mask=inside, other=0.0).to(tl.float32)
            squares += value * value
        scale = tl.rsqrt(tl.sum(squares, axis=1) / cols + epsilon)
        for step in range(STEPS):
            first = step * COLS
            inside = (row < rows)[:, None] & (first + col < cols)[None, :]
            value = tl.load(x + start + (first + col)[None, :], mask=inside, other=0.0).to(tl.float32)
            gain = tl.load(weight + first + col, mask=first + col < cols, other=0.0).to(tl.float32)
            result = value * scale[:, None] * gain[None, :]
            tl.store(y + start + (first + col)[None, :], result.to(y.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + epsilon) · weight over the last axis of a contiguous [rows, cols] matrix."""
    rows, cols = x.shape
    y = torch.empty_like(x)
    t = tile(rows, cols)
    grid = (triton.cdiv(rows, t.rows),)
    _rms_norm[grid](x, weight, y, rows, cols, epsilon, ROWS=t.rows, COLS=t.cols, STEPS=t.steps, num_warps=t.warps)
    return y


@triton.jit
def _softmax(x, y, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = row.to(tl.int64)[:, None] * cols
    col = tl.arange(0, COLS)
    lowest = -float("inf")
    if STEPS == 1:
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        value = tl.load(x + start + col[None, :], mask=inside, other=lowest).to(tl.float32)
        # A row outside the matrix is all -inf: an exponent of -inf - (-inf) would be nan, so it takes 0 instead.
        top = tl.where(row < rows, tl.max(value, axis=1), 0.0)
        power = tl.exp(value - top[:, None])
        result = power / tl.sum(power, axis=1)[:, None]
        tl.store(y + start + col[None, :], result.to(y.dtype.element_ty), mask=inside)
    else:
        top = tl.full((ROWS,), lowest, dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        for step in range(STEPS):
            first = step * COLS
            inside = (row < rows)[:, None] & (first + col < cols)[None, :]
            value = tl.load(x + start + (first + col)[None, :], mask=inside, other=lowest).to(tl.float32)
            higher = tl.maximum(top, tl.max(value, axis=1))
            higher = tl.where(row < rows, higher, 0.0)
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(value - higher[:, None]), axis=1)
            top = higher
        for step in range(STEPS):
            first = step * COLS
            inside = (row < rows)[:, None] & (first + col < cols)[None, :]
            value = tl.load(x + start + (first + col)[None, :], mask=inside, other=lowest).to(tl.float32)
            result = tl.exp(value - top[:, None]) / total[:, None]
            tl.store(y + start + (first + col)[None, :], result.to(y.dtype.element_ty), mask=inside)


def softmax(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """exp(x - max) / sum over the last axis of a contiguous [rows, cols] matrix, written in ``dtype``."""
    rows, cols = x.shape
    y = torch.empty_like(x, dtype=dtype)
    t = tile(rows, cols)
    grid = (triton.cdiv(rows, t.rows),)
    _softmax[grid](x, y, rows, cols, ROWS=t.rows, COLS=t.cols, STEPS=t.steps, num_warps=t.warps)
    return y
