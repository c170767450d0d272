"""The models that come along: every one resolves, and its family traces forward, backward and as a prompt."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from opcast.simulator.graph import Graph
from opcast.simulator.trace import Workload, known_models, trace
from opcast.simulator.trace.build import load_config
from opcast.simulator.trace.models import resolve

from ..architectures import ALIKE

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 256,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8}
LATENT = {
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
SPARSE = {"num_key_value_heads": 4, "num_experts_per_tok": 2, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}
CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "gptj": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "rotary_dim": 8},
    "mpt": {"d_model": 64, "n_layers": 4, "n_heads": 4, "max_seq_len": 64},
    "bloom": {"hidden_size": 64, "n_layer": 4, "n_head": 4},
    "opt": {"hidden_size": 64, "num_attention_heads": 4, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "falcon": {"hidden_size": 64, "num_attention_heads": 4, "num_kv_heads": 2},
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2},
    "gemma2": {"sliding_window": 8},
    "gpt_oss": {"sliding_window": 8, "num_experts_per_tok": 2},
    "llama4_text": {"intermediate_size_mlp": 64, "attention_chunk_size": 8},
    "deepseek_v2": LATENT | {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    "deepseek_v3": LATENT | {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    "glm4_moe": {"num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 32},
    "phimoe": {"num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {"num_experts_per_tok": 2, "num_key_value_heads": 4},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_layer_end_index": 3},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": 64, "n_positions": 64},
    "cohere2": {"sliding_window": 8, "sliding_window_pattern": 2},
    "qwen3_5_moe_text": {
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "qwen3_next": {
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "kimi_linear": LATENT
    | {"q_lora_rank": None, "num_key_value_heads": 4, "num_experts_per_tok": 2}
    | {"linear_num_heads": 4, "linear_head_dim": 16, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
    "nemotron_h": {
        "hybrid_override_pattern": "ME*M",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "num_experts_per_tok": 2,
        "moe_shared_expert_intermediate_size": 32,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16},
    "glm_moe_dsa": LATENT | SPARSE,
    "deepseek_v32": LATENT | SPARSE | {"n_group": 2, "topk_group": 1},
}
TRANSFORMED = (
    "gpt2",
    "gptj",
    "mpt",
    "bloom",
    "opt",
    "falcon",
    "gpt_bigcode",
)  # named settings of their own, not those of SMALL
ENCODERS = ("bert",)  # which generate nothing
PLAIN = ("switch_transformers",)  # attention in plain products, for its bias of positions (test_trace.py traces one)
LINEAR = {"qwen3_5_moe_text": 3, "qwen3_next": 3, "kimi_linear": 3, "nemotron_h": 2, "mamba2": 4}  # of four layers
ROUTED = (
    "mixtral",
    "qwen3_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "kimi_linear",
    "nemotron_h",
    "glm_moe_dsa",
    "deepseek_v32",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "llama4_text",
    "glm4_moe",
    "minimax_m2",
    "qwen2_moe",
    "phimoe",
    "olmoe",
    "ernie4_5_moe",
)


def families() -> dict[str, str]:
    """One shipped model of every model type."""
    found: dict[str, str] = {}
    for name in known_models():
        found.setdefault(str((resolve(name).config or {})["model_type"]), name)
    return found


def small(family: str) -> dict[str, Any]:
    """The family's shipped configuration with four narrow layers."""
    config = dict(resolve(families()[family]).config or {})
    own = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "vocab_size": 256}
    config |= own if family in TRANSFORMED else SMALL | {"num_hidden_layers": 4}
    if family not in ("gpt2", "gptj", "mpt", "bloom", "gpt_bigcode"):
        config["num_hidden_layers"] = 4
    config |= {name: value for name, value in EXPERTS.items() if name in config}
    return config | CHANGES.get(family, {})


def kinds(graph: Graph) -> Counter[str]:
    found: Counter[str] = Counter()
    for node, times in graph.weighted():
        found[node.op.kind if node.op else node.source] += times
    return found


@pytest.mark.parametrize("name", sorted(known_models()))
def test_every_shipped_model_is_one_that_transformers_builds(name: str):
    source = resolve(name)
    assert known_models()[name]
    config = load_config(source)
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        assert getattr(config, key) > 0


def families_and_kinds() -> list[Any]:
    """Every family trains; those that are like another read prompts and decode with --every-model alone."""
    return [
        pytest.param(family, kind, marks=[pytest.mark.sibling] if family in ALIKE and kind != "train" else [])
        for family in sorted(families())
        for kind in ("train", "prefill", "decode")
        if family not in PLAIN and (family not in ENCODERS or kind != "decode")
    ]


@pytest.mark.parametrize(("family", "kind"), families_and_kinds())
def test_every_family_traces_with_one_attention_a_layer(family: str, kind: str):
    optimizer = "adamw" if kind == "train" else "none"
    graph = trace(small(family), Workload(kind=kind, seq_len=16, attention="fused", optimizer=optimizer))
    found = kinds(graph)
    by_physics = family in LINEAR or "index_topk" in small(family)
    assert ["physics" in note for note in graph.notes] == [True] * by_physics
    linear, prompt = LINEAR.get(family, 0), "decode" if kind == "decode" else "prefill"
    attending = {"nemotron_h": 1}.get(family, 4 - linear)
    chosen = "sparse_" if "index_topk" in small(family) else ""
    assert found[f"{chosen}attention_{prompt}"] == attending
    assert found[f"{chosen}attention_backward"] == (attending if kind == "train" else 0)
    assert found[f"sparse_index_{prompt}"] == (attending if chosen else 0)
    assert found[f"linear_attention_{prompt}"] == found["causal_conv1d"] == linear
    assert found["linear_attention_backward"] == found["causal_conv1d_backward"] == (linear if kind == "train" else 0)
    if family in ROUTED:  # two products of routed rows a layer, each with two gradients
        routed = found["grouped_gemm"] / (6 if kind == "train" else 2)
        assert 1 <= routed <= 4
    else:
        assert found["grouped_gemm"] == 0


def test_layers_that_differ_stay_apart_and_those_alike_fold():
    graph = trace(small("gemma3_text"), Workload(kind="train", seq_len=16, attention="fused"))
    windows = {
        n.op.window: times for n, times in graph.weighted() if n.op is not None and n.op.kind == "attention_prefill"
    }
    assert windows == {8: 2, 0: 2}
    oss = trace(small("gpt_oss"), Workload(kind="prefill", seq_len=16, attention="fused"))
    assert [block.repeat for block in oss.blocks if block.stack] == [2]  # sliding and full, twice


def test_routed_experts_of_llama4_get_their_own_tokens_only():
    graph = trace(small("llama4_text"), Workload(kind="prefill", seq_len=16, attention="fused"))
    rows = {n.op.tokens for n, _ in graph.weighted() if n.op is not None and n.op.kind == "grouped_gemm"}
    assert rows == {16}


@pytest.mark.parametrize(("family", "window"), [("gemma3_text", 8), ("gpt_oss", 8), ("llama4_text", 4), ("mistral", 0)])
def test_windows_are_told_without_masks_however_long_the_prompt(family: str, window: int):
    config = small(family) | {"max_position_embeddings": 1 << 15}
    graph = trace(config, Workload(kind="prefill", seq_len=1 << 14, attention="fused", optimizer="none"))
    seen = {(n.op.causal, n.op.window) for n, _ in graph.weighted() if n.op and n.op.kind == "attention_prefill"}
    assert seen == {(1, 0), (1, window)}
    assert max(n.bytes_moved for n, _ in graph.weighted()) < 1 << 27  # no mask of 16,384 x 16,384 is written


def test_scans_of_a_cpu_are_written_out_as_it_runs_them():
    graph = trace(small("mamba2"), Workload(kind="prefill", seq_len=16, attention="sdpa", optimizer="none"))
    assert not any(name.startswith("linear_attention") for name in kinds(graph))


def test_a_state_is_part_of_the_cache_and_does_not_grow():
    sizes = []
    for length in (16, 32):
        graph = trace(small("mamba2"), Workload(kind="decode", seq_len=length, attention="fused", optimizer="none"))
        sizes.append(sum(tensor.size_bytes * tensor.count for tensor in graph.tensors if tensor.role == "cache"))
    state, channels = 8 * 16 * 16 * 4, (2 * 64 + 2 * 16 * 8) * 4 * 2  # fp32, and four tokens of the convolution in bf16
    assert sizes[0] == sizes[1] >= 4 * state
    assert sizes[0] <= 4 * (state + channels)


@pytest.mark.parametrize("kind", ["train", "prefill", "decode"])
def test_attention_that_no_kernel_is_known_for_runs_as_it_is_written_and_says_so(kind: str, small_model):
    compressed = small_model("deepseek_v4")
    graph = trace(compressed, Workload(kind=kind, seq_len=256, attention="fused", cache="static", optimizer="none"))
    assert graph.notes[-1].startswith("attention is timed as transformers writes it out")
    found = kinds(graph)
    assert found["softmax"] >= 3
    assert not any("attention" in name for name in found)
    if kind == "decode":
        whole = trace(compressed, Workload(kind="prefill", seq_len=256, attention="fused", optimizer="none"))
        assert graph.model_flops < whole.model_flops / 32
