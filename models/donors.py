"""Kinds that nobody timed, as kinds that somebody did: whose kernels fall short of physics alike.

An op of such a kind is *recast* as one of its donor: of as many bytes, of the same rows, or of the same products. How
far that one falls short of its own physics, on the same device or its kin, is taken to be how far this one falls short
of its (``kinship.Kin``). What such answers miss was measured where a kind has both, tables of its own and a donor's,
and on published figures of those without tables (``tests/benchmarks/donors.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..datasets.devices import RATE_OF
from ..datasets.dtypes import itemsize
from ..datasets.vocabulary import KINDS, OpColumns

Columns = Mapping[str, np.ndarray]
Recast = Callable[[OpColumns, str], Columns]

MOST_TOPK = 8  # experts a token: with more rows or fewer, the tables of experts hold the same products
ROUNDED_COLS = 4096
APPLY = 2  # quantize.part: read 16 bits, write 8
ANY_FORMAT = ("bf16", "fp32")  # of ops that wait for memory: bytes count, whatever they mean
LARGEST = 2.0**62  # dims are whole numbers of 64 bits


@dataclass(frozen=True)
class Donor:
    """A kind whose shortfall another takes: ``recast`` makes its columns of the other's, in a format of the donor.

    ``calls`` is part of the names of backends that time the right kernel; ``share`` is the part of the shortfall that
    carries over, which published figures say where it does so ``partly``; ``out_dtype`` the donor's output where it is
    a fixed one. ``units``: the ops run on matrix units, so that formats matter.
    """

    kind: str
    recast: Recast
    calls: str = ""
    share: float = 1.0
    out_dtype: str = ""
    units: bool = False
    partly: bool = False

    def formats(self, dtype: str) -> tuple[str, ...]:
        """Formats that the donor may have learned, the best first.

        On matrix units the plain format goes before one with a scale a block, whose cost is the kernel's own affair.
        """
        return (*RATE_OF.get(dtype, ()), dtype) if self.units else (dtype, *ANY_FORMAT)


def same(ops: OpColumns, dtype: str) -> Columns:
    """The very dims."""
    return ops.columns


def as_elements(ops: OpColumns, dtype: str) -> Columns:
    """A sum of two tensors that moves as many bytes."""
    numel = _bytes(ops) / (3 * itemsize(dtype))
    return _whole("elementwise", numel=numel, inputs=2)


def as_rounding(ops: OpColumns, dtype: str) -> Columns:
    """A rounding to 8 bits by a known scale that moves as many bytes."""
    rows = _bytes(ops) / (ROUNDED_COLS * (itemsize(dtype) + 1))
    return _whole("quantize", rows=rows, cols=ROUNDED_COLS, part=APPLY)


def as_layer_norm(ops: OpColumns, dtype: str) -> Columns:
    """A norm of the same rows."""
    return _rows("layer_norm", ops.columns)


def as_softmax(ops: OpColumns, dtype: str) -> Columns:
    """A softmax of the same rows."""
    return _rows("softmax", ops.columns)


def as_experts(ops: OpColumns, dtype: str) -> Columns:
    """Gated experts with this product as their first: of as many rows, in as many experts."""
    columns = ops.columns
    experts = columns["experts"]
    topk = np.minimum(MOST_TOPK, experts)
    return _whole(
        "fused_moe",
        tokens=columns["tokens"] / topk,
        hidden=columns["k"],
        inter=columns["n"] / 2,
        topk=topk,
        experts=experts,
    )


# Five products a block of keys hide more than two, and what engines time beside a prompt (planning, the cache) is not
# in a backward pass: the part of attention's shortfall that carries over is in ``kinship.recast_share``.
BACKWARD = Donor("attention_prefill", same, units=True, partly=True)
EXPERTS = Donor(
    "fused_moe", as_experts, calls=":moe_torch_flow", units=True
)  # CUTLASS's grouped product, by TensorRT-LLM
ELEMENTS = Donor("elementwise", as_elements)
ROUNDING = Donor("quantize", as_rounding, calls=":static_scaled_fp8_quant", out_dtype="fp8")
LAYER_NORM = Donor("layer_norm", as_layer_norm)
SOFTMAX = Donor("softmax", as_softmax)

POINTWISE = (
    *("gelu", "gelu_backward", "silu_mul", "silu_mul_backward", "rope", "reduce"),
    *("adamw", "moe_permute", "copy"),
)
# Norms of roots and losses are fused in frameworks that train: PyTorch's own norm, twice as slow, says nothing of them.
DONORS: Mapping[str, tuple[Donor, ...]] = {
    "attention_backward": (BACKWARD,),
    "grouped_gemm": (EXPERTS,),
    "elementwise": (ROUNDING,),
    "layer_norm_backward": (LAYER_NORM,),
    "softmax_backward": (SOFTMAX,),
    "layer_norm": (SOFTMAX,),
    "softmax": (LAYER_NORM,),
    **dict.fromkeys(POINTWISE, (ELEMENTS, ROUNDING)),
}


def donors(kind_name: str) -> tuple[Donor, ...]:
    """The kinds that a kind may be recast as, nearest first."""
    return DONORS.get(kind_name, ())


def group(kind_name: str) -> str:
    """What kinds without tables of their own are judged with: those that move elements, or their family."""
    return "pointwise" if kind_name in POINTWISE else KINDS[kind_name].family


def able(kind_name: str, columns: Columns) -> np.ndarray:
    """Which ops [n] any donor may speak of: not copies over a bus."""
    count = len(next(iter(columns.values())))
    return columns["direction"] == 0 if kind_name == "copy" else np.ones(count, dtype=bool)


def _bytes(ops: OpColumns) -> np.ndarray:
    """Bytes that each op moves [n]."""
    return np.asarray(ops.cost.bytes, dtype=np.float64)


def _rows(donor: str, columns: Columns) -> Columns:
    """Dims of a kind that works on the same rows."""
    return _whole(donor, rows=columns["rows"], cols=columns["cols"])


def _whole(kind_name: str, **dims: np.ndarray | int) -> Columns:
    """Columns of a kind [n] from some of its dims, rounded to whole numbers of 1 or more; the others by default."""
    count = max(np.size(dim_values) for dim_values in dims.values())
    return {
        dim.name: np.broadcast_to(
            np.clip(np.round(np.asarray(dims[dim.name], dtype=np.float64)), 1.0, LARGEST)
            if dim.name in dims
            else np.asarray(dim.default, dtype=np.float64),
            (count,),
        ).astype(np.int64)
        for dim in KINDS[kind_name].dims
    }
