"""Kernels that serving engines run around attention: vLLM's rows, products and experts, and DeepGEMM's products."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ...datasets.ops import Op
from .attention import CUDA
from .base import Inputs, Run, Unsupported, case, torch_dtype
from .gemm import NT, expert_ends
from .moe import gumbel_scores, share
from .packages import package
from .rows import EPSILON, matrix, same_dtype

if TYPE_CHECKING:
    import torch

BLOCK = 128  # side of a block of fp8 weights that share one scale, and length of one of activations
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
    _vllm(inputs)  # registers torch.ops._C
    x = inputs.normal(op.rows, 2 * op.cols, dtype=op.dtype)

    def run() -> torch.Tensor:
        out = x.new_empty(op.rows, op.cols)
        torch.ops._C.silu_and_mul(out, x)
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
    """e4m3 with one scale for each row."""
    return partial(_vllm(inputs).scaled_fp8_quant, matrix(op, inputs), use_per_token_if_dynamic=True)


# --- products ------------------------------------------------------------------------------------------


@case("gemm", "vllm:cutlass_scaled_mm", devices=CUDA, when=lambda op, device: op.dtype == "fp8")
def cutlass_scaled_mm(op: Op, inputs: Inputs) -> Run:
    """e4m3 with a scale for each row of A and each column of B."""
    import torch

    if op.layout != NT or op.batch > 1:
        raise Unsupported("scaled 8-bit products need layout=nt and batch=1")
    ops = _vllm(inputs)
    a, b = inputs.normal(op.m, op.k, dtype="fp8"), inputs.normal(op.n, op.k, dtype="fp8").t()
    scale_a = torch.ones(op.m, 1, device=inputs.device)
    scale_b = torch.ones(1, op.n, device=inputs.device)
    return partial(ops.cutlass_scaled_mm, a, b, scale_a, scale_b, torch_dtype(op.out_dtype))


def _deep_operand(inputs: Inputs, *shape: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An e4m3 operand [..., rows, k] and a scale for each ``rows`` x 128 block of it."""
    import torch

    *lead, count, k = shape
    scales = torch.ones(*lead, -(-count // rows), k // BLOCK, dtype=torch.float32, device=inputs.device)
    return inputs.normal(*shape, dtype="fp8"), scales


def _deep_check(op: Op) -> None:
    if op.layout != NT or getattr(op, "batch", 1) > 1 or op.k % BLOCK or op.n % 64:
        raise Unsupported("DeepGEMM needs layout=nt, batch=1, k in multiples of 128 and n in multiples of 64")
    if op.out_dtype != "bf16":
        raise Unsupported("DeepGEMM writes bf16: set out_dtype=bf16")


@case("gemm", "deep_gemm:fp8", devices=CUDA, when=lambda op, device: op.dtype == "fp8_block")
def deep_gemm(op: Op, inputs: Inputs) -> Run:
    """DeepGEMM's product with 1x128 and 128x128 blocks."""
    import torch

    _deep_check(op)
    module = package("deep_gemm", inputs)
    a, b = _deep_operand(inputs, op.m, op.k, rows=1), _deep_operand(inputs, op.n, op.k, rows=BLOCK)
    out = torch.empty(op.m, op.n, dtype=torch.bfloat16, device=inputs.device)
    return partial(module.fp8_gemm_nt, a, b, out)


@case("grouped_gemm", "deep_gemm:fp8", devices=CUDA, when=lambda op, device: op.dtype == "fp8_block")
def deep_grouped_gemm(op: Op, inputs: Inputs) -> Run:
    """DeepGEMM's product of all experts in one kernel; each expert's rows are filled up to whole tiles, as it wants."""
    import torch

    _deep_check(op)
    module = package("deep_gemm", inputs)
    experts = padded_experts(expert_ends(op, inputs.seed), _tile_rows(module))
    a = _deep_operand(inputs, len(experts), op.k, rows=1)
    b = _deep_operand(inputs, op.experts, op.n, op.k, rows=BLOCK)
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


# --- experts -------------------------------------------------------------------------------------------


@case("fused_moe", "vllm:fused_experts", devices=CUDA, when=lambda op, device: bool(op.gated))
def fused_experts(op: Op, inputs: Inputs) -> Run:
    """vLLM's router and its experts in triton; a map skips experts of other ranks, as under expert parallelism."""
    import torch

    same_dtype(op)
    module = package("vllm.model_executor.layers.fused_moe", inputs)
    local, width = share(op)
    scores = gumbel_scores(op, inputs)
    x = inputs.normal(op.tokens, op.hidden, dtype=op.dtype)
    up = inputs.normal(local, 2 * width, op.hidden, dtype=op.dtype)
    down = inputs.normal(local, op.hidden, width, dtype=op.dtype)
    places = None
    if op.ep > 1:
        places = torch.full((op.experts,), -1, dtype=torch.int32, device=inputs.device)
        places[:local] = torch.arange(local, dtype=torch.int32, device=inputs.device)

    def run() -> torch.Tensor:
        weights, chosen = module.fused_topk(x, scores, op.topk, True)[:2]
        return module.fused_experts(x, up, down, weights, chosen, global_num_experts=op.experts, expert_map=places)

    return run
