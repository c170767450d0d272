"""Context parallelism: ranks that share tokens do the same work between them, and exchange what attention needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import Cluster
from opcast.datasets.ops import attended_pairs
from opcast.simulator.graph import Graph
from opcast.simulator.passes.context import context_parallel
from opcast.simulator.passes.sharding.attention import ring_parts
from opcast.simulator.passes.verify import tensor_flops
from opcast.simulator.question.plan import Parallel, Plan, PlanError
from opcast.simulator.trace import Workload, trace

CLUSTER = Cluster("c", "c", "h100_sxm", nodes=2)
STYLES = ("ring", "ring_allgather", "allgather", "ulysses")
FAMILIES = ("llama", "qwen3_moe", "deepseek_v3", "gpt2")
LENGTH = 32
OF_TOKENS = ("attention_prefill", "attention_backward", "softmax", "softmax_backward", "embedding", "moe_route")
Make = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def graphs(small_model: Make) -> dict[str, Graph]:
    step = Workload("train", batch=2, seq_len=LENGTH, attention="fused")
    return {name: trace(small_model(name, layers=3), step, "bf16") for name in FAMILIES}


@pytest.fixture(scope="module")
def windowed(small_model: Make) -> Graph:
    return trace(small_model("gemma2", layers=4), Workload("train", seq_len=LENGTH, attention="fused"), "bf16")


def plan(cp: int, style: str = "ring", **options: Any) -> Plan:
    return Plan(Parallel(cp=cp, cp_style=style), CLUSTER, options=options)


def bytes_of(graph: Graph, *roles: str) -> int:
    return sum(t.size_bytes * t.count for t in graph.tensors if t.role in roles)


def sent(graph: Graph, phase: str, *kinds: str) -> int:
    """Bytes of collectives of the group, by nccl-tests' convention."""
    found = ((n, k) for n, k in graph.weighted() if n.group == "cp" and n.phase == phase)
    return sum(k * n.op.size_bytes for n, k in found if n.op is not None and n.op.kind in kinds)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("cp", [2, 4])
def test_ranks_do_the_whole_work_between_them(
    family: str, style: str, cp: int, graphs: dict[str, Graph], assert_sound: Callable[..., None]
):
    graph = graphs[family]
    shared = context_parallel(graph, plan(cp, style))
    assert_sound(shared)
    assert [b.repeat for b in shared.blocks] == [b.repeat for b in graph.blocks]
    assert tensor_flops(shared) * cp == pytest.approx(tensor_flops(graph), rel=1e-12)
    assert bytes_of(shared, "weight", "gradient", "optimizer_state") == bytes_of(
        graph, "weight", "gradient", "optimizer_state"
    )
    assert shared.model_flops == graph.model_flops
    assert bytes_of(shared, "activation") < bytes_of(graph, "activation")
    assert context_parallel(graph, plan(1)) is graph


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_shared_and_nothing_else_changes_size(family: str, graphs: dict[str, Graph]):
    graph, cp = graphs[family], 4
    shared = context_parallel(graph, plan(cp, "ulysses"))
    ratio = shared.tensor_bytes / graph.tensor_bytes  # Ulysses adds no tensors
    assert set(np.unique(ratio)) <= {1.0, 1 / cp}
    whole = np.flatnonzero(ratio == 1.0)
    made = {t for n in graph.nodes() if n.op is not None and n.op.kind in OF_TOKENS for t in n.writes}
    assert not made & set(whole.tolist())


def test_ring_sends_keys_and_values_round_and_their_gradients_home(graphs: dict[str, Graph]):
    graph, cp, layers = graphs["llama"], 4, 3
    shared = context_parallel(graph, plan(cp))
    keys = 2 * (LENGTH // cp) * 2 * (16 + 16) * 2  # batch, tokens, heads, widths, bytes
    assert sent(shared, "forward", "send_recv") == layers * (cp - 1) * keys
    assert sent(shared, "backward", "send_recv") == layers * (2 * cp - 1) * keys
    assert {n.stream for n, _ in shared.weighted() if n.group} == {"comm:cp"}


def test_gathering_sends_all_keys_and_scatters_their_gradients(graphs: dict[str, Graph]):
    shared = context_parallel(graphs["llama"], plan(4, "allgather"))
    keys = 2 * LENGTH * 2 * (16 + 16) * 2
    assert sent(shared, "forward", "all_gather") == 3 * keys
    assert sent(shared, "backward", "all_gather") == 3 * keys
    assert sent(shared, "backward", "reduce_scatter") == 3 * keys


def test_pytorch_gathers_keys_once_and_sends_gradients_round_in_fp32(graphs: dict[str, Graph]):
    graph, cp, layers = graphs["llama"], 4, 3
    shared = context_parallel(graph, plan(cp, "ring_allgather"))
    keys = 2 * (LENGTH // cp) * 2 * (16 + 16) * 2
    for phase in ("forward", "backward"):
        assert sent(shared, phase, "all_gather") == layers * cp * keys
    assert sent(shared, "forward", "send_recv") == 0
    assert sent(shared, "backward", "send_recv") == layers * cp * 2 * keys
    merges = [(n, k) for n, k in shared.weighted() if n.source == "opcast.merge" and n.op is not None]
    assert {n.op.dtype for n, _ in merges if n.op} == {"fp32"}
    assert sum(k for n, k in merges if n.phase == "forward") == layers * (cp - 1)
    assert tensor_flops(shared) == tensor_flops(context_parallel(graph, plan(cp)))


def test_ulysses_exchanges_tokens_for_heads_and_back(graphs: dict[str, Graph]):
    shared = context_parallel(graphs["llama"], plan(2, "ulysses"))
    token = 2 * (LENGTH // 2) * 2  # batch, tokens, bytes
    queries, keys, result = token * 4 * 16, token * 2 * 16, token * 4 * 16
    assert sent(shared, "forward", "all_to_all") == 3 * (queries + 2 * keys + result)
    assert sent(shared, "backward", "all_to_all") == 3 * (queries + 2 * keys + result)
    heads = {(n.op.heads_q, n.op.heads_kv) for n, _ in shared.weighted() if n.op and "attention" in n.op.kind}
    assert heads == {(2, 1)}


@settings(deadline=None)
@given(st.integers(2, 16), st.integers(1, 64))
def test_zigzag_gives_every_rank_the_same_pairs(ranks: int, half: int):
    tokens = 2 * half
    parts = ring_parts(tokens, ranks, causal=True, zigzag=True)
    pairs = sum(float(attended_pairs(p.seq_q, p.seq_kv, p.causal, 0)) for p in parts)
    assert len(parts) == ranks
    assert ranks * pairs == float(attended_pairs(tokens * ranks, tokens * ranks, 1, 0))


def test_without_zigzag_the_last_rank_decides(graphs: dict[str, Graph], assert_sound: Callable[..., None]):
    graph = graphs["llama"]
    for style in ("ring", "ring_allgather", "allgather"):
        even = tensor_flops(context_parallel(graph, plan(4, style)))
        slowest = context_parallel(graph, plan(4, style, zigzag=False))
        assert_sound(slowest)
        assert tensor_flops(slowest) > even
    own = LENGTH // 4
    pairs = sum(float(attended_pairs(p.seq_q, p.seq_kv, p.causal, 0)) for p in ring_parts(own, 4, True, False))
    assert pairs == own * (LENGTH - own) + own * (own + 1) / 2


def test_windows_need_the_neighbours_last_keys_only(windowed: Graph, assert_sound: Callable[..., None]):
    shared = context_parallel(windowed, plan(4))
    assert_sound(shared)
    sizes = {n.op.size_bytes for n, _ in shared.weighted() if n.group and n.phase == "forward" and n.op}
    window, whole = 8, LENGTH // 4
    token = 2 * (16 + 16) * 2
    assert sizes == {2 * window * token, whole * token}
    assert tensor_flops(shared) * 4 == pytest.approx(tensor_flops(windowed), rel=0.05)


@pytest.mark.parametrize(
    ("cp", "style", "message"),
    [
        (3, "ring", r"sequences of 32 tokens cannot be cut into 6 equal parts; take parallel.cp=2"),
        (8, "ulysses", r"parallel.cp=8 does not divide 4 heads .*; take parallel.cp=4"),
    ],
)
def test_bad_degrees_name_the_nearest_good_one(cp: int, style: str, message: str, graphs: dict[str, Graph]):
    with pytest.raises(PlanError, match=message):
        context_parallel(graphs["llama"], plan(cp, style))


def test_a_prompt_shares_its_cache(small_model: Make):
    step = Workload("prefill", seq_len=LENGTH, attention="fused", optimizer="none")
    graph = trace(small_model("llama"), step, "bf16")
    shared = context_parallel(graph, plan(4))
    assert bytes_of(shared, "cache") * 4 == bytes_of(graph, "cache")
    assert tensor_flops(shared) <= tensor_flops(graph) / 3


# --- sequences of unequal length -----------------------------------------------------------------------


def packed_plan(cp: int, style: str = "dynamic", **options: Any) -> Plan:
    return Plan(Parallel(cp=cp, cp_style=style), CLUSTER, options=options)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_sequences_attend_to_themselves_alone(family: str, graphs: dict[str, Graph], assert_sound: Callable[..., None]):
    graph, lengths = graphs[family], [24, 16, 8, 8, 8]
    alone = context_parallel(graph, packed_plan(1, "ring", sequence_lengths=lengths))
    calls = [node.op for node, _ in graph.weighted() if node.op and node.op.kind == "attention_prefill"]
    own = [node.op for node, _ in alone.weighted() if node.op and node.op.kind == "attention_prefill"]
    assert len(own) == len(lengths) * len(calls)
    assert [op.seq_q for op in own[: len(lengths)]] == [op.seq_kv for op in own[: len(lengths)]] == lengths
    assert {op.batch for op in own} == {1}
    assert alone.model_flops < graph.model_flops
    assert_sound(alone)


def test_short_sequences_stay_whole_on_a_rank(graphs: dict[str, Graph], assert_sound: Callable[..., None]):
    graph, lengths = graphs["llama"], [8] * 8
    dynamic = context_parallel(graph, packed_plan(4, sequence_lengths=lengths))
    ring = context_parallel(graph, packed_plan(4, "ring", sequence_lengths=lengths))
    assert not [node for node, _ in dynamic.weighted() if node.group == "cp"]
    assert [node for node, _ in ring.weighted() if node.group == "cp"]
    assert tensor_flops(dynamic) <= tensor_flops(ring) * 1.01
    for made in (dynamic, ring):
        assert_sound(made)


@pytest.mark.parametrize(
    ("lengths", "style", "said"),
    [
        ([32], "dynamic", "add up to 32 tokens, and a micro-batch has 64"),
        ([32, 32], "ulysses", "cp_style=ring or dynamic, not with ulysses"),
        ([61, 3], "ring", "take cp_style=dynamic"),
    ],
)
def test_lengths_that_cannot_be_are_refused(lengths: list[int], style: str, said: str, graphs: dict[str, Graph]):
    with pytest.raises(PlanError, match=said):
        context_parallel(graphs["llama"], packed_plan(2, style, sequence_lengths=lengths))
