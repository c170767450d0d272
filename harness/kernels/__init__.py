"""Fused kernels in triton, each for one op kind. Importing this needs triton; the cases import it when they run."""

from __future__ import annotations

from .pointwise import quantize, rope, silu_mul
from .products import block_scaled_mm
from .rowwise import rms_norm, softmax

__all__ = ["block_scaled_mm", "quantize", "rms_norm", "rope", "silu_mul", "softmax"]
