"""Cases that run opcast's own triton kernels. They need CUDA; their results are tested against float64."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from ...datasets.installing import install_command
from ...datasets.ops import Op
from .base import Inputs, Run, Unsupported, case, torch_dtype
from .gemm import block_operands
from .outline import StandIn
from .rows import ALL, EPSILON, LARGEST, check_part, matrix, same_dtype

CUDA = ("cuda",)
WITHOUT_BLOCKS = (8, 12)  # major compute capabilities


def kernels(inputs: Inputs) -> Any:
    """The kernel package; Unsupported where triton is not installed."""
    if inputs.outline:
        return StandIn()
    try:
        return importlib.import_module("..kernels", __package__)
    except ImportError as error:
        raise Unsupported(f"triton is not installed ({error}): {install_command('triton')}") from error


@case("rms_norm", "triton:rms_norm", devices=CUDA)
def rms_norm(op: Op, inputs: Inputs) -> Run:
    """One program for each row, or for a few short rows."""
    same_dtype(op)
    weight = inputs.normal(op.cols, dtype=op.dtype)
    return partial(kernels(inputs).rms_norm, matrix(op, inputs), weight, EPSILON)


@case("softmax", "triton:softmax", devices=CUDA)
def softmax(op: Op, inputs: Inputs) -> Run:
    """A row in registers where it fits, two passes where it does not."""
    return partial(kernels(inputs).softmax, matrix(op, inputs), torch_dtype(op.out_dtype))


@case("silu_mul", "triton:silu_mul", devices=CUDA)
def silu_mul(op: Op, inputs: Inputs) -> Run:
    """Both halves read once, no intermediate."""
    same_dtype(op)
    return partial(kernels(inputs).silu_mul, inputs.normal(op.rows, 2 * op.cols, dtype=op.dtype))


@case("rope", "triton:rope", devices=CUDA)
def rope(op: Op, inputs: Inputs) -> Run:
    """Both halves of a head in one program; cos and sin [tokens, head_dim / 2] are read once for all heads."""
    same_dtype(op)
    if op.head_dim % 2:
        raise Unsupported("rope rotates pairs: head_dim must be even")
    x = inputs.normal(op.tokens, op.heads, op.head_dim, dtype=op.dtype)
    angles = inputs.normal(op.tokens, op.head_dim // 2, dtype="fp32")
    return partial(kernels(inputs).rope, x, angles.cos(), angles.sin())


@case("quantize", "triton:quantize", devices=CUDA)
def quantize(op: Op, inputs: Inputs) -> Run:
    """Maximum, scale and cast in one pass."""
    check_part(op, ALL)
    if op.out_dtype not in LARGEST:
        raise Unsupported(f"quantize writes {', '.join(LARGEST)}, not {op.out_dtype}: set out_dtype")
    x, target = matrix(op, inputs), torch_dtype(op.out_dtype)
    return partial(kernels(inputs).quantize, x, op.block or op.cols, target, LARGEST[op.out_dtype])


@case("gemm", "triton:block_scaled_mm", devices=CUDA, when=lambda op, device: op.dtype == "fp8_block")
def block_scaled_mm(op: Op, inputs: Inputs) -> Run:
    """Blocks of fp8 where cuBLAS has no kernel for them, as vLLM and SGLang multiply them by triton on Ada."""
    loaded = kernels(inputs)
    if inputs.capability[0] not in WITHOUT_BLOCKS:
        raise Unsupported("no stack multiplies blocks of fp8 by triton here: engines take DeepGEMM, training cuBLAS")
    return partial(loaded.block_scaled_mm, *block_operands(op, inputs), torch_dtype(op.out_dtype))
