"""Number formats by the names opcast uses for them, and what one element weighs.

A dtype is a plain string everywhere (``"bf16"``); this module is the one place that knows its size.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

from .near import meant

T = TypeVar("T")
MIN_WEIGHT_BITS, MAX_WEIGHT_BITS = 1.0, 12.0  # of formats that store weights alone in fewer bits
_BITS_IN_NAME = re.compile(r"(?P<of>w|int)(?P<bits>\d{1,2}(\.\d{1,4})?)(?P<activations>(a16)?)")


def weight_bits(name: str) -> float:
    """Bits of a weight of a format that says them in its name, scales included: 4.84 of ``w4.84a16``; 0 of any other.

    ``int4.84`` is what such weights are stored as.
    """
    match = _BITS_IN_NAME.fullmatch(name)
    if not match or (match["of"] == "w") != bool(match["activations"]):
        return 0.0
    bits = float(match["bits"])
    return bits if MIN_WEIGHT_BITS <= bits <= MAX_WEIGHT_BITS else 0.0


def family_format(name: str) -> str:
    """The format with a row in :data:`BITS` that stands for one that says its bits in its name; itself of any other."""
    bits = 0.0 if name in _NAMED_BITS else weight_bits(name)
    if not bits:
        return name
    size = 4 if bits <= 6 else 8
    return f"w{size}a16" if name.startswith("w") else f"int{size}"


class ByFormat(dict[str, T]):
    """What is known of formats by name; of those that say their bits (``w4.84a16``) by ``rule``, where there is one."""

    def __init__(self, named: dict[str, T], rule: Callable[[str], T | None]) -> None:
        super().__init__(named)
        self._rule = rule

    def __missing__(self, name: str) -> T:
        value = self._rule(name) if isinstance(name, str) else None
        if value is None:
            raise KeyError(name)
        return value

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and self._rule(name) is not None)

    def get(self, name: str, default: Any = None, /) -> Any:
        """The value of a name, or the default."""
        try:
            return self[name]
        except KeyError:
            return default


_NAMED_BITS: Final[dict[str, float]] = {
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

BITS: Final[ByFormat[float]] = ByFormat(
    _NAMED_BITS, lambda name: (16.0 if name.startswith("w") and weight_bits(name) else weight_bits(name)) or None
)
"""Bits of an element that is stored or computed with: of ``w4.84a16`` 16, its activations'; of ``int4.84`` 4.84."""

WEIGHT_BITS: Final[ByFormat[float]] = ByFormat(
    {"w8a16": 8.0, "w4a16": 4.0, "mxfp4a16": 4.0, "w4a8": 4.0, "mxfp4a8": 4.0},
    lambda name: (weight_bits(name) or None) if name.startswith("w") else None,
)
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
    return (WEIGHT_BITS if dtype in WEIGHT_BITS else BITS)[dtype] / 8


def product_dtype(dtype: str) -> str:
    """The usual output of products in this dtype: bf16 from floats of 8 bits or fewer, else the same."""
    small = dtype in WEIGHT_BITS or (BITS[dtype] <= 8 and "fp" in dtype)
    return "bf16" if small else dtype
