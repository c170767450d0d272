"""From a profiled operator call to an op: name, shapes, types, strides and concrete arguments in; kind and dims out.

One small function a family, chosen by the operator's name in :data:`MAPPED`. A call that looks right and still is no
op of ours raises :class:`Unmapped` with the reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..dtypes import canonical_dtype
from ..ops import kind

TYPES = {
    "c10::bfloat16": "bf16",
    "c10::half": "fp16",
    "c10::float8_e4m3fn": "fp8",
    "c10::float8_e4m3fnuz": "fp8",
    "c10::float8_e5m2": "fp8_e5m2",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "unsigned char": "uint8",
}
TF32_KERNEL = re.compile(r"tf32|s1688gemm(?!_f16|_bf16)|s1688.*f32f32")
CUBLAS_LAYOUT = re.compile(r"_(nn|nt|tn)(?=_|$|\b)")
# cuBLAS counts columns first: its first operand is our B, its second our A.
ROW_MAJOR = {"nn": "nn", "tn": "nt", "nt": "tn"}

Shape = tuple[int, ...]


class Unmapped(Exception):  # noqa: N818 (no error: an answer)
    """A call that is no op of ours. The message says why."""


@dataclass(frozen=True)
class ProfiledCall:
    """One call of an operator: what the profiler kept of its arguments, and the names of its kernels."""

    name: str
    shapes: tuple[Any, ...]
    types: tuple[str, ...]
    strides: tuple[Any, ...] = ()
    concrete: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()

    def shape(self, index: int) -> Shape:
        """Shape of the tensor at one place of the arguments; Unmapped where there is none."""
        sizes = self.shapes[index] if index < len(self.shapes) else ()
        if not isinstance(sizes, list) or not sizes or not all(isinstance(size, int) for size in sizes):
            raise Unmapped("an argument without a shape")
        return tuple(sizes)

    def given(self, index: int) -> bool:
        """Whether a tensor stands at one place of the arguments."""
        return index < len(self.shapes) and bool(self.shapes[index])

    def value(self, index: int) -> str:
        """A scalar argument as text; Unmapped where the profiler did not keep it."""
        if index >= len(self.concrete) or not self.concrete[index]:
            raise Unmapped("scalar arguments were not recorded")
        return self.concrete[index]

    def dtype(self, index: int) -> str:
        """The format of the tensor at one place; of products of fp32 on tensor cores, tf32."""
        text = self.types[index] if index < len(self.types) else ""
        try:
            return canonical_dtype(TYPES.get(text.lower(), text))
        except ValueError:
            raise Unmapped(f"type {text!r}" if text else "types were not recorded") from None

    def stride(self, index: int) -> tuple[int, ...] | None:
        """Strides of the tensor at one place, where they were recorded."""
        strides = self.strides[index] if index < len(self.strides) else ()
        return tuple(strides) if strides else None


class ProfiledOp(NamedTuple):
    """A kind, its dims (choices by name or index), its formats and the library that ran it."""

    kind: str
    dims: dict[str, int]
    dtype: str
    out_dtype: str
    library: str


def op_of(call: ProfiledCall) -> ProfiledOp:
    """What a call is in opcast's terms. Unmapped where it is nothing of ours."""
    mapper = MAPPED.get(call.name)
    if mapper is None:
        raise Unmapped("no op kind for it")
    try:
        return mapper(call)
    except (AttributeError, IndexError, TypeError, ValueError, ZeroDivisionError):
        raise Unmapped("arguments of another form than known") from None


# --- products ------------------------------------------------------------------------------------------


def _product(a: int, b: int, call: ProfiledCall, transposed: bool = False) -> ProfiledOp:
    """A product of the tensors at two places; ``transposed``: the second is a weight of [n, k]."""
    left, right = call.shape(a), call.shape(b)
    batch = left[0] if len(right) == 3 else 1
    rows = left[1:-1] if len(right) == 3 else left[:-1]
    k = left[-1]
    n = right[-2] if transposed else right[-1]
    if k != (right[-1] if transposed else right[-2]) or not all((*left, *right)):
        raise Unmapped("empty or mismatched matrices")
    layout = "nt" if transposed else _layout(call, a, b)
    dims = {"batch": batch, "m": math.prod(rows), "n": n, "k": k, "layout": _index("gemm", "layout", layout)}
    dtype = call.dtype(a)
    if dtype == "fp32" and any(TF32_KERNEL.search(name) for name in call.kernels):
        return ProfiledOp("gemm", dims, "tf32", "fp32", "blas")
    return ProfiledOp("gemm", dims, dtype, "bf16" if dtype.startswith("fp8") else dtype, "blas")


def _layout(call: ProfiledCall, a: int, b: int) -> str:
    """Which operand is transposed: by strides, else by the kernel's name, else as torch's Linear has it."""
    left, right = call.stride(a), call.stride(b)
    if left is not None and right is not None:
        if left[-1] != 1 and left[-2] == 1 and call.shape(a)[-1] > 1:
            return "tn"
        return "nt" if right[-1] != 1 and right[-2] == 1 else "nn"
    named = next((match[1] for name in call.kernels if (match := CUBLAS_LAYOUT.search(name))), "tn")
    return ROW_MAJOR[named]


# --- attention -----------------------------------------------------------------------------------------


def _attention(
    causal: int,
    library: str,
    heads_first: bool,
    call: ProfiledCall,
    ragged: tuple[int, ...] = (),
    bias: int | None = None,
) -> ProfiledOp:
    """Attention of query, key, value at places 0, 1, 2; ``causal`` is the place of the flag."""
    if any(call.given(index) for index in ragged):
        raise Unmapped("attention over sequences of several lengths")
    if bias is not None and call.given(bias):
        raise Unmapped("attention with a bias or mask")
    query, key, value = call.shape(0), call.shape(1), call.shape(2)
    if not len(query) == len(key) == len(value) == 4:
        raise Unmapped("attention over sequences of several lengths")
    heads, tokens = (1, 2) if heads_first else (2, 1)
    dims = {
        "batch": query[0], "heads_q": query[heads], "heads_kv": key[heads], "head_dim": query[3],
        "v_head_dim": value[3], "seq_q": query[tokens], "seq_kv": key[tokens],
        "causal": int(call.value(causal) in ("True", "1", "2")), "window": 0, "kv_dtype": 0,
    }  # fmt: skip
    kind_name = "attention_decode" if dims["seq_q"] == 1 else "attention_prefill"
    return ProfiledOp(kind_name, dims, call.dtype(0), call.dtype(0), library)


# --- rows ----------------------------------------------------------------------------------------------


def _rows(kind_name: str, index: int, call: ProfiledCall, library: str = "aten") -> ProfiledOp:
    """A row-wise op on the tensor at one place, over its last axis."""
    shape = call.shape(index)
    if not all(shape):
        raise Unmapped("an empty tensor")
    dims = {"rows": math.prod(shape[:-1]), "cols": shape[-1]}
    return ProfiledOp(kind_name, dims, call.dtype(index), call.dtype(index), library)


def _layer_norm(kind_name: str, index: int, weight: int, call: ProfiledCall) -> ProfiledOp:
    """A layer norm over as many trailing axes as its weight has."""
    shape = call.shape(index)
    over = len(call.shape(weight)) if call.given(weight) else 1
    dims = {"rows": math.prod(shape[:-over]), "cols": math.prod(shape[-over:])}
    return ProfiledOp(kind_name, dims, call.dtype(index), call.dtype(index), "aten")


def _softmax(kind_name: str, index: int, axis: int, call: ProfiledCall) -> ProfiledOp:
    """A softmax over the last axis; over another axis it is no op of ours."""
    last = len(call.shape(index)) - 1
    if axis < len(call.concrete) and call.concrete[axis] not in ("", "-1", str(last)):
        raise Unmapped("a softmax over another axis than the last")
    return _rows(kind_name, index, call)


def _rope(library: str, call: ProfiledCall) -> ProfiledOp:
    """(positions, query [tokens, heads·d], key, head_dim, …), in place."""
    query, key, head_dim = call.shape(1), call.shape(2), int(call.value(3))
    dims = {"tokens": query[0], "heads": (math.prod(query[1:]) + math.prod(key[1:])) // head_dim}
    return ProfiledOp("rope", {**dims, "head_dim": head_dim}, call.dtype(1), call.dtype(1), library)


# --- elements ------------------------------------------------------------------------------------------


def _elementwise(function: str, call: ProfiledCall) -> ProfiledOp:
    """Element by element, of one or two contiguous tensors of one type; smaller ones are broadcast and not counted."""
    tensors = [index for index in range(min(2, len(call.shapes))) if call.given(index)]
    if not tensors:
        raise Unmapped("an argument without a shape")
    shapes = [call.shape(index) for index in tensors]
    numel = max(math.prod(shape) for shape in shapes)
    full = [index for index, shape in zip(tensors, shapes, strict=True) if math.prod(shape) == numel]
    if numel == 0:
        raise Unmapped("an empty tensor")
    if len({call.dtype(index) for index in full}) > 1:
        raise Unmapped("operands of two types")
    if not all(_contiguous(call.shape(index), call.stride(index)) for index in full):
        raise Unmapped("operands that are not contiguous")
    fn = "arithmetic" if function == "division" and len(tensors) == 1 else function  # by a scalar: times its inverse
    dims = {"numel": numel, "inputs": len(full), "fn": _index("elementwise", "fn", fn), "run": 0}
    return ProfiledOp("elementwise", dims, call.dtype(full[0]), call.dtype(full[0]), "aten")


def _fill(call: ProfiledCall) -> ProfiledOp:
    """A constant written to one contiguous tensor."""
    shape = call.shape(0)
    if not all(shape) or not _contiguous(shape, call.stride(0)):
        raise Unmapped("an empty tensor" if not all(shape) else "operands that are not contiguous")
    dims = {"numel": math.prod(shape), "inputs": 0, "fn": _index("elementwise", "fn", "fill"), "run": 0}
    return ProfiledOp("elementwise", dims, call.dtype(0), call.dtype(0), "aten")


def _copy(call: ProfiledCall) -> ProfiledOp:
    """(destination, source): one contiguous tensor to another, in another format perhaps."""
    shape = call.shape(0)
    if call.shape(1) != shape or not all(shape):
        raise Unmapped("a copy that broadcasts" if all(shape) else "an empty tensor")
    if call.stride(0) is None or call.stride(1) is None:
        raise Unmapped("strides were not recorded")
    if not all(_contiguous(shape, call.stride(index)) for index in (0, 1)):
        raise Unmapped("operands that are not contiguous")
    dims = {"numel": math.prod(shape), "inputs": 1, "fn": _index("elementwise", "fn", "cast"), "run": 0}
    return ProfiledOp("elementwise", dims, call.dtype(1), call.dtype(0), "aten")


def _reduce(call: ProfiledCall) -> ProfiledOp:
    """A sum or mean over neighbouring axes of a contiguous tensor."""
    shape = call.shape(0)
    axes = sorted(int(text) % len(shape) for text in re.findall(r"-?\d+", call.value(1)))
    if not axes or axes != list(range(axes[0], axes[-1] + 1)):
        raise Unmapped("a reduction over axes that are not neighbours")
    if not all(shape) or not _contiguous(shape, call.stride(0)):
        raise Unmapped("an empty tensor" if not all(shape) else "operands that are not contiguous")
    outer, length = math.prod(shape[: axes[0]]), math.prod(shape[axes[0] : axes[-1] + 1])
    dims = {"outer": outer, "length": length, "inner": math.prod(shape[axes[-1] + 1 :])}
    return ProfiledOp("reduce", dims, call.dtype(0), call.dtype(0), "aten")


def _contiguous(shape: Shape, stride: tuple[int, ...] | None) -> bool:
    """Whether elements lie densely in order; taken to be so where strides were not recorded."""
    if stride is None:
        return True
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def _index(kind_name: str, dim_name: str, choice: str) -> int:
    return next(dim.choices.index(choice) for dim in kind(kind_name).dims if dim.name == dim_name)


ARITHMETIC = (
    "add add_ sub sub_ mul mul_ neg abs relu relu_ clamp clamp_ clamp_min clamp_min_ "
    "threshold_backward sigmoid_backward tanh_backward"
)
DIVISION = "div div_ sqrt sqrt_ rsqrt reciprocal"
EXPONENTIAL = "exp exp_ log log_ log2 silu silu_ tanh tanh_ sigmoid sigmoid_ sin cos"
MAPPED: dict[str, Callable[[ProfiledCall], ProfiledOp]] = {
    "aten::mm": partial(_product, 0, 1),
    "aten::addmm": partial(_product, 1, 2),
    "aten::addmm_": partial(_product, 1, 2),
    "aten::_addmm_activation": partial(_product, 1, 2),
    "aten::bmm": partial(_product, 0, 1),
    "aten::baddbmm": partial(_product, 1, 2),
    "aten::baddbmm_": partial(_product, 1, 2),
    "aten::_scaled_mm": partial(_product, 0, 1),
    "aten::linear": partial(_product, 0, 1, transposed=True),
    "aiter::gemm_a16w16": partial(_product, 0, 1, transposed=True),
    "vllm::rocm_unquantized_gemm": partial(_product, 0, 1, transposed=True),
    "aten::_scaled_dot_product_flash_attention": partial(_attention, 4, "flash", True),
    "aten::_scaled_dot_product_efficient_attention": partial(_attention, 6, "efficient", True, bias=3),
    "aten::_scaled_dot_product_cudnn_attention": partial(_attention, 6, "cudnn", True, bias=3),
    "aten::_scaled_dot_product_flash_attention_for_cpu": partial(_attention, 4, "cpu", True, bias=5),
    "aten::_flash_attention_forward": partial(_attention, 8, "flash", False, ragged=(3, 4)),
    "aten::_efficient_attention_forward": partial(_attention, 9, "efficient", False, ragged=(4, 5), bias=3),
    "flash_attn::_flash_attn_forward": partial(_attention, 5, "flash", False),
    "aten::native_layer_norm": partial(_layer_norm, "layer_norm", 0, 2),
    "aten::native_layer_norm_backward": partial(_layer_norm, "layer_norm_backward", 1, 5),
    "aten::_fused_rms_norm": partial(_layer_norm, "rms_norm", 0, 2),
    "_C::rms_norm": partial(_rows, "rms_norm", 1, library="vllm"),
    "aiter::rmsnorm": partial(_rows, "rms_norm", 1, library="aiter"),
    "sgl_kernel::rmsnorm": partial(_rows, "rms_norm", 1, library="sgl_kernel"),
    "aten::_softmax": partial(_softmax, "softmax", 0, 1),
    "aten::_log_softmax": partial(_softmax, "softmax", 0, 1),
    "aten::_softmax_backward_data": partial(_softmax, "softmax_backward", 0, 2),
    "aten::_log_softmax_backward_data": partial(_softmax, "softmax_backward", 0, 2),
    "aten::gelu": partial(_rows, "gelu", 0),
    "aten::gelu_backward": partial(_rows, "gelu_backward", 0),
    "_C::silu_and_mul": partial(_rows, "silu_mul", 0, library="vllm"),
    "sgl_kernel::silu_and_mul": partial(_rows, "silu_mul", 0, library="sgl_kernel"),
    "_C::rotary_embedding": partial(_rope, "vllm"),
    "sgl_kernel::rotary_embedding": partial(_rope, "sgl_kernel"),
    **{f"aten::{name}": partial(_elementwise, "arithmetic") for name in ARITHMETIC.split()},
    **{f"aten::{name}": partial(_elementwise, "division") for name in DIVISION.split()},
    **{f"aten::{name}": partial(_elementwise, "exponential") for name in EXPONENTIAL.split()},
    "aten::fill_": _fill,
    "aten::zero_": _fill,
    "aten::copy_": _copy,
    "aten::sum": _reduce,
    "aten::mean": _reduce,
}
"""Operators by the name that the profiler gives them."""
