"""Memory: the walk over folded graphs agrees with one over every node, and ranks need what published runs measured."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import Cluster, load_cluster
from opcast.simulator.graph import Block, Graph, Node, Tensor
from opcast.simulator.memory.allocator import Allocator
from opcast.simulator.memory.breakdown import GIB
from opcast.simulator.memory.lifetimes import BUCKET_OF_ROLE, BUCKETS, peak_memory, walk_chunk
from opcast.simulator.memory.replay import fullest_moment, replay
from opcast.simulator.memory.stage import stage_memory
from opcast.simulator.passes.data import data_parallel, micro_batch_variant
from opcast.simulator.passes.order import apply_passes
from opcast.simulator.passes.pipeline import split_pipeline
from opcast.simulator.passes.recompute import recompute
from opcast.simulator.question.plan import Parallel, Plan, PlanError, Stack, load_stack
from opcast.simulator.trace import Workload, trace

FAMILIES = ("llama", "gemma2", "deepseek_v3")
CLUSTER = Cluster("c", "c", "h100_sxm")
FIELDS = [bucket for bucket in BUCKETS if bucket != "cache"]  # keys and values count as activations
MIXED = Stack(master_weights=True, gradient_dtype="fp32")
Make = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def graphs(small_model: Make) -> dict[str, Graph]:
    workload = Workload("train", batch=2, seq_len=16, attention="fused")
    return {family: trace(small_model(family, layers=6), workload, "bf16") for family in FAMILIES}


def plan(stack: Stack = MIXED, micro_batches: int = 1, recompute: str = "none", **parallel: Any) -> Plan:
    return Plan(Parallel(**parallel), CLUSTER, stack, micro_batches=micro_batches, recompute=recompute)


def walked(graph: Graph) -> dict[str, float]:
    """The peak by a walk over every executed node, with sets."""
    kind = {t: BUCKET_OF_ROLE[graph.tensor(t).role] for t in range(graph.tensor_count)}
    nodes = list(graph.nodes())
    seen: set[int] = set()
    begins: list[list[int]] = []
    living = dict.fromkeys(BUCKETS, 0)
    for node in nodes:
        for tensor in dict.fromkeys(node.reads):
            if tensor not in seen:
                seen.add(tensor)
                living[kind[tensor]] += int(graph.tensor_bytes[tensor])
        begins.append([t for t in dict.fromkeys(node.writes) if t not in seen])
        seen.update(begins[-1])
    peak = dict(living)
    for number, (node, new) in enumerate(zip(nodes, begins, strict=True)):
        for tensor in new:
            living[kind[tensor]] += int(graph.tensor_bytes[tensor])
        if number == 0 or sum(living.values()) > sum(peak.values()):
            peak = dict(living)
        for tensor in node.frees:
            living[kind[tensor]] -= int(graph.tensor_bytes[tensor])
    return peak


@pytest.mark.parametrize("policy", ["none", "full", "layers:1,2", "selective:mlp"])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_folded_walk_is_the_walk_over_every_node(family: str, stage: int, policy: str, graphs: dict[str, Graph]):
    p = plan(zero_stage=stage, recompute=policy)
    graph = data_parallel(recompute(graphs[family], p), p)
    found, reference = peak_memory(graph), walked(graph)
    assert found.peak_gib * GIB == pytest.approx(sum(reference.values()))
    for bucket in FIELDS:
        assert getattr(found, f"{bucket}_gib") * GIB == pytest.approx(reference[bucket])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_folded_graph_is_walked_right(data: st.DataObject):
    repeat = data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.integers(0, 50), min_size=3, max_size=3))
    nodes = []
    for position in range(data.draw(st.integers(1, 4))):
        reads = data.draw(st.lists(st.sampled_from([0, 1, 5]), max_size=2, unique=True))
        writes = data.draw(st.lists(st.sampled_from([1, 2, 5]), max_size=2, unique=True))
        frees = data.draw(st.lists(st.sampled_from([1, 5]), max_size=1)) if position else []
        nodes.append(Node(None, f"n{position}", "", "forward", tuple(reads), tuple(writes), 0, tuple(frees)))
    steps = {1: 1, 2: 1, 5: 0}
    tensors = (
        Tensor(0, sizes[0], "bf16", "weight"),
        Tensor(1, sizes[1], "bf16", "activation", 4 + repeat),
        Tensor(5 + repeat, sizes[2], "bf16", "gradient", 2),
    )
    freed = [t for n in nodes for t in n.frees]
    if len(set(freed)) < len(freed):
        return
    graph = Graph("g", (Block(tuple(nodes), repeat, {k: v for k, v in steps.items() if v}),), tensors, 1, 1.0)
    order = [t for node in graph.nodes() for t in node.frees]
    uses: dict[int, int] = {}
    for time, node in enumerate(graph.nodes()):
        uses.update(dict.fromkeys((*node.reads, *node.writes), time))
    ends = {t: time for time, node in enumerate(graph.nodes()) for t in node.frees}
    if len(set(order)) < len(order) or any(t not in uses or uses[t] > end for t, end in ends.items()):
        return  # no such graph is traced: freed twice, or used after it
    assert peak_memory(graph).peak_gib * GIB == pytest.approx(sum(walked(graph).values()))


def test_micro_batches_in_flight_add_what_their_forward_keeps(graphs: dict[str, Graph]):
    p = plan(pp=2, micro_batches=8)
    first, last = split_pipeline(data_parallel(graphs["llama"], p), p)
    one, two, three = (stage_memory([first.graph], [n], p) for n in (1, 2, 3))
    kept = two.allocated_gib - one.allocated_gib
    assert kept > 0
    assert three.allocated_gib - two.allocated_gib == pytest.approx(kept)
    assert three.by_class["activations kept for the backward pass"] == pytest.approx(3 * kept)
    both = stage_memory([first.graph, last.graph], [1, 1], p)
    assert both.weights_gib == pytest.approx(
        stage_memory([first.graph], [1], p).weights_gib + stage_memory([last.graph], [1], p).weights_gib
    )


def test_a_stage_holds_its_own_share_of_the_optimizer(graphs: dict[str, Graph]):
    p = plan(pp=2, zero_stage=1, micro_batches=4)
    whole = peak_memory(data_parallel(graphs["llama"], p))
    stages = [stage_memory([chunk.graph], [1], p) for chunk in split_pipeline(data_parallel(graphs["llama"], p), p)]
    for field in ("weights_gib", "gradients_gib", "optimizer_gib"):
        assert sum(getattr(stage, field) for stage in stages) == pytest.approx(getattr(whole, field), rel=0.05)


@pytest.mark.parametrize("allocator", [None, "expandable"])
def test_a_chunk_without_layers_needs_what_runs_beside_it(allocator: str | None, graphs: dict[str, Graph]) -> None:
    """nanotron leaves stages before the logits empty."""
    chosen = replace(plan(pp=4, stages=(3, 3, 0, 0)), options={"allocator": allocator} if allocator else {})
    full, _, empty, last = (chunk.graph for chunk in split_pipeline(graphs["llama"], chosen))
    assert not empty.blocks
    alone = stage_memory([empty], [1], chosen)
    assert alone.allocated_gib == 0.0
    assert alone.peak_gib == pytest.approx(alone.by_class["context and communicators"])
    assert stage_memory([full, empty], [2, 2], chosen) == stage_memory([full], [2], chosen)
    assert stage_memory([last], [1], chosen).allocated_gib > 0.0


def test_what_must_fit_is_more_than_what_is_allocated(graphs: dict[str, Graph]):
    p = replace(plan(replace(MIXED, fragmentation=0.1)), micro_batches=2)
    memory = stage_memory([data_parallel(graphs["llama"], p)], [1], p)
    assert memory.reserved_gib == pytest.approx(1.1 * memory.allocated_gib)
    assert memory.peak_gib > memory.reserved_gib + 0.4
    buckets = sum(getattr(memory, f"{bucket}_gib") for bucket in FIELDS)
    assert buckets == pytest.approx(memory.peak_gib)
    assert sum(memory.by_class.values()) == pytest.approx(memory.peak_gib)
    assert memory.where
    assert memory.advice == ""


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_replayed_allocator_holds_what_the_walk_counts(stage: int, in_flight: int, graphs: dict[str, Graph]):
    p = plan(zero_stage=stage, micro_batches=4)
    graph = data_parallel(graphs["llama"], p)
    usual = stage_memory([graph], [in_flight], p)
    reserved = {}
    for segments in ("native", "expandable"):
        memory = stage_memory([graph], [in_flight], replace(p, options={"allocator": segments}))
        assert memory.allocated_gib == usual.allocated_gib
        reserved[segments] = memory.reserved_gib
    assert all(usual.allocated_gib <= each <= usual.allocated_gib + 0.25 for each in reserved.values())


def test_the_replay_peaks_where_the_walk_does(graphs: dict[str, Graph]):
    p = plan(zero_stage=1, micro_batches=4)
    graph = micro_batch_variant(data_parallel(graphs["llama"], p), first=False, last=True)
    walk = walk_chunk(graph, p)
    allocator = Allocator()
    replay(allocator, [walk], fullest_moment([2]))
    counted = walk.living.sum(axis=0).max() + 2 * walk.saved
    assert 0.8 * walk.living.sum(axis=0).max() <= allocator.peak_allocated <= 1.01 * counted
    assert allocator.peak_allocated <= allocator.peak_reserved


def test_an_unknown_allocator_is_named(graphs: dict[str, Graph]):
    with pytest.raises(PlanError, match="native, expandable"):
        stage_memory([graphs["llama"]], [1], replace(plan(), options={"allocator": "jemalloc"}))


@pytest.mark.reference
@pytest.mark.parametrize("name", ["l12_tp1_pp2_dp4_mbc4", "tp2_pp1_dp4_l12_mbc4", "l12_tp8_pp1_dp1_mbc4"])
def test_allocated_memory_of_megatron_on_b200(
    name: str, reference_data: Path, tmp_path_factory: pytest.TempPathFactory
):
    """Every setting of these runs is published: Megatron-Core 0.14, Llama-3 70B of 12 layers, 4,096 tokens."""
    with (reference_data / "truth" / "train_simumax_b200.csv").open() as file:
        row = next(row for row in csv.DictReader(file) if name in row["row_id"])
    graph = trace(llama_70b(int(row["layers"])), Workload("train", seq_len=4096, attention="fused"), "bf16")
    parallel = Parallel(tp=int(row["tp"]), pp=int(row["pp"]), zero_stage=1, sequence_parallel=True)
    cluster = replace(load_cluster("dgx_b200"), nodes=1)
    p = Plan(parallel, cluster, load_stack("megatron_core"), micro_batches=int(row["ga"]))
    chunks = split_pipeline(apply_passes(graph, p), p)
    found = max(stage_memory([c.graph], [p.parallel.pp - c.stage], p).allocated_gib for c in chunks)
    assert found == pytest.approx(float(row["peak_mem_alloc_gib"]), rel=0.01)


def llama_70b(layers: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
