"""Offload: what leaves the device comes back, and memory falls by what is away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.clusters import Cluster
from opcast.simulator.graph import Graph
from opcast.simulator.memory.lifetimes import peak_memory
from opcast.simulator.passes.data import micro_batch_variant
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


def test_an_optimizer_on_the_host_leaves_nothing_of_it_on_the_device(
    graphs: dict[str, Graph], assert_sound: Callable[..., None]
):
    graph = graphs["llama"]
    made = offload(graph, plan("optimizer"))
    assert copied(made, "copy.gradients_out") == copied(made, "copy.weights_in") == graph.parameters * 2
    assert peak_memory(made).optimizer_gib == 0
    assert [node.source for node in made.nodes() if node.phase == "optimizer"] == [
        "copy.gradients_out",
        "host.adamw",
        "copy.weights_in",
    ]
    assert_sound(made)


STACKS = ("torch", "megatron", "torchtitan", "deepspeed", "deepspeed_liger")


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("stack", STACKS)
def test_the_host_updates_what_a_rank_holds(
    stack: str, zero_stage: int, graphs: dict[str, Graph], assert_sound: Callable[..., None]
):
    """Its bytes are the framework's for each parameter; offload never needs more of the device."""
    graph, of = graphs["llama"], load_stack(stack)
    kept, made = (
        apply_passes(graph, Plan(Parallel(zero_stage=zero_stage), CLUSTER, of, offload=what))
        for what in ((), ("optimizer",))
    )
    assert_sound(made)
    (update,) = (node.op for node in made.nodes() if node.op is not None and node.op.kind == "host_pass")
    ranks, size = (8 if zero_stage else 1), (4 if of.master_weights else 2)
    own = graph.parameters / ranks
    assert update.size_bytes == pytest.approx(own * of.host_bytes * size / 4, rel=0.02)
    assert update.host_mbps == round(CLUSTER.host_share_gbps(of.host_threads) * 1e3)
    before, after = peak_memory(kept), peak_memory(made)
    assert after.peak_gib <= before.peak_gib
    assert after.optimizer_gib == 0
    fsdp = zero_stage == 3 and not of.half_shards
    gathers = sum(node.op is not None and node.op.kind == "all_gather" for node in made.nodes())
    brought = sum(node.source == "copy.weights_in" for node in made.nodes())
    assert brought == (gathers if fsdp else 1)
    assert (after.weights_gib < 1e-6) == fsdp
    kinds = {node.op.kind for node in made.nodes() if node.op is not None and node.phase == "optimizer"}
    assert "adamw" not in kinds


def test_gradients_leave_beside_the_backward_pass_once_for_each_micro_batch(graphs: dict[str, Graph]):
    """DeepSpeed's in 16 bits each time, and in fp32 with the last (stage3.py, partition_grads)."""
    of = Plan(Parallel(zero_stage=3), CLUSTER, load_stack("deepspeed"), offload=("optimizer",), micro_batches=2)
    made = apply_passes(graphs["llama"], of)
    share = graphs["llama"].parameters / 8
    for first, last, factor in ((True, False, 2), (False, True, 6), (True, True, 6)):
        nodes = list(micro_batch_variant(made, first, last).nodes())
        out = [n for n in nodes if n.source.removeprefix("sync.") == "copy.gradients_out"]
        assert {n.phase for n in out} == {"backward"}
        assert sum(n.op.size_bytes for n in out if n.op is not None) == pytest.approx(share * factor, rel=0.02)
        back = sum(n.op.size_bytes for n in nodes if n.source == "copy.gradients_in" and n.op is not None)
        assert back == pytest.approx(share * 2, rel=0.02)


@given(st.floats(1, 1e4), st.floats(1, 8), st.integers(1, 512), st.integers(0, 64), st.integers(1, 72))
def test_a_faster_host_is_never_slower(gbps: float, more: float, cores: int, threads: int, devices: int):
    slow = replace(CLUSTER, host_gbps=gbps, host_cores=cores, devices_per_node=devices)
    fast = replace(slow, host_gbps=gbps * more, host_cores=round(cores * more))
    assert 0 < slow.host_share_gbps(threads) <= fast.host_share_gbps(threads)
    assert slow.host_share_gbps(threads) * devices <= gbps
    assert threads == 0 or slow.host_share_gbps(threads) <= slow.host_share_gbps(threads + 1)


def test_a_published_update_on_a_host():
    """ZeRO-Offload (arXiv 2101.06840, table 4): a billion parameters in 0.22 s on a DGX-2 (256 GB/s)."""
    dgx2 = replace(CLUSTER, host_gbps=256.0, host_cores=48, devices_per_node=1)
    assert 30 / dgx2.host_share_gbps() == pytest.approx(0.22, rel=0.4)


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
