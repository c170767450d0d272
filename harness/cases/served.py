"""Kernels that serving engines run around attention: vLLM's rows and products, and DeepGEMM's products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ...datasets.ops import Op
from .attention import CUDA
from .base import Inputs, Run, Unsupported, case, torch_dtype
from .gemm import NT, block_operands, expert_ends
from .packages import package
from .rows import ALL, APPLY, EPSILON, check_part, matrix, same_dtype

if TYPE_CHECKING:
    import torch

BLOCK = 128  # side of a block of fp8 weights that share one scale, and length of one of activations
SM90, SM100 = 9, 10  # major compute capabilities
FP4_BLOCK = 16  # elements of nvfp4 that share a scale
INT4_GROUP = 128  # int4 weights that share a scale
MARLIN_BLOCKS = 4  # locks for each multiprocessor: MARLIN_MAX_BLOCKS_PER_SM
PADDING = -1  # the expert of rows that only fill a tile of DeepGEMM's


def _vllm(inputs: Inputs) -> Any:
    return package("vllm._custom_ops", inputs)


# --- rows ----------------------------------------------------------------------------------------------


@case("rms_norm", "vllm:rms_norm", devices=CUDA)
def rms_norm(op: Op, inputs: Inputs) -> Run:
    """One kernel, into a result that is allocated with it."""
    import torch

    same_dtype(op)
    ops, x = _vllm(inputs), matrix(op, inputs)
    weight = inputs.normal(op.cols, dtype=op.dtype)

    def run() -> torch.Tensor:
        out = torch.empty_like(x)
        ops.rms_norm(out, x, weight, EPSILON)
        return out

    return run


@case("silu_mul", "vllm:silu_and_mul", devices=CUDA)
def silu_mul(op: Op, inputs: Inputs) -> Run:
    """Both halves read once."""
    import torch

    same_dtype(op)
    x, loaded = inputs.normal(op.rows, 2 * op.cols, dtype=op.dtype), _vllm(inputs)
    kernel = loaded.silu_and_mul if inputs.outline else torch.ops._C.silu_and_mul  # which the package registers

    def run() -> torch.Tensor:
        out = x.new_empty(op.rows, op.cols)
        kernel(out, x)
        return out

    return run


@case("rope", "vllm:rotary_embedding", devices=CUDA)
def rope(op: Op, inputs: Inputs) -> Run:
    """In place, with cosines and sines of every position in one table [positions, head_dim]."""
    import torch

    same_dtype(op)
    ops = _vllm(inputs)
    x = inputs.normal(op.tokens, op.heads * op.head_dim, dtype=op.dtype)
    angles = inputs.normal(op.tokens, op.head_dim // 2, dtype="fp32")
    table = torch.cat((angles.cos(), angles.sin()), -1).to(x.dtype)
    positions = torch.arange(op.tokens, device=x.device)
    return partial(ops.rotary_embedding, positions, x, None, op.head_dim, table, True)


@case("quantize", "vllm:scaled_fp8_quant", devices=CUDA, when=lambda op, device: op.out_dtype == "fp8" and not op.block)
def quantize(op: Op, inputs: Inputs) -> Run:
    """e4m3 with one scale for each row; of ``apply`` with one that is known, as static checkpoints have it."""
    import torch

    check_part(op, ALL, APPLY)
    options = {"scale": torch.ones(1, device=inputs.device)} if op.part == APPLY else {"use_per_token_if_dynamic": True}
    return partial(_vllm(inputs).scaled_fp8_quant, matrix(op, inputs), **options)


@case("quantize", "vllm:per_token_group_quant_fp8", devices=CUDA, when=lambda op, device: op.out_dtype == "fp8_block")
def quantize_blocks(op: Op, inputs: Inputs) -> Run:
    """e4m3 with a scale for every 128 elements of a row, laid out as the product reads them: column by column."""
    check_part(op, ALL)
    if op.block != BLOCK or op.cols % BLOCK:
        raise Unsupported(f"vLLM rounds blocks of {BLOCK} elements, of which rows must have whole ones")
    module = package("vllm.model_executor.layers.quantization.utils.fp8_utils", inputs)
    x, packed = matrix(op, inputs), inputs.capability[0] >= SM100
    if packed:
        return partial(module.per_token_group_quant_fp8_packed_for_deepgemm, x, BLOCK, use_ue8m0=True)
    scales = {"column_major_scales": True, "tma_aligned_scales": True}
    return partial(module.per_token_group_quant_fp8, x, BLOCK, use_ue8m0=False, **scales)


@case("quantize", "vllm:scaled_fp4_quant", devices=CUDA, when=lambda op, device: op.out_dtype == "nvfp4")
def quantize_fp4(op: Op, inputs: Inputs) -> Run:
    """e2m1 with an e4m3 scale for every 16 elements and one for the matrix, which is known."""
    import torch

    check_part(op, ALL, APPLY)
    if op.block not in (0, FP4_BLOCK) or op.cols % FP4_BLOCK:
        raise Unsupported(f"nvfp4 has a scale for {FP4_BLOCK} elements, of which rows must have whole ones")
    return partial(_vllm(inputs).scaled_fp4_quant, matrix(op, inputs), torch.ones(1, device=inputs.device))


# --- products ------------------------------------------------------------------------------------------


def _blocks(op: Op, device: str) -> bool:
    return bool(op.dtype == "fp8_block")


@case("gemm", "vllm:cutlass_scaled_mm", devices=CUDA, when=lambda op, device: op.dtype in ("fp8", "fp8_block"))
def cutlass_scaled_mm(op: Op, inputs: Inputs) -> Run:
    """e4m3 with a scale for each row of A and each column of B; from compute capability 9.0 on for blocks, too."""
    import torch

    if op.layout != NT or op.batch > 1:
        raise Unsupported("scaled 8-bit products need layout=nt and batch=1")
    ops = _vllm(inputs)
    if op.dtype == "fp8_block":
        return _cutlass_blocks(op, inputs, ops)
    a, b = inputs.normal(op.m, op.k, dtype="fp8"), inputs.normal(op.n, op.k, dtype="fp8").t()
    scale_a = torch.ones(op.m, 1, device=inputs.device)
    scale_b = torch.ones(1, op.n, device=inputs.device)
    return partial(ops.cutlass_scaled_mm, a, b, scale_a, scale_b, torch_dtype(op.out_dtype))


def _cutlass_blocks(op: Op, inputs: Inputs, ops: Any) -> Run:
    """A's scales lie column by column; whole blocks alone, because vLLM leaves others to another kernel."""
    if inputs.capability[0] < SM90:
        raise Unsupported("vLLM's CUTLASS multiplies blocks of fp8 from compute capability 9.0 on; before it is triton")
    if op.k % BLOCK or op.n % BLOCK:
        raise Unsupported(f"vLLM's CUTLASS multiplies whole blocks of {BLOCK}: n and k must be multiples")
    a, b, scale_a, scale_b = block_operands(op, inputs)
    by_column = scale_a.t().contiguous().t()
    return partial(ops.cutlass_scaled_mm, a, b.t(), by_column, scale_b.t(), torch_dtype(op.out_dtype))


@case("gemm", "vllm:w8a8_triton_block_scaled_mm", devices=CUDA, when=_blocks)
def vllm_triton_blocks(op: Op, inputs: Inputs) -> Run:
    """vLLM's kernel for blocks of fp8 on Ada, with the tiles that it was tuned to for this GPU and shape, if it was."""
    module = package("vllm.model_executor.layers.quantization.utils.fp8_utils", inputs)
    return _triton_product(module.w8a8_triton_block_scaled_mm, op, inputs)


@case("gemm", "sglang:w8a8_block_fp8_matmul_triton", devices=CUDA, when=_blocks)
def sglang_triton_blocks(op: Op, inputs: Inputs) -> Run:
    """SGLang's kernel for the same."""
    module = package("sglang.kernels.ops.gemm.fp8_kernel", inputs)
    return _triton_product(module.w8a8_block_fp8_matmul_triton, op, inputs)


def _triton_product(product: Callable[..., Any], op: Op, inputs: Inputs) -> Run:
    """An engine's function of the form that both have."""
    _triton_check(inputs)
    a, b, scale_a, scale_b = block_operands(op, inputs)
    return partial(product, a, b, scale_a, scale_b, [BLOCK, BLOCK], output_dtype=torch_dtype(op.out_dtype))


def _triton_check(inputs: Inputs) -> None:
    """Both engines have DeepGEMM's or CUTLASS's products in blocks from Hopper on: rows of triton would mislead."""
    if inputs.capability[0] >= SM90:
        raise Unsupported("engines multiply blocks of fp8 by triton on Ada alone; here by DeepGEMM or CUTLASS")


def _int4_check(op: Op) -> None:
    if op.layout != NT or op.batch > 1 or op.k % INT4_GROUP or op.n % 64 or op.out_dtype != "bf16":
        raise Unsupported("int4 kernels need layout=nt, batch=1, k in multiples of 128, n of 64, and write bf16")


@case("gemm", "vllm:marlin", devices=CUDA, when=lambda op, device: op.dtype == "w4a16")
def marlin(op: Op, inputs: Inputs) -> Run:
    """vLLM's Marlin kernel: int4 weights in groups of 128 along k (GPTQ), widened in registers."""
    import torch

    _int4_check(op)
    ops, types = _vllm(inputs), package("vllm.scalar_type", inputs).scalar_types
    utils = package("vllm.model_executor.layers.quantization.utils.marlin_utils", inputs)
    a = inputs.normal(op.m, op.k, dtype="bf16")
    weights = inputs.integers(op.k // 16, 2 * op.n, high=2**31 - 1, dtype="int32")
    scales = inputs.normal(op.k // INT4_GROUP, op.n, dtype="bf16")
    locks = utils.marlin_make_workspace_new(torch.device(inputs.device), MARLIN_BLOCKS)
    sizes = (types.uint4b8, op.m, op.n, op.k)
    return partial(
        ops.marlin_gemm, a, None, weights, None, scales, None, None, None, locks, *sizes, use_fp32_reduce=True
    )


@case("gemm", "vllm:machete", devices=CUDA, when=lambda op, device: op.dtype == "w4a16")
def machete(op: Op, inputs: Inputs) -> Run:
    """vLLM's Machete kernel for SM90: the same weights, in the order that it makes of them once."""
    _int4_check(op)
    ops, types = _vllm(inputs), package("vllm.scalar_type", inputs).scalar_types
    a = inputs.normal(op.m, op.k, dtype="bf16")
    packed = inputs.integers(op.n, op.k // 8, high=2**31 - 1, dtype="int32").t()
    scales = inputs.normal(op.k // INT4_GROUP, op.n, dtype="bf16")
    weights = ops.machete_prepack_B(packed, a.dtype, types.uint4b8, scales.dtype)
    return partial(ops.machete_mm, a, weights, types.uint4b8, a.dtype, b_group_scales=scales, b_group_size=INT4_GROUP)


def _deep_operand(module: Any, inputs: Inputs, *shape: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An e4m3 operand [..., rows, k] and a scale for each ``rows`` x 128 block of it.

    Scales are brought once into the layout that the kernel reads, as engines hand them over: columns aligned for the
    memory accelerator on SM90, packed powers of two on SM100. Else every call would begin with kernels that do it.
    """
    import torch

    *lead, count, k = shape
    scales = torch.ones(*lead, -(-count // rows), -(-k // BLOCK), dtype=torch.float32, device=inputs.device)
    laid = module.transform_sf_into_required_layout(
        sf=scales,
        mn=count,
        k=k,
        recipe=(1, BLOCK, BLOCK),
        num_groups=lead[0] if lead else None,
        is_sfa=rows == 1,
    )
    return inputs.normal(*shape, dtype="fp8"), laid


def _deep_check(op: Op, *out: str) -> None:
    if op.layout != NT or getattr(op, "batch", 1) > 1 or op.n % 64 or op.k % 64:
        raise Unsupported("DeepGEMM needs layout=nt, batch=1, and n and k in multiples of 64")
    if op.out_dtype not in out:
        raise Unsupported(f"DeepGEMM writes {' or '.join(out)}: set out_dtype={out[0]}")


@case("gemm", "deep_gemm:fp8", devices=CUDA, when=lambda op, device: op.dtype == "fp8_block")
def deep_gemm(op: Op, inputs: Inputs) -> Run:
    """DeepGEMM's product with 1x128 and 128x128 blocks."""
    import torch

    _deep_check(op, "bf16", "fp32")
    module = package("deep_gemm", inputs)
    a, b = _deep_operand(module, inputs, op.m, op.k, rows=1), _deep_operand(module, inputs, op.n, op.k, rows=BLOCK)
    out = torch.empty(op.m, op.n, dtype=torch_dtype(op.out_dtype), device=inputs.device)
    return partial(module.fp8_gemm_nt, a, b, out)


@case("grouped_gemm", "deep_gemm:fp8", devices=CUDA, when=lambda op, device: op.dtype == "fp8_block")
def deep_grouped_gemm(op: Op, inputs: Inputs) -> Run:
    """DeepGEMM's product of all experts in one kernel; each expert's rows are filled up to whole tiles, as it wants."""
    import torch

    _deep_check(op, "bf16")
    module = package("deep_gemm", inputs)
    experts = padded_experts(expert_ends(op, inputs.seed), _tile_rows(module))
    a = _deep_operand(module, inputs, len(experts), op.k, rows=1)
    b = _deep_operand(module, inputs, op.experts, op.n, op.k, rows=BLOCK)
    out = torch.empty(len(experts), op.n, dtype=torch.bfloat16, device=inputs.device)
    of_row = torch.tensor(experts, dtype=torch.int32, device=inputs.device)
    return partial(module.m_grouped_fp8_gemm_nt_contiguous, a, b, out, of_row)


def _tile_rows(module: Any) -> int:
    """Rows of a tile of DeepGEMM's grouped products; 2.x asks for it by another name."""
    names = ("get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout")
    return int(next(getattr(module, name) for name in names if hasattr(module, name))())


def padded_experts(ends: list[int], tile: int) -> list[int]:
    """The expert of each row when every expert's rows are filled up to whole tiles with rows of none."""
    rows: list[int] = []
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        rows += [expert] * (end - start) + [PADDING] * (-(end - start) % tile)
    return rows
