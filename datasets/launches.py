"""How many operators the harness calls for one op: forms of several kernels are what eager PyTorch runs, and no other.

A backend that is not named here calls one: a kernel of a package, of torch or of a library. ``tests/harness`` counts.
"""

from __future__ import annotations

from collections.abc import Mapping

MANY = 16  # of forms whose operators depend on the op: one for each expert or chunk

OPERATORS: Mapping[tuple[str, str], int] = {
    ("rope", "torch"): 5,
    ("silu_mul", "torch"): 2,
    ("silu_mul_backward", "torch"): 3,
    ("quantize", "torch"): 7,
    ("cross_entropy", "torch"): 2,
    ("cross_entropy_backward", "torch"): 2,
    ("rms_norm_backward", "autograd"): 2,
    ("causal_conv1d", "torch"): 3,
    ("causal_conv1d_backward", "torch"): 3,
    ("mla_decode", "torch"): 3,
    ("attention_prefill", "math"): MANY,
    ("attention_decode", "math"): 10,
    ("attention_backward", "math"): 11,
    ("sparse_index_prefill", "torch"): 6,
    ("sparse_index_decode", "torch"): 6,
    ("sparse_attention_prefill", "torch"): 10,
    ("sparse_attention_decode", "torch"): 8,
    ("sparse_attention_backward", "torch"): 10,
    ("linear_attention_prefill", "torch"): MANY,
    ("linear_attention_backward", "torch"): MANY,
    ("linear_attention_decode", "torch"): 9,
    ("moe_route", "torch"): 6,
    ("moe_permute", "torch"): 3,  # of the way back; the way there is one
    ("fused_moe", "torch"): MANY,
    ("grouped_gemm", "loop"): MANY,
    ("adamw", "foreach"): 9,
    ("adamw", "loop"): 9,
}


def operators(kind: str, backend: str) -> int:
    """How many operators a backend calls for one op of a kind."""
    return OPERATORS.get((kind, backend), 1)
