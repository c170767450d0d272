"""Ops on single elements and short axes: elementwise functions, reductions, rotary embedding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ...datasets.ops import FUNCTIONS, Op
from .base import Inputs, Run, Unsupported, case, torch_dtype
from .rows import same_dtype

if TYPE_CHECKING:
    import torch

Function = Callable[..., Any]

FACTOR = 1.7


@case("elementwise")
def elementwise(op: Op, inputs: Inputs) -> Run:
    """One aten op of the given cost class on ``inputs`` tensors; ``run`` makes every operand strided.

    The result is contiguous, as torch allocates it for operands that are not dense.
    """
    name = FUNCTIONS[op.fn]
    if name == "fill":
        return _fill(op, inputs)
    if op.inputs == 0:
        raise Unsupported("only fn=fill reads no tensor")
    if name == "cast":
        return _cast(op, inputs)
    function = _function(op, name, inputs.device)
    operands = [inputs.runs(op.numel, op.run, op.dtype) for _ in range(op.inputs)]
    if name == "division" and torch_dtype(op.dtype).is_floating_point:
        for operand in operands:
            operand.abs_().add_(0.5)  # roots of negative numbers and quotients by almost nothing take other paths
    return partial(function, *operands)


def _fill(op: Op, inputs: Inputs) -> Run:
    import torch

    if op.inputs:
        raise Unsupported("fn=fill reads no tensor: set inputs=0")
    dtype = torch_dtype(op.out_dtype)
    return partial(torch.full, (op.numel,), 1, dtype=dtype, device=inputs.device)


def _cast(op: Op, inputs: Inputs) -> Run:
    """``Tensor.to``, made to copy even when the dtype stays."""
    if op.inputs != 1:
        raise Unsupported("fn=cast reads one tensor: set inputs=1")
    return partial(inputs.runs(op.numel, op.run, op.dtype).to, torch_dtype(op.out_dtype), copy=True)


def _function(op: Op, name: str, device: str) -> Function:
    """The aten op that stands for a cost class, a number of tensors, and the dtypes read and written.

    A scalar operand is a tensor without dimensions: making one of a Python number would add microseconds.
    """
    scalar = partial(_scalar, op)
    source, target = torch_dtype(op.dtype), torch_dtype(op.out_dtype)
    if source == target:
        return _pick(op, name, _floating(name, scalar) if source.is_floating_point else _whole(op, name, scalar))
    return _pick(op, name, _converting(op, scalar, device) if name == "arithmetic" else {})


def _scalar(op: Op, value: float) -> torch.Tensor:
    import torch

    return torch.tensor(value, dtype=torch_dtype(op.dtype))


def _floating(name: str, scalar: Callable[..., torch.Tensor]) -> dict[int, Function]:
    import torch
    from torch.nn import functional

    functions: dict[str, dict[int, Function]] = {
        "arithmetic": {1: partial(torch.mul, scalar(FACTOR)), 2: torch.mul, 3: torch.addcmul},
        "division": {1: torch.rsqrt, 2: torch.div, 3: torch.addcdiv},
        "exponential": {1: functional.silu, 2: torch.ops.aten.silu_backward},
    }
    return functions[name]


def _whole(op: Op, name: str, scalar: Callable[..., torch.Tensor]) -> dict[int, Function]:
    """Integers and booleans."""
    import torch

    if op.dtype == "bool":
        return {1: torch.logical_not, 2: torch.logical_and} if name == "arithmetic" else {}
    divisor = scalar(3)
    functions: dict[str, dict[int, Function]] = {
        "arithmetic": {1: partial(torch.add, scalar(1)), 2: torch.mul},
        "division": {1: lambda x: torch.floor_divide(x, divisor), 2: torch.floor_divide},
        "exponential": {},
    }
    return functions[name]


def _converting(op: Op, scalar: Callable[..., torch.Tensor], device: str) -> dict[int, Function]:
    """Comparisons write booleans, a choice by mask writes floats, a running count writes integers.

    From one float to another it is what FSDP2 joins gradients with, which no cast of ATen is. What a mask chooses
    between lies on the device: ``where`` would copy a number of the host's there in every call.
    """
    import torch

    target = torch_dtype(op.out_dtype)
    if op.out_dtype == "bool":
        return {1: partial(torch.lt, scalar(FACTOR)), 2: torch.gt}
    if op.dtype == "bool" and target.is_floating_point:
        low, high = (torch.tensor(value, dtype=target, device=device) for value in (-FACTOR, FACTOR))
        return {1: lambda mask: torch.where(mask, high, low)}
    if not target.is_floating_point:
        return {1: lambda x: torch.cumsum(x, -1, dtype=target)}
    return {1: partial(_join_converted, dtype=target)} if torch_dtype(op.dtype).is_floating_point else {}


def _join_converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A gradient in the format and buffer that ranks reduce (``torch.distributed.fsdp``: ``foreach_reduce``)."""
    import torch

    return torch._chunk_cat([x], 0, 1, out=x.new_empty((1, x.numel()), dtype=dtype))


def _pick(op: Op, name: str, functions: dict[int, Function]) -> Function:
    if op.inputs not in functions:
        raise Unsupported(f"no aten op of class {name} reads {op.inputs} tensors of {op.dtype} into {op.out_dtype}")
    return functions[op.inputs]


@case("reduce")
def reduce(op: Op, inputs: Inputs) -> Run:
    """``torch.sum`` over the middle axis of [outer, length, inner], in ``out_dtype``."""
    import torch

    x = inputs.normal(op.outer, op.length, op.inner, dtype=op.dtype)
    return partial(torch.sum, x, 1, dtype=torch_dtype(op.out_dtype))


@case("rope")
def rope(op: Op, inputs: Inputs) -> Run:
    """x·cos + rotate_half(x)·sin in plain ops (two slices, neg, cat, two products, a sum), as transformers has it."""
    import torch

    same_dtype(op)
    if op.head_dim % 2:
        raise Unsupported("rope rotates pairs: head_dim must be even")
    x = inputs.normal(op.tokens, op.heads, op.head_dim, dtype=op.dtype)
    angles = inputs.normal(op.tokens, 1, op.head_dim // 2, dtype="fp32").repeat(1, 1, 2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    half = op.head_dim // 2

    def run() -> torch.Tensor:
        rotated = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * cos + rotated * sin

    return run
