"""Ops on the rows of a matrix: norms, softmax, gated and plain activations, quantization, losses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ...datasets.ops import KINDS, Op
from .base import Inputs, Run, Unsupported, case, torch_dtype

if TYPE_CHECKING:
    import torch

EPSILON = 1e-5
LARGEST = {"fp8": 448.0, "fp8_e5m2": 57344.0, "fp8_block": 448.0, "int8": 127.0}


def same_dtype(op: Op) -> None:
    """Unsupported when the result would have another dtype than the operands."""
    if op.out_dtype != op.dtype:
        raise Unsupported(f"torch writes {op.kind} of {op.dtype} in {op.dtype}, not in {op.out_dtype}")


def matrix(op: Op, inputs: Inputs) -> torch.Tensor:
    """One [rows, cols] operand."""
    return inputs.normal(op.rows, op.cols, dtype=op.dtype)


@case("rms_norm")
def rms_norm(op: Op, inputs: Inputs) -> Run:
    """``F.rms_norm``: fused on CUDA from torch 2.9, a handful of elementwise ops on the CPU."""
    from torch.nn import functional

    same_dtype(op)
    weight = inputs.normal(op.cols, dtype=op.dtype)
    return partial(functional.rms_norm, matrix(op, inputs), (op.cols,), weight, EPSILON)


@case("rms_norm_backward")
def rms_norm_backward(op: Op, inputs: Inputs) -> Run:
    """aten's fused backward for x and the weight on CUDA; autograd's pass on the CPU, where nothing is fused."""
    import torch

    if inputs.device == "cpu":
        return rms_norm_autograd(op, inputs)
    same_dtype(op)
    if not hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        raise Unsupported(f"torch {torch.__version__} has no fused rms_norm; 2.9 brought it. Measure backend autograd")
    x, weight, dy = matrix(op, inputs), inputs.normal(op.cols, dtype=op.dtype), matrix(op, inputs)
    with torch.no_grad():
        _, rstd = torch.ops.aten._fused_rms_norm(x, [op.cols], weight, EPSILON)
    return partial(torch.ops.aten._fused_rms_norm_backward, dy, x, [op.cols], rstd, weight, [True, True])


@case("rms_norm_backward", "autograd", devices=("cuda",), capturable=lambda op: False)
def rms_norm_autograd(op: Op, inputs: Inputs) -> Run:
    """Autograd's pass over ``F.rms_norm``, its engine included."""
    import torch
    from torch.nn import functional

    same_dtype(op)
    x, weight = matrix(op, inputs).requires_grad_(), inputs.normal(op.cols, dtype=op.dtype).requires_grad_()
    with torch.enable_grad():
        out = functional.rms_norm(x, (op.cols,), weight, EPSILON)
    return partial(torch.autograd.grad, out, (x, weight), matrix(op, inputs), retain_graph=True)


@case("layer_norm")
def layer_norm(op: Op, inputs: Inputs) -> Run:
    """``F.layer_norm`` with weight and bias."""
    from torch.nn import functional

    same_dtype(op)
    weight, bias = inputs.normal(op.cols, dtype=op.dtype), inputs.normal(op.cols, dtype=op.dtype)
    return partial(functional.layer_norm, matrix(op, inputs), (op.cols,), weight, bias, EPSILON)


@case("layer_norm_backward")
def layer_norm_backward(op: Op, inputs: Inputs) -> Run:
    """``aten.native_layer_norm_backward`` for x, weight and bias, from the saved mean and deviation."""
    import torch

    same_dtype(op)
    weight, bias = inputs.normal(op.cols, dtype=op.dtype), inputs.normal(op.cols, dtype=op.dtype)
    x, dy = matrix(op, inputs), matrix(op, inputs)
    with torch.no_grad():
        _, mean, rstd = torch.native_layer_norm(x, (op.cols,), weight, bias, EPSILON)
    backward = torch.ops.aten.native_layer_norm_backward
    return partial(backward, dy, x, [op.cols], mean, rstd, weight, bias, [True, True, True])


@case("softmax")
def softmax(op: Op, inputs: Inputs) -> Run:
    """``torch.softmax`` over the last axis; a wider ``out_dtype`` is its ``dtype`` argument, as models pass it."""
    import torch

    wider = None if op.out_dtype == op.dtype else torch_dtype(op.out_dtype)
    return partial(torch.softmax, matrix(op, inputs), -1, dtype=wider)


@case("softmax_backward")
def softmax_backward(op: Op, inputs: Inputs) -> Run:
    """``torch._softmax_backward_data`` from the saved result."""
    import torch

    same_dtype(op)
    saved = torch.softmax(matrix(op, inputs), -1)
    return partial(torch._softmax_backward_data, matrix(op, inputs), saved, -1, saved.dtype)


@case("silu_mul")
def silu_mul(op: Op, inputs: Inputs) -> Run:
    """``F.silu(a) * b`` on the two halves of each row: two aten ops and one intermediate, as eager models run it."""
    from torch.nn import functional

    same_dtype(op)
    gate, up = inputs.normal(op.rows, 2 * op.cols, dtype=op.dtype).chunk(2, -1)
    return lambda: functional.silu(gate) * up


@case("silu_mul_backward")
def silu_mul_backward(op: Op, inputs: Inputs) -> Run:
    """What autograd runs for it: two products and ``aten.silu_backward``, with silu(a) saved by the forward."""
    import torch
    from torch.nn import functional

    same_dtype(op)
    gate, up = inputs.normal(op.rows, 2 * op.cols, dtype=op.dtype).chunk(2, -1)
    activated, dy = functional.silu(gate), matrix(op, inputs)
    backward = torch.ops.aten.silu_backward
    return lambda: (backward(dy * up, gate), dy * activated)


@case("gelu")
def gelu(op: Op, inputs: Inputs) -> Run:
    """``F.gelu`` in its default form, through the error function."""
    from torch.nn import functional

    same_dtype(op)
    return partial(functional.gelu, matrix(op, inputs))


@case("gelu_backward")
def gelu_backward(op: Op, inputs: Inputs) -> Run:
    """``aten.gelu_backward``."""
    import torch

    same_dtype(op)
    return partial(torch.ops.aten.gelu_backward, matrix(op, inputs), matrix(op, inputs))


ALL, SCALE, APPLY, BOTH = range(4)  # parts of rounding


def check_part(op: Op, *parts: int) -> None:
    """Unsupported for a part of rounding that a kernel does not do by itself."""
    if op.part not in parts:
        choices = next(dim for dim in KINDS["quantize"].dims if dim.name == "part").choices
        able = " or ".join(choices[part] for part in parts)
        raise Unsupported(f"this kernel does part={able}, not {choices[op.part]}")


@case("quantize")
def quantize(op: Op, inputs: Inputs) -> Run:
    """Absolute maximum, division, clamp (int8: round) and cast as separate ops: quantization without a fused kernel.

    Returns the quantized matrix and fp32 scales [rows, blocks]. Unsupported when blocks do not fill a row.
    """
    check_part(op, ALL)
    if op.out_dtype not in LARGEST:
        raise Unsupported(f"quantize writes {', '.join(LARGEST)}, not {op.out_dtype}: set out_dtype")
    block = op.block or op.cols
    if op.cols % block:
        raise Unsupported(f"{op.cols} columns do not divide into blocks of {block}")
    x = matrix(op, inputs).view(op.rows, op.cols // block, block)
    largest, target = LARGEST[op.out_dtype], torch_dtype(op.out_dtype)
    integers = not target.is_floating_point

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        scales = x.abs().amax(-1, keepdim=True).float() / largest
        scaled = x / scales
        scaled = (scaled.round() if integers else scaled).clamp(-largest, largest)
        return scaled.to(target).view(op.rows, op.cols), scales.squeeze(-1)

    return run


@case("cross_entropy")
def cross_entropy(op: Op, inputs: Inputs) -> Run:
    """``F.cross_entropy`` on logits: log-softmax and the mean of the targets' log-probabilities."""
    from torch.nn import functional

    same_dtype(op)
    logits = inputs.normal(op.tokens, op.vocab, dtype=op.dtype)
    return partial(functional.cross_entropy, logits, inputs.integers(op.tokens, high=op.vocab))


@case("cross_entropy_backward")
def cross_entropy_backward(op: Op, inputs: Inputs) -> Run:
    """``aten.nll_loss_backward``, which fills [tokens, vocab] with zeros and one entry a row, then log-softmax's."""
    import torch

    same_dtype(op)
    logits = inputs.normal(op.tokens, op.vocab, dtype=op.dtype)
    saved = torch.log_softmax(logits, -1)
    targets = inputs.integers(op.tokens, high=op.vocab)
    dy = torch.ones((), dtype=saved.dtype, device=saved.device)
    total = torch.full((), float(op.tokens), dtype=saved.dtype, device=saved.device)
    nll, soft = torch.ops.aten.nll_loss_backward, torch._log_softmax_backward_data
    return lambda: soft(nll(dy, saved, targets, None, 1, -100, total), saved, -1, saved.dtype)
