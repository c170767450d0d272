"""Which model a row means: its ``config`` as JSON, a name in ``conf/model``, ``model_dims.csv`` beside it, or columns.

What a row publishes of a shape overrides what is known by name: the same model is trained with fewer layers, another
vocabulary or untied embeddings.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..model_names import MODEL_DIRECTORY, canonical_name, shipped_model
from ..reading import read_yaml
from .cells import Cells
from .rows import TruthError

DIMENSIONS_FILE = "model_dims.csv"

NAMES = {  # of a shape, per family of configurations
    "gpt2": {
        "layers": "n_layer",
        "hidden": "n_embd",
        "heads": "n_head",
        "ffn_hidden": "n_inner",
        "vocab": "vocab_size",
    },
    "": {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "ffn_hidden": "intermediate_size",
        "vocab": "vocab_size",
    },
}


def model_of(cells: Cells, folder: Path, seq_len: int) -> tuple[str, dict[str, Any]]:
    """(name, transformers configuration) of a row's model; TruthError when nothing gives its shape.

    ``folder`` is where the table lies, ``seq_len`` the positions that learned embeddings must have.
    """
    name = cells.text("model_canon") or cells.text("model")
    if cells.has("config"):
        return name, fitted(written(cells), seq_len)
    config = shipped(cells.text("shape") or name) or from_dimensions(folder, name) or otherwise_named(name)
    if config is None and cells.has("layers", "hidden", "heads"):
        config = {"model_type": "gpt2", "tie_word_embeddings": True}
    if config is None:
        raise TruthError(f"the model {name!r} is neither in conf/model nor in a {DIMENSIONS_FILE} beside the table")
    return name, fitted(overlaid(config, cells), seq_len)


def written(cells: Cells) -> dict[str, Any]:
    """The transformers configuration that a row has in full, as JSON; TruthError where it is none."""
    try:
        config = json.loads(cells.text("config"))
    except json.JSONDecodeError as error:
        raise TruthError(f"config is no JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise TruthError("config must be a transformers configuration, with a model_type")
    return config


@lru_cache(maxsize=256)
def _read(path: Path) -> Mapping[str, Any]:
    return dict(read_yaml(path, TruthError)["config"])


def shipped(name: str) -> dict[str, Any] | None:
    """The configuration of a model that ships with opcast, by any spelling of its name."""
    path = MODEL_DIRECTORY / f"{canonical_name(name)}.yaml"
    return dict(_read(path)) if path.is_file() else None


def otherwise_named(name: str) -> dict[str, Any] | None:
    """The configuration of a shipped model by its hub id, or by what people write of it."""
    meant = shipped_model(name)
    return None if meant is None else shipped(meant.id)


@lru_cache(maxsize=8)
def _dimension_rows(folder: Path) -> Mapping[str, Mapping[str, str]]:
    path = folder / DIMENSIONS_FILE
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {row["model_canon"]: row for row in csv.DictReader(file) if row.get("model_canon")}


def from_dimensions(folder: Path, name: str) -> dict[str, Any] | None:
    """A transformers configuration of the family that a line of ``model_dims.csv`` describes."""
    line = _dimension_rows(folder).get(name)
    return configuration(Cells(line, 0)) if line else None


def configuration(shape: Cells) -> dict[str, Any]:
    """GPT-2 for ungated feed-forwards, else Llama and its relatives: Mixtral, Qwen3-MoE, GPT-OSS, DeepSeek."""
    hidden, heads = shape.needed("hidden"), shape.needed("heads")
    common = {"tie_word_embeddings": shape.flag("tied"), "vocab_size": shape.needed("vocab")}
    if "ungated" in shape.text("act") or shape.text("act") == "gelu":
        sizes = {"n_embd": hidden, "n_layer": shape.needed("layers"), "n_head": heads, "n_inner": None}
        width = shape.whole("ffn_hidden", 4 * hidden)
        return {"model_type": "gpt2", **common, **sizes, "n_inner": width, "tie_word_embeddings": True}
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": shape.needed("layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": shape.whole("kv_heads", heads),
        "intermediate_size": shape.whole("ffn_hidden", shape.whole("moe_ffn", 4 * hidden)),
    }
    name, latent = shape.text("model_canon").lower(), "mla" in shape.text("attn").lower()
    if shape.has("head_dim") and not latent:
        sizes["head_dim"] = shape.needed("head_dim")
    if latent:
        return {"model_type": "deepseek_v3", **common, **sizes, **_latent(shape)}
    if not shape.has("experts"):
        kind = "qwen3" if "qwen3" in name else "qwen2" if "qwen2" in name else "llama"
        return {"model_type": kind, **common, **sizes}
    experts, topk, width = shape.needed("experts"), shape.needed("topk"), shape.needed("moe_ffn")
    if "sliding" in shape.text("attn"):
        expert_fields = {"num_local_experts": experts, "num_experts_per_tok": topk, "intermediate_size": width}
        return {"model_type": "gpt_oss", **common, **sizes, **expert_fields}
    if "qwen3" in name:
        expert_fields = {"num_experts": experts, "num_experts_per_tok": topk, "moe_intermediate_size": width}
        return {
            "model_type": "qwen3_moe",
            **common,
            **sizes,
            **expert_fields,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        }
    expert_fields = {"num_local_experts": experts, "num_experts_per_tok": topk, "intermediate_size": width}
    return {"model_type": "mixtral", **common, **sizes, **expert_fields}


def _latent(shape: Cells) -> dict[str, Any]:
    """DeepSeek's attention and experts: ranks and widths stand in words (``q_lora 1536 kv_lora 512 …``)."""
    text = shape.text("attn")

    def rank(word: str, default: int | None) -> int | None:
        match = re.search(rf"(?<![a-z_]){word}[ _]?(\d+)", text)
        return int(match[1]) if match else default

    return {
        "q_lora_rank": rank("q_lora", None),
        "kv_lora_rank": rank("kv_lora", 512),
        "qk_nope_head_dim": rank("nope", 128),
        "qk_rope_head_dim": rank("rope", 64),
        "v_head_dim": rank("v", 128),
        "n_routed_experts": shape.needed("experts"),
        "num_experts_per_tok": shape.needed("topk"),
        "moe_intermediate_size": shape.needed("moe_ffn"),
        "n_shared_experts": shape.whole("shared_experts", 1),
        "first_k_dense_replace": shape.whole("first_dense", 0),
        "n_group": 1,
        "topk_group": 1,
    }


def overlaid(config: dict[str, Any], cells: Cells) -> dict[str, Any]:
    """The configuration with the sizes that the row's own columns give."""
    names = NAMES.get(str(config.get("model_type")), NAMES[""])
    result = dict(config)
    for column, name in names.items():
        if cells.has(column) and (name in config or config.get("model_type") == "gpt2"):
            result[name] = cells.needed(column)
    if cells.has("tied_embeddings"):
        result["tie_word_embeddings"] = cells.flag("tied_embeddings")
    return result


def fitted(config: dict[str, Any], seq_len: int) -> dict[str, Any]:
    """The configuration with room for ``seq_len`` positions where they are learned."""
    if config.get("model_type") == "gpt2":
        return {**config, "n_positions": max(seq_len, 1)}
    if int(config.get("max_position_embeddings") or seq_len) < seq_len:
        return {**config, "max_position_embeddings": seq_len}
    return config
