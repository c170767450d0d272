"""Small models of every family that tracing must get right, by transformers' model type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

ATTENTION = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
SMALL: dict[str, dict[str, Any]] = {
    "llama": ATTENTION | {"intermediate_size": 128},
    "qwen3_moe": ATTENTION
    | {
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 32,
    },
    "mixtral": ATTENTION | {"intermediate_size": 128, "num_local_experts": 4},
    "gpt2": {"n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "vocab_size": 256, "dropout_rate": 0.0},
    "bert": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 256},
    "gemma2": ATTENTION | {"intermediate_size": 128, "head_dim": 16, "sliding_window": 8},
    "mistral": ATTENTION | {"intermediate_size": 128, "head_dim": 16, "sliding_window": 8},
    "mistral3": {
        "spatial_merge_size": 2,
        "text_config": {"model_type": "mistral", "num_hidden_layers": 2, "intermediate_size": 128, **ATTENTION},
        "vision_config": {
            "model_type": "pixtral",
            "patch_size": 16,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
    },
    "deepseek_v3": ATTENTION
    | {
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 2,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "deepseek_v4": {  # windows, every 4th and every 128th token compressed, several residuals
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "head_dim": 16,
        "q_lora_rank": 24,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "vocab_size": 256,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "sliding_window": 32,
        "qk_rope_head_dim": 8,
        "num_hash_layers": 1,
        "compress_ratios": [0, 4, 128],
    },
}


@pytest.fixture(scope="session")
def small_model() -> Callable[..., dict[str, Any]]:
    """A function: model type, number of layers and changed settings -> a transformers configuration."""

    def make(model_type: str, layers: int = 3, **changes: Any) -> dict[str, Any]:
        return {"model_type": model_type, "num_hidden_layers": layers} | SMALL[model_type] | changes

    return make


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small tensors gain nothing from more threads, and other tests may be running."""
    import torch

    torch.set_num_threads(1)
