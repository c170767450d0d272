"""The shipped model that a name means: its own name, its hub id, and what people write of both.

``meta-llama/Meta-Llama-3.1-8B-Instruct``, ``llama-3.1-8b`` and ``nvidia/Llama-3.1-8B-Instruct-NVFP4`` are the model
``llama3_1_8b``. What says how a checkpoint was tuned is left out. What says how its weights are stored is told beside
the name, as a ``quantization_config`` of the library that writes such names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .reading import read_yaml

MODEL_DIRECTORY = Path(__file__).resolve().parent.parent / "conf" / "model"
ALIASES = MODEL_DIRECTORY.parent / "aliases.yaml"

TUNED = (
    *("instruct", "chat", "it", "pt", "base", "hf", "thinking", "preview", "exp", "sft", "rl", "turbo"),
    *("meta", "nvidia", "unsloth", "quantized", "dynamic", "original", "model"),
)
DATE = re.compile(r"(0\d|1[0-2]|2[3-9])\d\d")  # MMDD, or YYMM: deepseek_v3_0324, qwen3_4b_2507
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
IN_BLOCKS = ("qwen", "deepseek-ai", "zai-org", "minimaxai", "moonshotai")  # who publishes FP8 in blocks of 128 x 128
SIXTEEN_BITS: Mapping[str, Any] = {}
FORMATS: dict[str, Mapping[str, Any]] = {
    "bnb_4bit": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "nvfp4_v2": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "fp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": {"quant_method": "mxfp4"},
    "fp8_block": BLOCKS,
    "fp8": {"quant_method": "fp8"},
    "awq_int4": {"quant_method": "awq", "bits": 4},
    "awq": {"quant_method": "awq", "bits": 4},
    "gptq_int4": {"quant_method": "gptq", "bits": 4},
    "gptq_int8": {"quant_method": "gptq", "bits": 8},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "w4a16": {"quant_method": "gptq", "bits": 4},
    "w8a16": {"quant_method": "gptq", "bits": 8},
    "int4": {"quant_method": "gptq", "bits": 4},
    "w8a8": {"quant_method": "modelopt", "quant_algo": "INT8_SQ"},
    "int8": {"quant_method": "modelopt", "quant_algo": "INT8_SQ"},
    "bf16": SIXTEEN_BITS,
    "fp16": SIXTEEN_BITS,
}


@dataclass(frozen=True)
class ShippedModel:
    """A model of ``conf/model`` by ``id``, and what a name says of its weights: None is nothing, empty 16 bits."""

    id: str
    quantization: Mapping[str, Any] | None = None


def shipped_model(name: str) -> ShippedModel | None:
    """The shipped model that a name or hub id means; None where it is of none."""
    text = name.strip()
    if text.startswith((".", "~", "/")) or text.count("/") > 1 or ":" in text:
        return None
    owner, _, bare_name = text.rpartition("/")
    plain = canonical_name(bare_name)
    if (plain if not owner else "") in shipped_ids():
        return ShippedModel(plain)
    bare, quantization = _stored(plain, owner.lower())
    model_id = next((_known()[reading] for reading in _readings(bare) if reading in _known()), "")
    return ShippedModel(model_id, quantization) if model_id else None


def canonical_name(name: str) -> str:
    """The spelling of shipped names: lower case, and underscores for every separator."""
    return re.sub(r"[-_.\s]+", "_", name.strip().lower())


@lru_cache(maxsize=1)
def shipped_ids() -> tuple[str, ...]:
    """The names of models that ship."""
    return tuple(sorted(path.stem for path in MODEL_DIRECTORY.glob("*.yaml")))


def _stored(name: str, owner: str) -> tuple[str, Mapping[str, Any] | None]:
    """A name without what says how weights are stored, and that; None where it does not say."""
    for word, format_name in FORMATS.items():
        bare = re.sub(rf"(^|_){word}(?=_|$)", "", name)
        if bare != name:
            return bare, BLOCKS if word == "fp8" and owner in IN_BLOCKS else format_name
    return name, None


def _readings(name: str) -> list[str]:
    """What a name may be known by: as it is, without words of tuning, without a date."""
    words = _words(name)
    untuned = [word for word in words if word not in TUNED]
    undated = [word for word in untuned if not DATE.fullmatch(word)]
    return ["_".join(reading) for reading in (words, untuned, undated)]


def _words(name: str) -> Sequence[str]:
    """Its words, a family's number apart from it: ``llama3_8b`` and ``llama-3-8b`` are alike."""
    return re.sub(r"([a-z]{3,})(\d)", r"\1_\2", canonical_name(name)).split("_")


@lru_cache(maxsize=1)
def _known() -> Mapping[str, str]:
    """Shipped models by every reading of their names and of the hub ids that they are of."""
    by_reading: dict[str, str] = {}
    sources = {model_id: _hub_name(model_id) for model_id in shipped_ids()}
    named = [(model_id, model_id) for model_id in shipped_ids()] + [
        (source, model_id) for model_id, source in sources.items() if source
    ]
    for name, model_id in named:
        for reading in _readings(_stored(canonical_name(name), "")[0])[:2]:
            by_reading.setdefault(reading, model_id)
    aliases = read_yaml(ALIASES, ValueError).get("model") or {}
    return {**by_reading, **{"_".join(_words(name)): str(model_id) for name, model_id in aliases.items()}}


def _hub_name(model_id: str) -> str:
    """The last part of the hub id that a shipped model's configuration is of."""
    text = (MODEL_DIRECTORY / f"{model_id}.yaml").read_text("utf-8")
    match = re.search(r"^source: *\"?https://huggingface\.co/[\w.-]+/([\w.-]+)/", text, re.MULTILINE)
    return match.group(1) if match else ""
