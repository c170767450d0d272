"""The number formats of weights and caches that a checkpoint says it has (``quantization_config`` of a config.json)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .workload import TraceError


def weight_format(said: Mapping[str, Any] | None, name: str = "model") -> str:
    """The recipe that serves a checkpoint: ``fp8``, ``w4a16``, …; empty for weights that are stored as they compute.

    ``said`` is its ``quantization_config``. TraceError for a method that no recipe stands for: its weights would weigh
    and run as something else.
    """
    if not isinstance(said, Mapping):
        return ""
    method = str(said.get("quant_method", "")).lower()
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8_block" if said.get("weight_block_size") else "fp8"
    if method == "mxfp4":
        return "mxfp4a16"
    if method in ("gptq", "awq", "auto-round", "hqq"):
        return _weight_only(int(said.get("bits", said.get("nbits", 4))), method, name)
    if method == "bitsandbytes":
        return "int8" if said.get("load_in_8bit") else "w4a16"
    if method == "compressed-tensors":
        return _compressed(said, name)
    if method == "modelopt":
        algorithm = str(said.get("quant_algo", "")).lower()
        found = {"fp8": "fp8", "nvfp4": "nvfp4", "w4a16_awq": "w4a16", "w4a8_awq": "w4a8"}.get(algorithm)
        if found:
            return found
    raise TraceError(f"model {name}: quantization_config with quant_method={method!r} is not known; name precision=…")


def _weight_only(bits: int, method: str, name: str) -> str:
    if bits not in (4, 8):
        raise TraceError(f"model {name}: {method} with {bits} bits is not known; 4 and 8 are")
    return f"w{bits}a16"


def _compressed(said: Mapping[str, Any], name: str) -> str:
    """compressed-tensors names formats by group of modules; the first group stands for all."""
    group: Mapping[str, Any] = next(iter(dict(said.get("config_groups") or {}).values()), {})
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    bits, kind = int(weights.get("num_bits", 8)), str(weights.get("type", "int"))
    if kind == "float" and bits == 4:
        return "nvfp4"
    if kind == "float":
        return "fp8_block" if weights.get("block_structure") else "fp8"
    return "int8" if inputs and bits == 8 else _weight_only(bits, "compressed-tensors", name)


def cache_format(said: Mapping[str, Any] | None) -> str:
    """The format of keys and values that a checkpoint brings scales for: ``fp8``, ``int8``; empty where it has none."""
    if not isinstance(said, Mapping):
        return ""
    scheme = said.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and int(scheme.get("num_bits", 0)) == 8:
        return "fp8" if scheme.get("type") == "float" else "int8"
    algorithm = str(said.get("kv_cache_quant_algo") or "").lower()
    return algorithm if algorithm in ("fp8", "int8") else ""
