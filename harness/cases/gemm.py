"""Matrix products: plain, batched, scaled 8-bit and grouped by expert.

Operands are stored as the layout says and handed over as transposed views, as ``torch.mm`` gets them under a
Linear (nt), its input gradient (nn) and its weight gradient (tn).
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

from ...datasets.dtypes import WEIGHT_BITS
from ...datasets.ops import Op
from .base import Inputs, Run, Unsupported, case, torch_dtype
from .scaled import NARROW, grouped_fp8

if TYPE_CHECKING:
    import torch

NN, NT, TN = 0, 1, 2
FP8 = ("fp8", "fp8_e5m2")
BLOCK = 128  # side of a block that shares one scale
GROUPED_KERNELS = ((9, 0), (10, 0), (10, 3))  # compute capabilities
SCALE_PADDING = 4  # cuBLAS reads the scales of 128x128 blocks in groups of four along k


def _stored(inputs: Inputs, batch: int, rows: int, cols: int, flipped: bool, dtype: str) -> torch.Tensor:
    """A [rows, cols] operand (with a batch axis when batch > 1), stored transposed when ``flipped``."""
    shape = (cols, rows) if flipped else (rows, cols)
    tensor = inputs.normal(*((batch, *shape) if batch > 1 else shape), dtype=dtype)
    return tensor.transpose(-2, -1) if flipped else tensor


@case("gemm", "cublas", devices=("cuda",), when=lambda op, device: op.dtype not in WEIGHT_BITS)
@case("gemm", "torch", devices=("cpu",))
def gemm(op: Op, inputs: Inputs) -> Run:
    """The product of two matrices by the routine that torch has for the dtype."""
    if op.dtype in FP8:
        return _tensorwise(op, inputs)
    if op.dtype == "fp8_block":
        return _blockwise(op, inputs)
    if op.dtype == "int8":
        return _int8(op, inputs)
    return NARROW.get(op.dtype, _plain)(op, inputs)


def _plain(op: Op, inputs: Inputs) -> Run:
    """``torch.mm``, or ``torch.bmm`` for a batch; a wider result only on CUDA, where cuBLAS writes it."""
    import torch

    a = _stored(inputs, op.batch, op.m, op.k, op.layout == TN, op.dtype)
    b = _stored(inputs, op.batch, op.k, op.n, op.layout == NT, op.dtype)
    product = torch.bmm if op.batch > 1 else torch.mm
    out = torch_dtype(op.out_dtype)
    if out == a.dtype:
        return partial(product, a, b)
    if inputs.device == "cpu":
        raise Unsupported(f"torch on the CPU multiplies {op.dtype} into {op.dtype}, not into {op.out_dtype}")
    return partial(product, a, b, out_dtype=out)


def _int8(op: Op, inputs: Inputs) -> Run:
    """``torch._int_mm``: 8-bit integers into 32-bit sums."""
    import torch

    if op.out_dtype != "int32" or op.batch > 1:
        raise Unsupported("torch multiplies int8 matrices one at a time and into int32: set out_dtype=int32, batch=1")
    a = _stored(inputs, 1, op.m, op.k, op.layout == TN, op.dtype)
    b = _stored(inputs, 1, op.k, op.n, op.layout == NT, op.dtype)
    return partial(torch._int_mm, a, b)


def _scaled_operands(op: Op, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """A row major and B column major, all that the 8-bit routines take. e5m2 is a gradient: only A has it.

    Of other layouts an operand lies transposed already: TransformerEngine and torchao write it so when they round it,
    which is an op of its own (``quantize`` with part=both, or a copy).
    """
    if inputs.device == "cpu":
        raise Unsupported("8-bit floating point products on the CPU are emulated: nothing to measure")
    if op.batch > 1:
        raise Unsupported("scaled 8-bit products need batch=1")
    if op.layout != NT:
        inputs.kernel = "cublas nt, operands transposed before"
    a = inputs.normal(op.m, op.k, dtype=op.dtype)
    b = inputs.normal(op.n, op.k, dtype="fp8").t()
    return a, b


def _scales(inputs: Inputs, rows: int, cols: int) -> torch.Tensor:
    return inputs.normal(rows, cols, dtype="fp32").abs_().add_(0.5)


def _tensorwise(op: Op, inputs: Inputs) -> Run:
    """``torch._scaled_mm`` with one scale for each operand.

    Forward products are accumulated fast; gradients are not, as TransformerEngine and torchao have it.
    """
    import torch

    a, b = _scaled_operands(op, inputs)
    one = torch.ones((), device=inputs.device)
    result_scale = {"scale_result": one} if op.out_dtype in FP8 else {}
    out = torch_dtype(op.out_dtype)
    return partial(torch._scaled_mm, a, b, one, one, out_dtype=out, use_fast_accum=op.layout == NT, **result_scale)


@case("gemm", "rowwise", devices=("cuda",), when=lambda op, device: op.dtype in FP8)
def rowwise(op: Op, inputs: Inputs) -> Run:
    """``torch._scaled_mm`` with a scale for each row of A and each column of B (per token, per channel)."""
    import torch

    a, b = _scaled_operands(op, inputs)
    scale_a, scale_b = _scales(inputs, op.m, 1), _scales(inputs, 1, op.n)
    out = torch_dtype(op.out_dtype)
    return partial(torch._scaled_mm, a, b, scale_a, scale_b, out_dtype=out, use_fast_accum=op.layout == NT)


def _blockwise(op: Op, inputs: Inputs) -> Run:
    """``torch.nn.functional.scaled_mm``: 1x128 blocks of A, 128x128 blocks of B (DeepSeek-V3, arXiv 2412.19437).

    cuBLAS wants A's scales with the rows contiguous, and B's with k contiguous and padded to four blocks. A block at an
    edge may be part of one. Both operands of a weight gradient (tn) are activations, in blocks of 1x128.
    """
    import torch
    from torch.nn import functional

    if not hasattr(functional, "scaled_mm"):
        raise Unsupported(f"torch {torch.__version__} has no block-scaled product; 2.10 brought it")
    a, b = _scaled_operands(op, inputs)
    blocks = -(-op.k // BLOCK)
    kind = functional.ScalingType
    scale_a = _scales(inputs, blocks, op.m).t()
    if op.layout == TN:
        scale_b, kind_b = _scales(inputs, blocks, op.n).t(), kind.BlockWise1x128
    else:
        padded = -(-blocks // SCALE_PADDING) * SCALE_PADDING
        scale_b, kind_b = _scales(inputs, -(-op.n // BLOCK), padded).t(), kind.BlockWise128x128
    if inputs.outline and (op.k % BLOCK or op.n % BLOCK):
        return lambda: None  # without memory torch counts whole blocks alone; on a GPU it counts those at edges too
    return partial(
        functional.scaled_mm,
        a,
        b,
        scale_a,
        kind.BlockWise1x128,
        scale_b,
        kind_b,
        output_dtype=torch_dtype(op.out_dtype),
    )


def block_operands(op: Op, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A [m, k] and B [n, k] in e4m3 with the scales of 1x128 and of 128x128 blocks, as triton's kernels take them."""
    if op.layout != NT or op.batch > 1:
        raise Unsupported("products in blocks of fp8 need layout=nt and batch=1")
    a, b = inputs.normal(op.m, op.k, dtype="fp8"), inputs.normal(op.n, op.k, dtype="fp8")
    blocks = -(-op.k // BLOCK)
    return a, b, _scales(inputs, op.m, blocks), _scales(inputs, -(-op.n // BLOCK), blocks)


# --- grouped by expert ---------------------------------------------------------------------------------


def expert_tokens(experts: int, tokens: int, imbalance: int) -> list[int]:
    """Tokens of each expert, the busiest first: it has ``imbalance`` percent of the mean, the rest share evenly.

    Whole tokens, so the busiest is off the stated figure by less than one. Unsupported when even one expert
    with every token is not that unbalanced.
    """
    if imbalance > 100 * experts:
        raise Unsupported(f"{experts} experts cannot be unbalanced by {imbalance} %: at most {100 * experts} %")
    busiest = max(round(tokens * imbalance / (100 * experts)), -(-tokens // experts))
    if experts == 1:
        return [tokens]
    share, extra = divmod(tokens - busiest, experts - 1)
    return [busiest, *(share + (i < extra) for i in range(experts - 1))]


def expert_ends(op: Op, seed: int) -> list[int]:
    """Row where each expert's tokens end, the busiest expert at a random place."""
    counts = expert_tokens(op.experts, op.tokens, op.imbalance)
    Random(seed).shuffle(counts)
    return list(accumulate(counts))


def _grouped_operands(op: Op, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [tokens, k] and weights [experts, k, n]; for tn [k, tokens] and the gradient [tokens, n]."""
    if op.layout == TN:
        return inputs.normal(op.tokens, op.k, dtype=op.dtype).t(), inputs.normal(op.tokens, op.n, dtype=op.dtype)
    rows = inputs.normal(op.tokens, op.k, dtype=op.dtype)
    if op.layout == NT:
        return rows, inputs.normal(op.experts, op.n, op.k, dtype=op.dtype).transpose(-2, -1)
    return rows, inputs.normal(op.experts, op.k, op.n, dtype=op.dtype)


def one_kernel_for_all() -> bool:
    """Whether torch's grouped product is one kernel on the current GPU: elsewhere it waits for the groups' ends."""
    import torch

    return not torch.cuda.is_available() or torch.cuda.get_device_capability() in GROUPED_KERNELS


@case("grouped_gemm", "torch", capturable=lambda op: one_kernel_for_all())
def grouped_gemm(op: Op, inputs: Inputs) -> Run:
    """``torch._grouped_mm``: one kernel over all experts on CUDA (bf16), a loop inside torch on the CPU."""
    import torch

    if not hasattr(torch, "_grouped_mm"):
        raise Unsupported(f"torch {torch.__version__} has no grouped product; 2.8 brought it")
    if op.dtype in FP8:
        return grouped_fp8(op, inputs, expert_ends(op, inputs.seed))
    if op.out_dtype != op.dtype:
        raise Unsupported(f"the grouped product of {op.dtype} is written in {op.dtype}, not in {op.out_dtype}")
    a, b = _grouped_operands(op, inputs)
    ends = torch.tensor(expert_ends(op, inputs.seed), dtype=torch.int32, device=inputs.device)
    return partial(torch._grouped_mm, a, b, offs=ends)


@case("grouped_gemm", "loop")
def grouped_gemm_loop(op: Op, inputs: Inputs) -> Run:
    """One ``torch.mm`` per expert that has tokens, into slices of one result: the plain way to run experts."""
    import torch

    wider = {} if op.out_dtype == op.dtype else {"out_dtype": torch_dtype(op.out_dtype)}
    if wider and (op.layout != TN or not inputs.on_gpu):
        raise Unsupported(f"a loop of products of {op.dtype} is written in {op.dtype}, not in {op.out_dtype}")
    a, b = _grouped_operands(op, inputs)
    ends = expert_ends(op, inputs.seed)
    spans = [(i, start, end) for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > start]
    if op.layout == TN:
        parts = [(a[:, start:end], b[start:end], i) for i, start, end in spans]

        def weight_gradients() -> torch.Tensor:
            out = torch.zeros(op.experts, op.k, op.n, dtype=torch_dtype(op.out_dtype), device=a.device)
            for x, dy, i in parts:
                torch.mm(x, dy, **wider, out=out[i])
            return out

        return weight_gradients
    pieces = [(a[start:end], b[i], start, end) for i, start, end in spans]

    def run() -> torch.Tensor:
        out = torch.empty(op.tokens, op.n, dtype=a.dtype, device=a.device)
        for x, w, start, end in pieces:
            torch.mm(x, w, out=out[start:end])
        return out

    return run
