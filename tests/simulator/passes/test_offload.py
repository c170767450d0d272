"""Offload: what leaves the device comes back, and memory falls by what is away."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from opcast.datasets.clusters import Cluster
from opcast.simulator.graph import Graph
from opcast.simulator.memory.walk import peak_memory
from opcast.simulator.passes.offload import offload
from opcast.simulator.passes.order import INFERENCE, apply_passes
from opcast.simulator.passes.recompute import recompute
from opcast.simulator.question.plan import Parallel, Plan, PlanError, load_stack
from opcast.simulator.trace import Workload, trace

CLUSTER = Cluster("c", "c", "h100_sxm")
FAMILIES = ("llama", "gemma2", "deepseek_v3", "qwen3_moe")
Make = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def graphs(small_model: Make) -> dict[str, Graph]:
    workload = Workload("train", batch=2, seq_len=32, attention="fused")
    return {family: trace(small_model(family, layers=6), workload, "bf16") for family in FAMILIES}


def plan(*what: str, recompute: str = "none") -> Plan:
    return Plan(Parallel(), CLUSTER, offload=what, recompute=recompute)


def copied(graph: Graph, source: str) -> int:
    return sum(node.op.size_bytes for node in graph.nodes() if node.op is not None and node.source == source)


def saved(graph: Graph) -> int:
    """Bytes of activations that live when the forward pass ends."""
    written: set[int] = set()
    for node in graph.nodes():
        if node.phase != "forward":
            break
        written |= set(node.writes)
        written -= set(node.frees)
    return sum(int(graph.tensor_bytes[t]) for t in written)


@pytest.mark.parametrize("policy", ["none", "full", "selective:mlp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_go_out_and_come_back(
    family: str, policy: str, graphs: dict[str, Graph], assert_sound: Callable[..., None]
):
    graph = recompute(graphs[family], plan(recompute=policy))
    made = offload(graph, plan("activations"))
    assert_sound(made)
    assert copied(made, "copy.out") == copied(made, "copy.in") > 0
    assert saved(made) < saved(graph) - 0.9 * copied(made, "copy.out")
    assert {node.stream for node in made.nodes() if node.source.startswith("copy.")} == {"copy"}
    kinds = [node.op.kind for node in made.nodes() if node.op is not None and not node.source.startswith("copy.")]
    assert kinds == [node.op.kind for node in graph.nodes() if node.op is not None]


def test_a_copy_back_waits_for_the_layer_before(graphs: dict[str, Graph]):
    nodes = list(offload(graphs["llama"], plan("activations")).nodes())
    copies = [node for node in nodes if node.source == "copy.in"]
    assert len(copies) == 6
    for before, copy in pairwise(copies):
        writer = next(node for node in nodes if copy.reads[-1] in node.writes)
        assert set(before.writes) & set(writer.reads)


def test_states_leave_a_staging_buffer_on_the_device(graphs: dict[str, Graph], assert_sound: Callable[..., None]):
    graph = graphs["llama"]
    made = offload(graph, plan("optimizer"))
    states = sum(t.size_bytes * t.count for t in graph.tensors if t.role == "optimizer_state")
    assert copied(made, "copy.states_in") == copied(made, "copy.states_out") == states
    assert peak_memory(made).optimizer_gib == 0
    assert_sound(made)


def test_caches_are_read_from_the_host(small_model: Make):
    workload = Workload("decode", batch=2, seq_len=64, cache="static", optimizer="none")
    graph = trace(small_model("llama"), workload, "bf16")
    made = offload(graph, plan("kv"))
    assert copied(made, "copy.cache_in") == keys_and_values(graph)  # counters of positions stay on the device
    assert peak_memory(made).activations_gib < peak_memory(graph).activations_gib


def test_unknown_offloads_are_named_and_none_is_the_same_graph(graphs: dict[str, Graph]):
    assert offload(graphs["llama"], plan()) is graphs["llama"]
    with pytest.raises(PlanError, match="weights"):
        offload(graphs["llama"], plan("weights"))


def keys_and_values(graph: Graph) -> int:
    return sum(t.size_bytes * t.count for t in graph.tensors if t.role == "cache" and t.dtype == "bf16")


@pytest.mark.parametrize("stack", ["torch", "vllm"])
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_a_token_brings_caches_in_and_sends_its_own_out(
    stack: str, cache: str, small_model: Make, assert_sound: Callable[..., None]
):
    tokens = 64
    workload = Workload("decode", batch=2, seq_len=tokens, cache=cache, optimizer="none", attention="fused")
    served = Plan(Parallel(), CLUSTER, load_stack(stack))
    graph = apply_passes(trace(small_model("llama", layers=6), workload, "bf16"), served, INFERENCE)
    made = offload(graph, plan("kv"))
    assert_sound(made)
    grows = stack == "torch" and cache == "dynamic"  # by copying; an engine has a cache of its own
    whole = keys_and_values(graph) / (2 if grows else 1)
    assert copied(made, "copy.cache_in") == pytest.approx(whole, rel=0.02)
    assert copied(made, "copy.cache_out") == pytest.approx(whole / (tokens + 1), rel=0.02)
    assert keys_and_values(made) == 0
    assert {n.stream for n in made.nodes() if n.source.startswith("copy.")} == {"copy", "copy_out"}


@pytest.mark.parametrize("stack", ["torch", "vllm"])
def test_a_prompt_leaves_its_cache_on_the_host(stack: str, small_model: Make, assert_sound: Callable[..., None]):
    workload = Workload("prefill", batch=2, seq_len=64, cache="static", optimizer="none", attention="fused")
    served = Plan(Parallel(), CLUSTER, load_stack(stack))
    graph = apply_passes(trace(small_model("llama", layers=12), workload, "bf16"), served, INFERENCE)
    made = offload(graph, plan("kv"))
    assert_sound(made)
    assert copied(made, "copy.cache_out") == keys_and_values(graph)
    assert copied(made, "copy.cache_in") == 0
    assert peak_memory(made).peak_gib < peak_memory(graph).peak_gib


def test_a_copy_of_a_cache_waits_for_the_layer_before_to_begin(small_model: Make):
    workload = Workload("decode", batch=2, seq_len=64, cache="static", optimizer="none")
    nodes = list(offload(trace(small_model("llama", layers=6), workload, "bf16"), plan("kv")).nodes())
    copies = [position for position, node in enumerate(nodes) if node.source == "copy.cache_in"]
    writers = [
        next((p for p, node in enumerate(nodes) if nodes[copy].reads[1] in node.writes), None) for copy in copies
    ]
    assert writers[:2] == [None, None]
    for before, writer, copy in zip(copies[:-2], writers[2:], copies[2:], strict=True):
        assert writer is not None
        assert writer < before < copy
