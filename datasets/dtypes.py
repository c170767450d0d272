"""Number formats by the names opcast uses for them, and what one element weighs.

A dtype is a plain string everywhere (``"bf16"``); this module is the one place that knows its size.
"""

from __future__ import annotations

from typing import Final

from .near import meant

BITS: Final[dict[str, int]] = {
    "fp64": 64,
    "fp32": 32,
    "tf32": 32,  # stored as fp32, multiplied on tensor cores with a 10-bit mantissa
    "bf16": 16,
    "fp16": 16,
    "fp8": 8,  # e4m3, one scale per tensor
    "fp8_e5m2": 8,
    "fp8_block": 8,  # e4m3, one scale per 128x128 block (1x128 for activations)
    "mxfp8": 8,
    "int8": 8,
    "mxfp4": 4,
    "nvfp4": 4,
    "int4": 4,
    "w8a16": 16,  # int8 weights, 16-bit activations and arithmetic
    "w4a16": 16,  # int4 weights in groups, 16-bit activations and arithmetic
    "mxfp4a16": 16,  # mxfp4 weights, 16-bit activations and arithmetic
    "w4a8": 8,  # int4 weights, fp8 activations and arithmetic
    "mxfp4a8": 8,  # mxfp4 weights, mxfp8 activations and arithmetic
    "int64": 64,
    "int32": 32,
    "int16": 16,
    "uint8": 8,
    "bool": 8,
    "nf4": 4,  # of bitsandbytes: stored in blocks of 64, never multiplied
}

WEIGHT_BITS: Final[dict[str, int]] = {"w8a16": 8, "w4a16": 4, "mxfp4a16": 4, "w4a8": 4, "mxfp4a8": 4}
"""Of formats whose weights weigh less than what ``BITS`` says of activations."""

ALIASES: Final[dict[str, str]] = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8_e5m2",
    "fp4": "nvfp4",
    "long": "int64",
}


def canonical_dtype(name: str) -> str:
    """The opcast name of a dtype given by any usual name; ValueError lists the known ones."""
    key = name.strip().lower().removeprefix("torch.")
    key = ALIASES.get(key, key)
    if key not in BITS:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(BITS)}{meant(name, BITS)}")
    return key


def itemsize(dtype: str) -> float:
    """Bytes of one element (0.5 for the 4-bit formats)."""
    return BITS[dtype] / 8


def weight_itemsize(dtype: str) -> float:
    """Bytes of one weight of a matrix product in this dtype."""
    return WEIGHT_BITS.get(dtype, BITS[dtype]) / 8


def product_dtype(dtype: str) -> str:
    """The usual output of products in this dtype: bf16 from floats of 8 bits or fewer, else the same."""
    small = dtype in WEIGHT_BITS or (BITS[dtype] <= 8 and "fp" in dtype)
    return "bf16" if small else dtype
