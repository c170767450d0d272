"""Products of formats whose elements share scales in blocks: MX, NVFP4, int4 weights; and of experts in fp8.

Elements are random bits or random numbers rounded; scales are near one. A is [m, k] row major, B [k, n] stored as a
Linear stores it, [n, k].
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ...datasets.ops import Op
from .base import Inputs, Run, Unsupported, case, torch_dtype

if TYPE_CHECKING:
    import torch

TN = 2  # the layout of a weight gradient
MX_BLOCK = 32  # elements that share a power of two (OCP Microscaling Formats 1.0)
NVFP4_BLOCK = 16  # elements that share an e4m3 scale, beside one fp32 scale for the matrix
SCALE_ROWS, SCALE_COLS = 128, 4  # tiles in which tensor cores of SM100 read scales
INT4_GROUP = 128  # weights that share a scale and a zero point, as GPTQ and AWQ checkpoints have it
INT4_TILE_N, INT4_TILE_K, INT4_INNER = 8, 16, 8  # how torch packs int4 weights
ONE_E8M0 = 127  # the exponent of 1


def _nt(op: Op, inputs: Inputs, block: int, rows: int = 1) -> None:
    """Unsupported unless these formats can run the op."""
    if inputs.device == "cpu":
        raise Unsupported(f"{op.dtype} products on the CPU are emulated: nothing to measure")
    if op.layout != 1 or getattr(op, "batch", 1) > 1:
        raise Unsupported(f"{op.dtype} products need layout=nt and batch=1")
    if op.k % block or op.n % rows:
        raise Unsupported(f"{op.dtype} products need k in multiples of {block} and n in multiples of {rows}")


def _scale_numel(rows: int, blocks: int) -> int:
    """Scales of a matrix with their padding to whole tiles."""
    return -(-rows // SCALE_ROWS) * SCALE_ROWS * (-(-blocks // SCALE_COLS) * SCALE_COLS)


def _bits(inputs: Inputs, *shape: int) -> torch.Tensor:
    """Random bytes."""
    return inputs.integers(*shape, high=256, dtype="uint8")


def _scaled_mm(name: str) -> None:
    import torch
    from torch.nn import functional

    if not hasattr(functional, "scaled_mm"):
        raise Unsupported(f"torch {torch.__version__} has no {name} product; 2.10 brought it")


def mxfp8(op: Op, inputs: Inputs) -> Run:
    """``functional.scaled_mm``: e4m3 elements, a power of two for every 32 along k (SM100 and later)."""
    import torch
    from torch.nn import functional

    _scaled_mm("mxfp8")
    _nt(op, inputs, MX_BLOCK, MX_BLOCK)
    a, b = inputs.normal(op.m, op.k, dtype="fp8"), inputs.normal(op.n, op.k, dtype="fp8").t()
    scales = [
        torch.full((_scale_numel(rows, op.k // MX_BLOCK),), ONE_E8M0, dtype=torch.uint8, device=inputs.device).view(
            torch.float8_e8m0fnu
        )
        for rows in (op.m, op.n)
    ]
    kind, order = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    return partial(
        functional.scaled_mm,
        a,
        b,
        scales[0],
        kind,
        scales[1],
        kind,
        swizzle_a=order,
        swizzle_b=order,
        output_dtype=torch_dtype(op.out_dtype),
    )


def nvfp4(op: Op, inputs: Inputs) -> Run:
    """``functional.scaled_mm``: e2m1 elements in pairs, an e4m3 scale for every 16 along k, an fp32 one for all."""
    import torch
    from torch.nn import functional

    _scaled_mm("nvfp4")
    _nt(op, inputs, 2 * NVFP4_BLOCK, 2 * NVFP4_BLOCK)
    a, b = (_bits(inputs, rows, op.k // 2).view(torch.float4_e2m1fn_x2) for rows in (op.m, op.n))
    one = torch.ones((), dtype=torch.float32, device=inputs.device)
    scales = [[inputs.normal(_scale_numel(rows, op.k // NVFP4_BLOCK), dtype="fp8"), one] for rows in (op.m, op.n)]
    kinds = [functional.ScalingType.BlockWise1x16, functional.ScalingType.TensorWise]
    orders = [functional.SwizzleType.SWIZZLE_32_4_4, functional.SwizzleType.NO_SWIZZLE]
    return partial(
        functional.scaled_mm,
        a,
        b.t(),
        scales[0],
        kinds,
        scales[1],
        kinds,
        swizzle_a=orders,
        swizzle_b=orders,
        output_dtype=torch_dtype(op.out_dtype),
    )


@case("gemm", "tinygemm", devices=("cuda",), when=lambda op, device: op.dtype == "w4a16")
def int4_weights(op: Op, inputs: Inputs) -> Run:
    """``aten._weight_int4pack_mm`` of tinygemm: bf16 activations, int4 weights in groups of 128 along k."""
    import torch

    tile = INT4_TILE_K * INT4_INNER
    _nt(op, inputs, max(INT4_GROUP, tile), INT4_TILE_N)
    if op.out_dtype != "bf16":
        raise Unsupported("torch's int4 weights are multiplied into bf16: set out_dtype=bf16")
    a = inputs.normal(op.m, op.k, dtype="bf16")
    shape = (op.n // INT4_TILE_N, op.k // tile, 32, INT4_INNER // 2)
    packed = inputs.integers(*shape, high=2**31 - 1, dtype="int32")
    scales_and_zeros = inputs.normal(op.k // INT4_GROUP, op.n, 2, dtype="bf16")
    if inputs.outline:
        return lambda: None  # torch has no shape check for tensors without memory
    return partial(torch.ops.aten._weight_int4pack_mm, a, packed, INT4_GROUP, scales_and_zeros)


NARROW = {"mxfp8": mxfp8, "nvfp4": nvfp4}


def grouped_fp8(op: Op, inputs: Inputs, ends: list[int]) -> Run:
    """``torch._scaled_grouped_mm``: e4m3 rows and weights, a scale for each row and each column of each expert.

    Operands of nn and tn lie transposed already, as in plain products.
    """
    import torch

    if inputs.device == "cpu":
        raise Unsupported("8-bit floating point products on the CPU are emulated: nothing to measure")
    if op.k % 16 or op.n % 16:
        raise Unsupported("grouped products in fp8 need k and n in multiples of 16")
    if not hasattr(torch, "_scaled_grouped_mm"):
        raise Unsupported(f"torch {torch.__version__} has no grouped product in fp8; 2.8 brought it")
    if op.layout == TN:
        padded_rows = -(-op.tokens // 16) * 16  # rows in whole 16-byte lines
        rows, weights = inputs.normal(op.k, padded_rows, dtype="fp8"), inputs.normal(op.n, padded_rows, dtype="fp8").t()
        lengths: tuple[Any, Any] = op.k * op.experts, op.n * op.experts
        ends = [min(-(-end // 16) * 16, padded_rows) for end in ends]
    else:
        rows = inputs.normal(op.tokens, op.k, dtype="fp8")
        weights = inputs.normal(op.experts, op.n, op.k, dtype="fp8").transpose(-2, -1)
        lengths = op.tokens, (op.experts, op.n)
    if op.layout != 1:
        inputs.kernel = "operands transposed before"
    scale_a, scale_b = (torch.ones(length, dtype=torch.float32, device=inputs.device) for length in lengths)
    offsets = torch.tensor(ends, dtype=torch.int32, device=inputs.device)
    return partial(
        torch._scaled_grouped_mm,
        rows,
        weights,
        scale_a,
        scale_b,
        offs=offsets,
        out_dtype=torch_dtype(op.out_dtype),
        use_fast_accum=op.layout == 1,
    )
