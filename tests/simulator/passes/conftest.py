"""Small traced steps, shared by the tests of passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from opcast.datasets.clusters import Cluster
from opcast.simulator.graph import Graph
from opcast.simulator.passes.verify import verify
from opcast.simulator.question.plan import Parallel, Plan
from opcast.simulator.trace import Workload, trace

HEADS = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": HEADS | {"intermediate_size": 192, "num_attention_heads": 16, "head_dim": 8},
    "qwen3": HEADS | {"intermediate_size": 192, "head_dim": 32},
    "olmo2": HEADS | {"intermediate_size": 192},
    "phi3": HEADS | {"intermediate_size": 192, "pad_token_id": 0},
    "gemma2": HEADS | {"intermediate_size": 192, "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 4},
    "gpt2": {"n_embd": 128, "n_head": 8, "vocab_size": 512, "n_positions": 96, "bos_token_id": 0, "eos_token_id": 0},
    "gpt_neox": {"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 512, "vocab_size": 512},
    "mpt": {"d_model": 128, "n_heads": 8, "n_layers": 3, "vocab_size": 512, "max_seq_len": 96},
    "falcon": {
        "hidden_size": 128,
        "num_attention_heads": 16,
        "vocab_size": 512,
        "new_decoder_architecture": True,
        "num_kv_heads": 8,
    },
    "mixtral": HEADS | {"intermediate_size": 64, "num_local_experts": 4},
    "qwen3_moe": HEADS
    | {
        "intermediate_size": 192,
        "moe_intermediate_size": 64,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "head_dim": 32,
    },
    "deepseek_v3": HEADS
    | {
        "intermediate_size": 192,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}


@pytest.fixture(scope="session")
def traced_small(small_model: Callable[..., dict[str, Any]]) -> Callable[..., Graph]:
    """A function: model type (and kind of step, changed settings) -> its traced graph, four layers deep."""

    @cache
    def make(model_type: str, kind: str = "train", seq_len: int = 32, **changes: Any) -> Graph:
        optimizer = "adamw" if kind == "train" else "none"
        workload = Workload(kind, batch=1, seq_len=seq_len, attention="fused", optimizer=optimizer)
        return trace(small_model(model_type, layers=4, **changes), workload, "bf16")

    return make


@pytest.fixture(scope="session")
def traced() -> Callable[..., Graph]:
    """A function: family, kind of step, and changes of its configuration -> the graph of 80 (or 2) tokens."""

    @cache
    def make(family: str, kind: str, changes: tuple[tuple[str, Any], ...]) -> Graph:
        config = {"model_type": family, "num_hidden_layers": 3} | FAMILIES[family] | dict(changes)
        optimizer = "adamw" if kind == "train" else "none"
        return trace(config, Workload(kind, batch=2, seq_len=40, attention="fused", optimizer=optimizer))

    return lambda family, kind="train", **changes: make(family, kind, tuple(sorted(changes.items())))


@pytest.fixture(scope="session")
def planned() -> Callable[..., Plan]:
    """A function: degrees and styles of parallelism -> a plan for four nodes of eight devices."""
    cluster = Cluster(id="small", name="four nodes", device="h100_sxm", nodes=4)
    return lambda **parallel: Plan(Parallel(**parallel), cluster)


@pytest.fixture(scope="session")
def assert_sound() -> Callable[..., None]:
    """A check: a graph fits together (:func:`opcast.simulator.passes.verify.verify`).

    With ``given``, activations that no node writes come from outside.
    """

    def check(graph: Graph, given: bool = False) -> None:
        made = {tensor for node in graph.nodes() for tensor in node.writes}
        every = [replace(t, id=t.id + i, count=1) for t in graph.tensors for i in range(t.count)]
        outside = tuple(t if t.id in made else replace(t, role="input") for t in every)
        verify(replace(graph, tensors=outside) if given else graph)

    return check
