"""How libraries say that a weight is packed, as :class:`.stored.Packing`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from .stored import Packing

BLOCK = 128
PER_CHANNEL = 1 << 20  # weights to a scale where a row has one: so few scales that they weigh nothing
NVFP4_WEIGHTS = Packing("w4a16", 16, 1.0)  # weights in NVFP4, products in 16 bits


class UnknownFormatError(Exception):
    """Words that no reader knows; what they are."""


def weight_only(bits: int, group: int = 0, symmetric: bool = True, scale_bytes: float = 2.0) -> Packing:
    """Whole numbers of 4 or 8 bits with a scale, and without symmetry a zero, for a group of weights."""
    if bits not in (4, 8):
        raise UnknownFormatError(f"weights of {bits} bits")
    return Packing(f"w{bits}a16", PER_CHANNEL if group < 0 else group, scale_bytes + (0.0 if symmetric else bits / 8))


def fp8_blocks(block: Sequence[int]) -> Packing:
    """FP8 with a scale for each block of weights; MXFP8 is that of 32 in a row."""
    size = prod(map(int, block))
    return Packing("mxfp8") if size == 32 else Packing("fp8_block", 0 if size == BLOCK * BLOCK else size)


def group_packing(group: Mapping[str, Any], usual_format: str = "") -> Packing:
    """A group of compressed-tensors (``QuantizationScheme``): what weights and what comes in is stored as."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    bits, kind = int(weights.get("num_bits", 8)), str(weights.get("type", "int"))
    size = int(weights.get("group_size") or 0)
    into = f"{inputs.get('type', 'int')}{inputs.get('num_bits', 8)}" if inputs else ""
    microscaled = "mxfp" in str(group.get("format") or usual_format) or size == 32
    if (kind, bits) == ("float", 4):
        return _of_4_bits(into, microscaled)
    if (kind, bits) == ("float", 8):
        return _of_8_bits(into, microscaled, weights.get("block_structure"), size)
    whole = {(4, "float8"): "w4a8", (8, "int8"): "int8", (bits, ""): f"w{bits}a16"}
    if kind != "int" or (bits, into) not in whole:
        raise UnknownFormatError(f"weights of {kind}{bits} with activations in {into or '16 bits'}")
    rowwise = weights.get("strategy") == "channel"
    made = weight_only(bits, size or (-1 if rowwise else 0), bool(weights.get("symmetric", True)))
    return Packing(whole[bits, into], made.group, made.scale_bytes)


def _of_4_bits(into: str, microscaled: bool) -> Packing:
    if microscaled:  # MXFP4 on both sides runs by kernels that unpack weights (CompressedTensorsW4A4Mxfp4)
        return Packing("mxfp4a8" if into == "float8" else "mxfp4a16")
    return Packing("nvfp4") if into == "float4" else Packing("w4a8", 16, 1.0) if into else NVFP4_WEIGHTS


def _of_8_bits(into: str, microscaled: bool, block: Any, size: int) -> Packing:
    if not into:
        return Packing("w8a16", PER_CHANNEL)
    if microscaled:
        return Packing("mxfp8")
    sides = [int(each) for each in block.split("x")] if isinstance(block, str) else block
    return fp8_blocks(sides) if sides else Packing("fp8", size)


ALGORITHMS = {
    "FP8": Packing("fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": Packing("fp8"),
    "FP8_PB_WO": Packing("fp8_block"),
    "FP8_BLOCK_SCALES": Packing("fp8_block"),
    "NVFP4": Packing("nvfp4"),
    "NVFP4_AWQ": Packing("nvfp4"),
    "W4A16_NVFP4": NVFP4_WEIGHTS,
    "W4A8_NVFP4_FP8": Packing("w4a8", 16, 1.0),
    "MXFP8": Packing("mxfp8"),
    "W4A16_MXFP4": Packing("mxfp4a16"),
    "W4A8_MXFP4_MXFP8": Packing("mxfp4a8"),
    "W4A16_AWQ": Packing("w4a16"),
    "W4A8_AWQ": Packing("w4a8"),
    "INT8_SQ": Packing("int8"),
    "W8A8_SQ_PER_CHANNEL": Packing("int8"),
    "W8A16": Packing("w8a16"),
    "W4A16": Packing("w4a16"),
    "UNQUANTIZED": Packing(),
    "NONE": Packing(),
}


def algorithm(word: Any, group: Any = None) -> Packing:
    """A ``quant_algo`` of ModelOpt and TensorRT-LLM."""
    name = str(word or "NONE").upper()
    if name not in ALGORITHMS:
        raise UnknownFormatError(f"quant_algo={word!r}")
    found = ALGORITHMS[name]
    sized = found.format in ("w4a16", "w8a16", "w4a8") and not found.group and isinstance(group, int)
    return Packing(found.format, group, found.scale_bytes) if sized else found
