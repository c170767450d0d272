"""How libraries say that a weight is packed, as :class:`.stored_formats.WeightFormat`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from .stored_formats import WeightFormat

BLOCK = 128
PER_CHANNEL = 1 << 20  # weights to a scale where a row has one: so few scales that they weigh nothing
NVFP4_WEIGHTS = WeightFormat("w4a16", 16, 1.0)  # weights in NVFP4, products in 16 bits


class UnknownFormatError(Exception):
    """Words that no reader knows; what they are."""


def weight_only(bits: int, group: int = 0, symmetric: bool = True, scale_bytes: float = 2.0) -> WeightFormat:
    """Whole numbers of 4 or 8 bits with a scale, and without symmetry a zero, for a group of weights."""
    if bits not in (4, 8):
        raise UnknownFormatError(f"weights of {bits} bits")
    return WeightFormat(
        f"w{bits}a16", PER_CHANNEL if group < 0 else group, scale_bytes + (0.0 if symmetric else bits / 8)
    )


def fp8_blocks(block: Sequence[int]) -> WeightFormat:
    """FP8 with a scale for each block of weights; MXFP8 is that of 32 in a row."""
    size = prod(map(int, block))
    if size < 1:
        raise UnknownFormatError(f"blocks of {list(block)}")
    return WeightFormat("mxfp8") if size == 32 else WeightFormat("fp8_block", 0 if size == BLOCK * BLOCK else size)


def group_format(group: Mapping[str, Any], usual_format: str = "") -> WeightFormat:
    """A group of compressed-tensors (``QuantizationScheme``): what weights and what comes in is stored as."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    bits, kind = int(weights.get("num_bits", 8)), str(weights.get("type", "int"))
    size = int(weights.get("group_size") or 0)
    input_dtype = f"{inputs.get('type', 'int')}{inputs.get('num_bits', 8)}" if inputs else ""
    microscaled = "mxfp" in str(group.get("format") or usual_format) or size == 32
    if (kind, bits) == ("float", 4):
        return _of_4_bits(input_dtype, microscaled)
    if (kind, bits) == ("float", 8):
        return _of_8_bits(input_dtype, microscaled, weights.get("block_structure"), size)
    formats = {(4, "float8"): "w4a8", (8, "int8"): "int8", (bits, ""): f"w{bits}a16"}
    if kind != "int" or (bits, input_dtype) not in formats:
        raise UnknownFormatError(f"weights of {kind}{bits} with activations in {input_dtype or '16 bits'}")
    rowwise = weights.get("strategy") == "channel"
    packed = weight_only(bits, size or (-1 if rowwise else 0), bool(weights.get("symmetric", True)))
    return WeightFormat(formats[bits, input_dtype], packed.group, packed.scale_bytes)


def _of_4_bits(input_dtype: str, microscaled: bool) -> WeightFormat:
    if microscaled:  # MXFP4 on both sides runs by kernels that unpack weights (CompressedTensorsW4A4Mxfp4)
        return WeightFormat("mxfp4a8" if input_dtype == "float8" else "mxfp4a16")
    return (
        WeightFormat("nvfp4")
        if input_dtype == "float4"
        else WeightFormat("w4a8", 16, 1.0)
        if input_dtype
        else NVFP4_WEIGHTS
    )


def _of_8_bits(input_dtype: str, microscaled: bool, block: Any, size: int) -> WeightFormat:
    if not input_dtype:
        return WeightFormat("w8a16", PER_CHANNEL)
    if microscaled:
        return WeightFormat("mxfp8")
    sides = [int(side) for side in block.split("x")] if isinstance(block, str) else block
    return fp8_blocks(sides) if sides else WeightFormat("fp8", size)


ALGORITHMS = {
    "FP8": WeightFormat("fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat("fp8"),
    "FP8_PB_WO": WeightFormat("fp8_block"),
    "FP8_BLOCK_SCALES": WeightFormat("fp8_block"),
    "NVFP4": WeightFormat("nvfp4"),
    "NVFP4_AWQ": WeightFormat("nvfp4"),
    "W4A16_NVFP4": NVFP4_WEIGHTS,
    "W4A8_NVFP4_FP8": WeightFormat("w4a8", 16, 1.0),
    "MXFP8": WeightFormat("mxfp8"),
    "W4A16_MXFP4": WeightFormat("mxfp4a16"),
    "W4A8_MXFP4_MXFP8": WeightFormat("mxfp4a8"),
    "W4A16_AWQ": WeightFormat("w4a16"),
    "W4A8_AWQ": WeightFormat("w4a8"),
    "INT8_SQ": WeightFormat("int8"),
    "W8A8_SQ_PER_CHANNEL": WeightFormat("int8"),
    "W8A16": WeightFormat("w8a16"),
    "W4A16": WeightFormat("w4a16"),
    "UNQUANTIZED": WeightFormat(),
    "NONE": WeightFormat(),
}


def algorithm_format(word: Any, group: Any = None) -> WeightFormat:
    """A ``quant_algo`` of ModelOpt and TensorRT-LLM."""
    name = str(word or "NONE").upper()
    if name not in ALGORITHMS:
        raise UnknownFormatError(f"quant_algo={word!r}")
    stored = ALGORITHMS[name]
    sized = stored.name in ("w4a16", "w8a16", "w4a8") and not stored.group and isinstance(group, int)
    return WeightFormat(stored.name, group, stored.scale_bytes) if sized else stored
