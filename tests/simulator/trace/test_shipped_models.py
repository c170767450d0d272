"""All models that come along, at their real widths: they train, read prompts and generate, in their published size.

``published_parameters.yaml`` says what their makers count. Keys and values are counted here by hand, layer by layer,
from the configuration alone. Steps have as few layers as there are kinds of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from opcast.datasets.devices import load_device
from opcast.datasets.dtypes import itemsize
from opcast.simulator.engines import build_engine
from opcast.simulator.graph import Node
from opcast.simulator.question.work import Work
from opcast.simulator.simulate import alone, laid_out, timed_state
from opcast.simulator.trace import TraceError, Workload, known_models, trace
from opcast.simulator.trace.build import build_structure, load_config
from opcast.simulator.trace.classes import encodes
from opcast.simulator.trace.models import resolve

from ..architectures import ENCODERS, FAST, architectures

pytestmark = pytest.mark.filterwarnings("error::FutureWarning")  # of what the newest transformers is about to drop

Config = dict[str, Any]
PUBLISHED = yaml.safe_load(Path(__file__).with_name("published_parameters.yaml").read_text())
DEVICE = load_device("h100_sxm")
CONTEXTS = (255, 895)  # tokens before the one that is generated: inside and beyond windows of 512, beyond those of 128
STATES = ("mamba2_2_7b",)  # of which a step takes as long after any context
PLAIN = ("neusight_switch_xl_4",)  # attends in plain products, for its bias of positions
HEADS = ("num_key_value_heads", "num_kv_heads", "n_heads", "n_head", "num_attention_heads")
WIDTHS = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_decoder_layers")
ROUNDS = {
    "gemma3_text": 6,
    "cohere2": 4,
    "qwen3_next": 4,
    "qwen3_5_moe_text": 4,
    "kimi_linear": 4,
    "llama4_text": 4,
}  # until all kinds


def all_models() -> list[Any]:
    """Every shipped model, slow ones marked."""
    names = sorted(known_models())
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


def settings(name: str) -> Config:
    return dict(resolve(name).config or {})


def first(config: Config, names: tuple[str, ...]) -> int:
    return next(config[name] for name in names if name in config)


def shallow(name: str) -> Config:
    """A model's configuration with a layer of each kind, and never less than two."""
    config = settings(name)
    layers = config.get("first_k_dense_replace", 0) + ROUNDS.get(config["model_type"], 2)
    if "hybrid_override_pattern" in config:
        layers = config["hybrid_override_pattern"].index("*") + 1
        config["hybrid_override_pattern"] = config["hybrid_override_pattern"][:layers]
    config |= {each: layers for each in (*LAYERS, "num_layers") if each in config}
    if config["model_type"] == "kimi_linear":
        config["layer_types"] = [*["linear_attention"] * (layers - 1), "full_attention"]
    config |= {each: 1 for each in ("num_sparse_encoder_layers", "num_sparse_decoder_layers") if each in config}
    return config


# --- parameters --------------------------------------------------------------------------------------------


def counted_by_hand(config: dict[str, Any]) -> float:
    """Parameters of a shape that nobody published a count for."""
    layers, width, vocabulary = first(config, LAYERS), first(config, WIDTHS), config["vocab_size"]
    if config["model_type"] == "gpt2":
        return 12 * layers * width**2 * (1 + 13 / 12 / width) + (vocabulary + config["n_positions"]) * width
    if config["model_type"] == "mpt":
        return 12 * layers * width**2 + vocabulary * width
    if config["model_type"] == "llama":
        shared = config["num_key_value_heads"] / config["num_attention_heads"]
        layer = width * ((2 + 2 * shared) * width + 3 * config["intermediate_size"])
        return layers * layer + (1 if config["tie_word_embeddings"] else 2) * vocabulary * width
    assert config["model_type"] == "switch_transformers"
    attention = 4 * width * config["num_heads"] * config["d_kv"]
    dense, experts = 2 * width * config["d_ff"], config["num_experts"]
    sparse = config["num_sparse_encoder_layers"] + config["num_sparse_decoder_layers"]
    both = config["num_layers"] + layers
    return (
        (config["num_layers"] + 2 * layers) * attention + (both + (experts - 1) * sparse) * dense + vocabulary * width
    )


# Billions of parameters to more digits, as model cards and papers say them: within 0.2 and within 0.5 %.
TO_2_PERMILLE = {
    "llama3_8b": 8.03,
    "llama3_70b": 70.55,
    "llama3_405b": 405.85,
    "llama2_7b": 6.74,
    "llama2_13b": 13.02,
    "llama2_70b": 68.98,
    "qwen2_5_7b": 7.62,
    "qwen3_8b": 8.19,
    "qwen3_32b": 32.76,
    "qwen3_30b_a3b": 30.53,
    "mixtral_8x7b": 46.7,
    "deepseek_v3": 671.03,
    "deepseek_v2_lite": 15.71,
    "mistral_7b": 7.25,
    "gemma2_9b": 9.24,
    "gpt2": 0.1244,
    "gpt3_175b": 174.6,
    "phi3_mini": 3.82,
    "gpt_neox_20b": 20.55,
    "tiny_llama_100m": 0.0881,
}
TO_5_PERMILLE = {
    "llama3_1_405b": 405.9,
    "qwen2_5_72b": 72.7,
    "qwen3_235b_a22b": 235.1,
    "mixtral_8x22b": 140.6,
    "gemma2_27b": 27.2,
    "gemma3_27b": 27.0,
    "gpt2_xl": 1.56,
    "bert_base": 0.11,
    "bert_large": 0.335,
    "gpt_1t": 1008.0,
    "gpt_22b": 22.0,
    "mpt_7b": 6.65,
    "falcon_180b": 179.0,
    "opt_66b": 65.7,
    "bloom_176b": 176.2,
    "gpt_j_6b": 6.05,
    "deepseek_v2": 236.0,
    "moonlight_16b_a3b": 16.0,
    "kimi_k2": 1026.0,
    "gpt_oss_20b": 20.9,
    "gpt_oss_120b": 116.8,
    "llama4_scout": 107.8,
    "llama4_maverick": 400.7,
    "nemotron4_340b": 341.0,
    "glm4_5_air_106b_a12b": 106.9,
    "deepseek_r1": 671.0,
    "glm_5": 744.0,
    "qwen3_5_397b_a17b": 397.0,
    "nemotron_3_nano_30b_a3b": 31.6,
    "nemotron_3_super_120b_a12b": 120.7,
    "nemotron_3_ultra_550b_a55b": 549.3,
    "qwen3_next_80b_a3b": 79.7,
    "kimi_linear_48b_a3b": 49.1,
    "mamba2_2_7b": 2.703,
    "deepseek_v3_2": 671.9,
}


@pytest.mark.parametrize("name", all_models())
def test_every_model_has_its_published_size(name: str) -> None:
    module = build_structure(resolve(name), Workload("train"), "bf16")
    expected = PUBLISHED[name][0] * 1e9 if name in PUBLISHED else counted_by_hand(settings(name))
    counted = sum({id(p): p.numel() for p in module.parameters()}.values())
    assert counted == pytest.approx(expected, rel=0.01)
    for table, bound in ((TO_2_PERMILLE, 2e-3), (TO_5_PERMILLE, 5e-3)):
        assert counted / 1e9 == pytest.approx(table.get(name, counted / 1e9), rel=bound)


def test_the_table_speaks_of_shipped_models_alone() -> None:
    assert not {*PUBLISHED, *TO_2_PERMILLE, *TO_5_PERMILLE} - known_models().keys()


# --- steps -------------------------------------------------------------------------------------------------


def layers_by_hand(config: Config) -> Iterator[tuple[float, int]]:
    """Of every layer that keeps something of each token: bytes of a token in bf16, and how many tokens it sees."""
    family, layers, whole = config["model_type"], first(config, LAYERS), 1 << 30
    if family == "mamba2":
        return
    if "kv_lora_rank" in config:
        latent = 2 * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
        index = 2 * config["index_head_dim"] if "index_topk" in config else 0
        linear = 3 * layers // 4 if family == "kimi_linear" else 0
        yield from [(latent + index, whole)] * (layers - linear)
        return
    heads = config.get("num_kv_heads") or (1 if config.get("multi_query") else first(config, HEADS))
    query_heads = config.get("num_attention_heads") or first(config, HEADS)
    token = 2 * 2 * heads * (config.get("head_dim") or first(config, WIDTHS) // query_heads)
    every = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "gemma3_text": 6}.get(family, 1)  # the last of so many sees all
    for layer in range(layers):
        if family in ("qwen3_next", "qwen3_5_moe_text") and layer % 4 != 3:
            continue
        if family == "nemotron_h" and config["hybrid_override_pattern"][layer] != "*":
            continue
        yield token, (config["sliding_window"] if layer % every != every - 1 else whole)


def bytes_read(node: Node) -> float:
    """Bytes of keys and values that an op of a decode step reads of one sequence."""
    op = node.op
    if op is None or op.kind not in READ:
        return 0.0
    return float(op.seq_kv * READ[op.kind](op) * itemsize(op.dtype))


READ: dict[str, Any] = {
    "attention_decode": lambda op: op.heads_kv * (op.head_dim + op.v_head_dim),
    "mla_decode": lambda op: op.kv_lora_rank + op.qk_rope_head_dim,
    "sparse_attention_decode": lambda op: op.head_dim,
    "sparse_index_decode": lambda op: op.head_dim,
}


@pytest.mark.parametrize("name", architectures(ENCODERS))
def test_a_step_of_generation_reads_what_came_before_and_no_prompt(name: str) -> None:
    engine, plan = build_engine(DEVICE, (), (), order=("analytical",)), alone(DEVICE, "bf16", "vllm")
    config, times = shallow(name), []
    for context in CONTEXTS:
        laid = laid_out(config, Work("decode", batch=4, input_len=context), plan, DEVICE)
        nodes = list(laid.pipelines[0][0].graph.weighted())
        assert not [node.op.kind for node, _ in nodes if node.op and "prefill" in node.op.kind]
        if name not in PLAIN:
            read = sum(count * bytes_read(node) for node, count in nodes)
            assert read == sum(token * min(context + 1, seen) for token, seen in layers_by_hand(config))
        times.append(timed_state(laid, engine).total_us)
    assert times[1] == times[0] if name in STATES else times[1] > times[0]


@pytest.mark.parametrize("name", architectures())
def test_every_model_trains_and_reads_prompts(name: str) -> None:
    for kind in ("train", "prefill"):
        graph = trace(shallow(name), Workload(kind, batch=1, seq_len=64, attention="fused", optimizer="none"))
        assert not [node.op.kind for node, _ in graph.weighted() if node.op and "decode" in node.op.kind]
        assert any(node.phase == "backward" for node, _ in graph.weighted()) == (kind == "train")
        assert graph.model_flops > 0
        assert not graph.notes or name not in TO_2_PERMILLE


@pytest.mark.parametrize("name", sorted(known_models()))
def test_encoders_and_only_they_generate_nothing(name: str) -> None:
    assert encodes(load_config(resolve(name))) == (name in ENCODERS)


def test_an_encoder_says_that_it_generates_nothing() -> None:
    with pytest.raises(TraceError, match="is an encoder, which generates nothing: take workload=prefill or train"):
        trace(ENCODERS[0], Workload("decode", batch=1, seq_len=64, attention="fused", optimizer="none"))
