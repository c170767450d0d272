"""What Megatron-LM must be told of a model, so that the very same one starts: activation, norms, positions, biases,
experts, latent attention, vocabulary.

Read off a transformers configuration. What of it Megatron-LM has no argument for is a LaunchError, never left out:
another model would start, with other memory and other times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .launch_errors import LaunchError

GATED = (  # families whose MLP is silu(gate) * up, as transformers has them
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "phi3",
    "olmo2",
    "kimi_k2",
)
PLAIN = ("gpt2",)  # gelu, LayerNorm, learned positions, biases, tied embeddings
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
QK_NORMS = ("qwen3", "qwen3_moe")
QKV_BIASES = ("qwen2", "qwen2_moe")
SIGMOID_ROUTERS = ("deepseek_v3", "kimi_k2")


def megatron_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that say which model it is, by name: a value, or True for a flag.

    LaunchError for a family or a part of one that Megatron-LM has no argument for.
    """
    family = str(config.get("model_type", ""))
    if family in PLAIN:
        return _gpt2(config)
    if family not in GATED:
        activations = ", ".join((*GATED, *PLAIN))
        raise LaunchError(
            f"a model of type {family or 'unknown'} has no arguments of Megatron-LM here (known: {activations}): "
            "take framework=megatron-bridge, whose recipes know their models"
        )
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    grouped = groups != heads and family not in LATENT
    flags: dict[str, Any] = {
        "--num-layers": config["num_hidden_layers"],
        "--hidden-size": config["hidden_size"],
        "--ffn-hidden-size": config["intermediate_size"],
        "--num-attention-heads": heads,
        "--group-query-attention": True if grouped else None,
        "--num-query-groups": groups if grouped else None,
        "--kv-channels": config.get("head_dim") if family not in LATENT else None,
        "--swiglu": True,
        "--normalization": "RMSNorm",
        "--norm-epsilon": config.get("rms_norm_eps", 1e-6),
        "--disable-bias-linear": None if config.get("attention_bias") and family not in QKV_BIASES else True,
        "--add-qkv-bias": True if family in QKV_BIASES else None,
        "--qk-layernorm": True if family in (*QK_NORMS, *LATENT) else None,
        "--untie-embeddings-and-output-weights": None if config.get("tie_word_embeddings", family == "qwen2") else True,
    }
    if config.get("attention_bias") and family not in QKV_BIASES:
        raise LaunchError(
            "attention_bias without biases of the MLP has no argument of Megatron-LM: take a model without"
        )
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        flags["--window-size"] = f"{int(window) - 1},0"
    flags |= _positions(config, family) | _experts(config, family) | (_latent(config) if family in LATENT else {})
    return {name: value for name, value in flags.items() if value is not None} | _around(config)


def _around(config: Mapping[str, Any]) -> dict[str, Any]:
    """Vocabulary, and no dropout, which these models are trained without."""
    return {"--vocab-size": config["vocab_size"], "--attention-dropout": 0.0, "--hidden-dropout": 0.0}


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    width = config.get("n_embd") or config["hidden_size"]
    return {
        "--num-layers": config.get("n_layer") or config["num_hidden_layers"],
        "--hidden-size": width,
        "--ffn-hidden-size": config.get("n_inner") or 4 * int(width),
        "--num-attention-heads": config.get("n_head") or config["num_attention_heads"],
        "--normalization": "LayerNorm",
        "--position-embedding-type": "learned_absolute",
        "--max-position-embeddings": config.get("n_positions", 1024),
        **_around(config),
    }


def _positions(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Rotary positions and their scaling."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    flags: dict[str, Any] = {
        "--position-embedding-type": "rope",
        "--rotary-base": int(base),
        "--rotary-percent": float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0),
        "--max-position-embeddings": config.get("max_position_embeddings"),
    }
    if kind == "llama3":
        return flags | {"--use-rope-scaling": True, "--rope-scaling-factor": rope.get("factor", 8.0)}
    if kind == "yarn" and family in LATENT:  # Megatron-LM's latent attention is rotated by YaRN
        scaled = {"--rope-type": "yarn", "--rotary-scaling-factor": rope.get("factor", 1.0)}
        return (
            flags | scaled | {"--mscale": rope.get("mscale", 1.0), "--mscale-all-dim": rope.get("mscale_all_dim", 1.0)}
        )
    if kind not in ("default", "linear", "yarn"):
        raise LaunchError(f"rotary positions of type {kind} have no argument of Megatron-LM")
    if kind == "linear":
        return flags | {"--rotary-seq-len-interpolation-factor": int(rope.get("factor", 1))}
    if kind == "yarn":
        raise LaunchError("positions scaled by YaRN have no argument of Megatron-LM outside of latent attention")
    return flags


def _experts(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The experts of a mixture, and which layers have them."""
    count = next(
        (config[name] for name in ("n_routed_experts", "num_local_experts", "num_experts") if config.get(name)), 0
    )
    if not count:
        return {}
    layers = int(config["num_hidden_layers"])
    dense = int(config.get("first_k_dense_replace") or 0)
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * int(width)
    sigmoid = family in SIGMOID_ROUTERS
    groups = config.get("n_group") or 1
    if config.get("mlp_only_layers") or int(config.get("decoder_sparse_step") or 1) != 1:
        raise LaunchError("dense layers between those of experts are not spelled here: take framework=megatron-bridge")
    return {
        "--num-experts": count,
        "--moe-router-topk": config.get("num_experts_per_tok"),
        "--moe-ffn-hidden-size": width,
        "--moe-shared-expert-intermediate-size": shared or None,
        "--moe-layer-freq": f"([0]*{dense}+[1]*{layers - dense})" if dense else None,
        "--moe-grouped-gemm": True,
        "--moe-token-dispatcher-type": "alltoall",
        "--moe-router-load-balancing-type": "seq_aux_loss" if sigmoid else "aux_loss",
        "--moe-router-score-function": "sigmoid" if sigmoid else None,
        "--moe-router-enable-expert-bias": True if sigmoid else None,
        "--moe-router-pre-softmax": True if not sigmoid and config.get("norm_topk_prob") is False else None,
        "--moe-router-num-groups": groups if groups > 1 else None,
        "--moe-router-group-topk": config.get("topk_group") if groups > 1 else None,
        "--moe-router-topk-scaling-factor": config.get("routed_scaling_factor") if sigmoid else None,
    }


def _latent(config: Mapping[str, Any]) -> dict[str, Any]:
    """Latent attention (MLA)."""
    return {
        "--multi-latent-attention": True,
        "--q-lora-rank": config.get("q_lora_rank"),
        "--kv-lora-rank": config["kv_lora_rank"],
        "--qk-head-dim": config["qk_nope_head_dim"],
        "--qk-pos-emb-head-dim": config["qk_rope_head_dim"],
        "--v-head-dim": config["v_head_dim"],
    }
