"""Layers of multi-token prediction: what they add to a step, and what passes make of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from opcast.datasets.clusters import load_cluster
from opcast.simulator.graph import Graph
from opcast.simulator.passes.pipeline import split_pipeline
from opcast.simulator.question.plan import Parallel, Plan, load_stack
from opcast.simulator.question.work import Work, WorkloadError
from opcast.simulator.trace import Workload, trace
from opcast.simulator.trace.workload import TraceError

Config = dict[str, Any]
HIDDEN, VOCAB, TOKENS = 64, 256, 64
HYBRID = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEM*EMEME",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "num_experts_per_tok": 2,
    "moe_shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "head_dim": 16,
}


def work(count: int) -> Workload:
    return Workload("train", 2, TOKENS // 2, attention="fused", mtp_layers=count)


def products(graph: Graph, part: str) -> Counter[str]:
    """FLOPs of products by phase, in modules whose path begins with ``part``."""
    found: Counter[str] = Counter()
    for node in graph.nodes():
        if node.op is not None and node.op.kind in ("gemm", "grouped_gemm") and node.path.startswith(part):
            found[node.phase] += int(node.op.cost.flops)
    return found


@pytest.fixture(scope="module")
def latent() -> Config:
    return {
        "model_type": "deepseek_v3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": VOCAB,
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
    }


@pytest.fixture(scope="module")
def both(latent: Config) -> Graph:
    return trace(latent, work(2), "bf16")


def test_each_adds_a_layer_a_join_and_the_head_once_more(latent: Config, both: Graph) -> None:
    plain = trace(latent, work(0), "bf16")
    layer = products(plain, "model.layers.5")
    assert layer["forward"]
    for name in ("mtp1", "mtp2"):
        assert products(both, f"{name}.first") == layer
        assert products(both, f"{name}.join")["forward"] == 2 * TOKENS * 2 * HIDDEN * HIDDEN
    assert products(both, "lm_head")["forward"] == 3 * products(plain, "lm_head")["forward"]
    assert products(both, "lm_head")["backward"] == 3 * products(plain, "lm_head")["backward"]
    inside = products(both, "mtp1")["forward"] - products(both, "mtp1.first.mlp.experts")["forward"]
    assert both.parameters > plain.parameters + inside // TOKENS  # two FLOPs a weight and token, in two layers


def test_a_hybrid_repeats_its_last_attention_and_its_last_layer() -> None:
    graph = trace(HYBRID, work(1), "bf16")
    kinds = {node.op.kind for node, _ in graph.weighted() if node.op is not None and node.path.startswith("mtp1")}
    assert {"attention_prefill", "attention_backward", "grouped_gemm"} <= kinds
    assert not {kind for kind in kinds if kind.startswith("linear_attention")}


def test_a_pipeline_has_them_with_the_loss(both: Graph) -> None:
    plan = Plan(parallel=Parallel(pp=2, dp=4), cluster=load_cluster("dgx_h100"), stack=load_stack("megatron"))
    first, last = split_pipeline(both, plan)
    assert not products(first.graph, "mtp")
    assert not products(first.graph, "lm_head")
    assert products(last.graph, "mtp") == products(both, "mtp")


def test_a_prompt_has_none(latent: Config) -> None:
    prompt = Workload("prefill", 1, 32, optimizer="none", mtp_layers=1)
    assert not products(trace(latent, prompt, "bf16"), "mtp")


def test_other_models_and_numbers_are_refused(small_model: Callable[..., Config]) -> None:
    with pytest.raises(WorkloadError, match=r"workload\.mtp_layers"):
        Work(mtp_layers=-1)
    with pytest.raises(TraceError, match="mtp_layers"):
        trace(small_model("t5"), work(1), "bf16")
