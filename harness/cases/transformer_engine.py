"""TransformerEngine's own kernels, which Megatron-Core runs: called as release 2.20 calls them.

Its fp8 products read operands that were rounded along both dimensions before (``quantize`` with part=both), so that a
product of any layout is one of the layout that cuBLAS has. Gradients are summed in full precision, as its recipes say.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ...datasets.ops import Op
from .attention import CUDA, check, is_causal, window
from .base import Inputs, Run, Unsupported, case, torch_dtype
from .gemm import NN, NT, TN, expert_ends
from .packages import package
from .rows import ALL, APPLY, BOTH, EPSILON, check_part, matrix, same_dtype

if TYPE_CHECKING:
    import torch

PLAIN = ("bf16", "fp16")
ROUNDED = ("fp8", "fp8_block", "mxfp8", "nvfp4")
BLOCKS = {"fp8": 0, "fp8_block": 128, "mxfp8": 32, "nvfp4": 16}
EXPERTS_PER_CHOICE = 16  # as mixtures have: 128 for the 8 of Qwen3. The maps of rows that depend on it are small
LAYOUTS = {NT: "TN", NN: "NN", TN: "NT"}  # the engine names the operands in the order of cuBLAS


def _extension(inputs: Inputs) -> Any:
    """The compiled functions, which the package loads."""
    package("transformer_engine.pytorch", inputs)
    kernel, extension = inputs.kernel, package("transformer_engine_torch", inputs)
    inputs.kernel = kernel  # the version of the package
    return extension


def _quantizer(op_dtype: str, static_scale: bool, both: bool, inputs: Inputs) -> Any:
    """Rounds a matrix along its rows, and along its columns too (``both``), by a scale that is known or its own."""
    import torch

    tensors = package("transformer_engine.pytorch.tensor", inputs)
    ways = {"rowwise": True, "columnwise": both}
    if op_dtype == "nvfp4":
        return tensors.NVFP4Quantizer(**ways)
    e4m3 = package("transformer_engine.pytorch.constants", inputs).TE_DType[torch.float8_e4m3fn]
    if op_dtype == "mxfp8":
        return tensors.MXFP8Quantizer(e4m3, **ways)
    if op_dtype == "fp8_block":
        return tensors.Float8BlockQuantizer(e4m3, block_scaling_dim=1, **ways)
    if static_scale:
        one = torch.ones(1, dtype=torch.float32, device=inputs.device)
        return tensors.Float8Quantizer(one, torch.zeros_like(one), e4m3, **ways)
    return tensors.Float8CurrentScalingQuantizer(e4m3, device=torch.device(inputs.device), **ways)


@case("quantize", "transformer_engine:quantize", devices=CUDA, when=lambda op, device: op.out_dtype in ROUNDED)
def quantize(op: Op, inputs: Inputs) -> Run:
    """One kernel that rounds along the rows, or along both dimensions; in fp8 ``all`` finds the maximum before."""
    check_part(op, ALL, APPLY, BOTH)
    if op.block not in (0, BLOCKS[op.out_dtype]) or op.rows % 16 or op.cols % 16:
        raise Unsupported("TransformerEngine rounds by its own blocks, and rows and columns in multiples of 16")
    quantizer = _quantizer(op.out_dtype, op.part != ALL, op.part == BOTH, inputs)
    return partial(quantizer, matrix(op, inputs))


# --- products ------------------------------------------------------------------------------------------


@case("gemm", "transformer_engine:gemm", devices=CUDA, when=lambda op, device: op.dtype in (*PLAIN, *ROUNDED))
def gemm(op: Op, inputs: Inputs) -> Run:
    """``general_gemm``: a forward product, the gradient of its input (nn) or of its weight (tn)."""
    if op.batch > 1:
        raise Unsupported("TransformerEngine multiplies one matrix at a time: set batch=1")
    product = package("transformer_engine.pytorch.cpp_extensions", inputs).general_gemm
    narrow = op.dtype in ROUNDED
    plain = "bf16" if narrow else op.dtype
    first = inputs.normal(*((op.k, op.m) if op.layout == TN else (op.m, op.k)), dtype=plain)
    right = inputs.normal(*((op.n, op.k) if op.layout == NT else (op.k, op.n)), dtype=plain)
    operands = (right, first)
    if narrow:
        quantizer = _quantizer(op.dtype, True, True, inputs)
        operands = tuple(quantizer(operand) for operand in operands)
    out = torch_dtype(op.out_dtype)
    more = {"layout": LAYOUTS[op.layout], "grad": op.layout != NT, "use_split_accumulator": op.layout != NT}
    return partial(product, *operands, out_dtype=out, **more)


@case("grouped_gemm", "transformer_engine:grouped_gemm", devices=CUDA, when=lambda op, device: op.dtype in PLAIN)
def grouped_gemm(op: Op, inputs: Inputs) -> Run:
    """``general_grouped_gemm``: products of all experts on a few streams, in one call."""
    import torch

    product = package("transformer_engine.pytorch.cpp_extensions", inputs).general_grouped_gemm
    ends = expert_ends(op, inputs.seed)
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    rows = torch.split(inputs.normal(op.tokens, op.k, dtype=op.dtype), counts)
    out = torch_dtype(op.out_dtype)
    more = {"layout": LAYOUTS[op.layout], "quantization_params": [None] * op.experts, "grad": op.layout != NT}
    if op.layout == TN:
        others = torch.split(inputs.normal(op.tokens, op.n, dtype=op.dtype), counts)
        gradients = torch.empty(op.experts, op.k, op.n, dtype=out, device=inputs.device).unbind()
        return partial(product, list(others), list(rows), list(gradients), out_dtype=out, m_splits=counts, **more)
    shape = (op.n, op.k) if op.layout == NT else (op.k, op.n)
    weights = [inputs.normal(*shape, dtype=op.dtype) for _ in range(op.experts)]
    whole_out = torch.empty(op.tokens, op.n, dtype=out, device=inputs.device)
    return partial(
        product, weights, list(rows), [whole_out], out_dtype=out, m_splits=counts, single_output=True, **more
    )


# --- rows ----------------------------------------------------------------------------------------------


def _normed(op: Op, inputs: Inputs) -> tuple[Any, torch.Tensor, torch.Tensor, Any]:
    """The extension, a matrix, a weight, and the engine's name of their dtype."""
    same_dtype(op)
    constants = package("transformer_engine.pytorch.constants", inputs)
    x, weight = matrix(op, inputs), inputs.normal(op.cols, dtype=op.dtype)
    return _extension(inputs), x, weight, constants.TE_DType[x.dtype]


@case("rms_norm", "transformer_engine:rmsnorm", devices=CUDA, when=lambda op, device: op.dtype in PLAIN)
def rms_norm(op: Op, inputs: Inputs) -> Run:
    """The engine's own kernel, written in the operands' dtype."""
    extension, x, weight, dtype = _normed(op, inputs)
    return partial(extension.rmsnorm_fwd, x, weight, EPSILON, None, None, dtype, 0, False)


@case("rms_norm_backward", "transformer_engine:rmsnorm", devices=CUDA, when=lambda op, device: op.dtype in PLAIN)
def rms_norm_backward(op: Op, inputs: Inputs) -> Run:
    """Gradients of x and the weight."""
    import torch

    extension, x, weight, _ = _normed(op, inputs)
    deviations = torch.ones(op.rows, dtype=torch.float32, device=inputs.device)
    return partial(extension.rmsnorm_bwd, matrix(op, inputs), x, deviations, weight, 0, False)


@case("silu_mul", "transformer_engine:swiglu", devices=CUDA, when=lambda op, device: op.dtype in PLAIN)
def silu_mul(op: Op, inputs: Inputs) -> Run:
    """Both halves of a row read once."""
    same_dtype(op)
    return partial(_extension(inputs).swiglu, inputs.normal(op.rows, 2 * op.cols, dtype=op.dtype), None)


@case("silu_mul_backward", "transformer_engine:swiglu", devices=CUDA, when=lambda op, device: op.dtype in PLAIN)
def silu_mul_backward(op: Op, inputs: Inputs) -> Run:
    """Gradients of both halves in one kernel."""
    same_dtype(op)
    x = inputs.normal(op.rows, 2 * op.cols, dtype=op.dtype)
    return partial(_extension(inputs).dswiglu, matrix(op, inputs), x, None)


@case("rope", "transformer_engine:rope", devices=CUDA, when=lambda op, device: op.dtype in PLAIN)
def rope(op: Op, inputs: Inputs) -> Run:
    """``apply_rotary_pos_emb`` with its fused kernel, on [tokens, 1, heads, head_dim]."""
    same_dtype(op)
    module = package("transformer_engine.pytorch.attention.rope", inputs)
    x = inputs.normal(op.tokens, 1, op.heads, op.head_dim, dtype=op.dtype)
    angles = inputs.normal(op.tokens, 1, 1, op.head_dim, dtype="fp32")
    return partial(module.apply_rotary_pos_emb, x, angles, tensor_format="sbhd", fused=True)


@case("moe_permute", "transformer_engine:permute", devices=CUDA, when=lambda op, device: op.dtype in PLAIN)
def permute(op: Op, inputs: Inputs) -> Run:
    """``moe_permute`` by a mask [tokens, experts], which makes the map of rows first, and ``moe_unpermute`` by that."""
    import torch

    same_dtype(op)
    module = package("transformer_engine.pytorch", inputs)
    scores = inputs.normal(op.tokens, EXPERTS_PER_CHOICE * op.topk, dtype="fp32")
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(op.topk, dim=-1)[1], True)
    x = inputs.normal(op.tokens, op.hidden, dtype=op.dtype)
    there = partial(module.moe_permute, x, chosen, op.tokens * op.topk, map_type="mask")
    if op.direction == 0:
        return there
    rows, places = there()
    return partial(module.moe_unpermute, rows, places, scores, x.shape, map_type="mask")


# --- attention -----------------------------------------------------------------------------------------


def _attention(op: Op, inputs: Inputs) -> tuple[Any, list[torch.Tensor]]:
    """The engine's module and operands [batch, seq, heads, dim]; it chooses FlashAttention or cuDNN by itself."""
    check(op)
    if op.causal and not is_causal(op) and op.seq_q > 1 and not window(op):
        raise Unsupported("TransformerEngine trains on whole sequences: set seq_kv=seq_q")
    module = package("transformer_engine.pytorch", inputs)
    layer = module.DotProductAttention(
        op.heads_q,
        op.head_dim if op.head_dim == op.v_head_dim else (op.head_dim, op.v_head_dim),
        num_gqa_groups=op.heads_kv,
        qkv_format="bshd",
        attn_mask_type="causal" if op.causal else "no_mask",
        window_size=(window(op) - 1, 0) if window(op) else None,
    )
    shapes = ((op.seq_q, op.heads_q, op.head_dim), (op.seq_kv, op.heads_kv, op.head_dim))
    operands = [inputs.normal(op.batch, *shape, dtype=op.dtype) for shape in shapes]
    return layer, [*operands, inputs.normal(op.batch, op.seq_kv, op.heads_kv, op.v_head_dim, dtype=op.dtype)]


@case("attention_prefill", "transformer_engine:attention", devices=CUDA, when=lambda op, device: op.dtype in PLAIN)
def attention(op: Op, inputs: Inputs) -> Run:
    """``DotProductAttention`` without gradients."""
    layer, operands = _attention(op, inputs)
    return partial(layer, *operands)


@case(
    "attention_backward",
    "transformer_engine:attention",
    devices=CUDA,
    when=lambda op, device: op.dtype in PLAIN,
    capturable=lambda op: False,
)
def attention_backward(op: Op, inputs: Inputs) -> Run:
    """Autograd's pass over ``DotProductAttention``."""
    import torch

    layer, operands = _attention(op, inputs)
    operands = [operand.requires_grad_() for operand in operands]
    with torch.enable_grad():
        out = layer(*operands)
    if inputs.outline:
        return lambda: out
    return partial(torch.autograd.grad, out, operands, torch.ones_like(out), retain_graph=True)
