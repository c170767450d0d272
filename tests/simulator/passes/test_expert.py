"""Expert parallelism: experts are shared out whole, tokens find them, and no work is lost or made up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import Cluster
from opcast.datasets.dtypes import itemsize
from opcast.simulator.graph import Graph, Node
from opcast.simulator.passes.expert import expert_parallel, is_expert
from opcast.simulator.passes.rewriting.draft import Draft
from opcast.simulator.passes.tensor import tensor_parallel
from opcast.simulator.passes.zero.families import families
from opcast.simulator.question.plan import Parallel, Plan, PlanError, Stack
from opcast.simulator.trace import Workload, trace
from opcast.simulator.trace.values import expert_counts

CLUSTER = Cluster("c", "c", "h100_sxm", nodes=2)
FAMILIES = ("qwen3_moe", "deepseek_v3", "mixtral")
EXPERTS = {"qwen3_moe": 8, "deepseek_v3": 8, "mixtral": 4}
TOKENS, HIDDEN, TOPK = 32, 64, 2
Make = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def graphs(small_model: Make) -> dict[tuple[str, bool], Graph]:
    return {
        (name, accumulate): trace(
            small_model(name, layers=4),
            Workload("train", batch=2, seq_len=16, attention="fused", accumulate=accumulate),
            "bf16",
        )
        for name in FAMILIES
        for accumulate in (False, True)
    }


@pytest.fixture(scope="module")
def uneven(small_model: Make) -> Graph:
    step = Workload("train", batch=2, seq_len=16, attention="fused", expert_load="zipf:0.8")
    return trace(small_model("qwen3_moe", layers=4), step, "bf16")


def plan(ep: int, stack: Stack | None = None, tp: int = 1, sequence_parallel: bool = False, **options: Any) -> Plan:
    parallel = Parallel(ep=ep, tp=tp, sequence_parallel=sequence_parallel)
    return Plan(parallel, CLUSTER, stack or Stack(), options=options)


def flops(graph: Graph, kind: str) -> float:
    return sum(k * float(n.op.cost.flops) for n, k in graph.weighted() if n.op is not None and n.op.kind == kind)


def bytes_of(graph: Graph, role: str) -> int:
    return sum(t.size_bytes * t.count for t in graph.tensors if t.role == role)


def exchanges(graph: Graph) -> list[tuple[str, str]]:
    """Phase and kind of each exchange, once a repetition of what is folded."""
    found = [(n.phase, n.op.kind, k) for n, k in graph.weighted() if n.op is not None and n.op.kind.startswith("ep_")]
    return [(phase, kind) for phase, kind, k in found for _ in range(k)]


def products(graph: Graph) -> list[Node]:
    return [n for n, _ in graph.weighted() if n.op is not None and n.op.kind == "grouped_gemm"]


def elements(graph: Graph, tensors: Iterable[int]) -> int:
    """How many weights lie in some tensors: a router's are in fp32 beside others in bf16."""
    return sum(each.size_bytes // itemsize(each.dtype) for each in (graph.tensor(int(t)) for t in tensors))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ep", [2, 4])
def test_experts_are_shared_and_everything_else_stays(
    family: str, ep: int, accumulate: bool, graphs: dict[tuple[str, bool], Graph], assert_sound: Callable[..., None]
):
    graph = graphs[family, accumulate]
    shared = expert_parallel(graph, plan(ep))
    assert_sound(shared)
    assert [b.repeat for b in shared.blocks] == [b.repeat for b in graph.blocks]
    assert shared.tensor_bytes[: graph.tensor_count].shape == graph.tensor_bytes.shape
    known = {f.name: f for f in families(Draft(graph), plan(ep))}
    dense, expert = (int(graph.tensor_bytes[known[name].weights].sum()) for name in ("dense", "expert"))
    assert bytes_of(shared, "weight") == dense + expert // ep
    assert bytes_of(shared, "gradient") == dense + expert // ep
    assert bytes_of(shared, "optimizer_state") == 2 * (dense + expert // ep)
    apart, shares = (elements(graph, known[name].weights) for name in ("dense", "expert"))
    assert flops(shared, "adamw") / flops(graph, "adamw") == pytest.approx((apart + shares / ep) / (apart + shares))
    assert flops(shared, "grouped_gemm") == flops(graph, "grouped_gemm")  # as many rows come as go
    assert flops(shared, "gemm") == flops(graph, "gemm")  # shared experts and routers are dense
    assert {n.op.experts for n in products(shared) if n.op} == {EXPERTS[family] // ep}


@pytest.mark.parametrize("family", FAMILIES)
def test_backward_takes_the_same_ways(family: str, graphs: dict[tuple[str, bool], Graph]):
    graph = graphs[family, False]
    shared = expert_parallel(graph, plan(4))
    layers = sum(k for n, k in graph.weighted() if n.op and n.op.kind == "grouped_gemm" and n.phase == "forward") // 2
    ways = [("forward", "ep_dispatch"), ("forward", "ep_combine")] * layers
    back = [("backward", "ep_dispatch"), ("backward", "ep_combine")] * layers
    assert sorted(exchanges(shared)) == sorted(ways + back)
    for node, _ in shared.weighted():
        if node.group == "ep":
            assert node.op is not None
            assert (node.op.tokens, node.op.hidden, node.op.topk) == (TOKENS, HIDDEN, TOPK)
            assert (node.op.experts, node.op.ranks, node.stream) == (EXPERTS[family], 4, "compute")


def test_dispatch_comes_before_the_experts_and_combine_after(graphs: dict[tuple[str, bool], Graph]):
    shared = expert_parallel(graphs["qwen3_moe", False], plan(2))
    order = [n.op.kind for n in shared.nodes() if n.op and n.op.kind in ("ep_dispatch", "grouped_gemm", "ep_combine")]
    forward = ["ep_dispatch", "grouped_gemm", "grouped_gemm", "ep_combine"] * 4
    assert order[: len(forward)] == forward
    assert order[len(forward) :] == ["ep_dispatch", *["grouped_gemm"] * 4, "ep_combine"] * 4


def test_stacks_that_overlap_run_exchanges_beside_compute(graphs: dict[tuple[str, bool], Graph]):
    shared = expert_parallel(graphs["qwen3_moe", False], plan(2, Stack(overlap=("ep",))))
    assert {n.stream for n, _ in shared.weighted() if n.group == "ep"} == {"comm:ep"}


def test_the_busiest_rank_decides(uneven: Graph, assert_sound: Callable[..., None]):
    counts = expert_counts(TOKENS, TOPK, 8, "zipf:0.8")
    for ep in (2, 4, 8):
        known = expert_parallel(uneven, plan(ep, expert_load="zipf:0.8"))
        local = 8 // ep
        busiest = max(sum(counts[i : i + local]) for i in range(0, 8, local)) * ep / (TOKENS * TOPK)
        assert flops(known, "grouped_gemm") / flops(uneven, "grouped_gemm") == pytest.approx(busiest, rel=0.02)
        assert_sound(known)
    guessed = flops(expert_parallel(uneven, plan(4)), "grouped_gemm")
    assert flops(uneven, "grouped_gemm") < guessed <= flops(expert_parallel(uneven, plan(8)), "grouped_gemm")
    alone = expert_parallel(uneven, plan(8))
    assert {n.op.imbalance for n in products(alone) if n.op} == {100}  # one expert a rank
    assert alone.tensor_bytes.sum() > expert_parallel(replace(uneven), plan(8, capacity=1.0)).tensor_bytes.sum()


@settings(deadline=None, max_examples=200)
@given(st.floats(0, 20), st.floats(0, 20), st.sampled_from([(8, 2), (64, 6), (128, 8)]), st.sampled_from([1, 24, 640]))
def test_a_steeper_load_gives_the_first_experts_no_less(one: float, other: float, sizes: tuple[int, int], tokens: int):
    (flat, steep), (experts, topk) = sorted([one, other]), sizes
    less, more = (np.cumsum(expert_counts(tokens, topk, experts, f"zipf:{s}")) for s in (flat, steep))
    assert less[-1] == more[-1] == tokens * topk
    assert (more >= less - experts).all()  # counts are whole numbers
    assert (np.diff(more, prepend=0) <= tokens).all()


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_all_tokens_end_on_one_rank(ep: int):
    counts = np.array(expert_counts(1024, 8, 64, "zipf:20")).reshape(ep, -1).sum(axis=1)
    assert counts[0] * ep / counts.sum() == pytest.approx(ep, rel=0.02)


@pytest.mark.parametrize("mode", ["normal", "low_latency", "alltoall"])
def test_exchanges_wait_for_the_rank_that_receives_most(mode: str, uneven: Graph):
    loads = ("balanced", "zipf:0.5", "zipf:1", "zipf:4", "zipf:20")
    made = [expert_parallel(uneven, plan(4, ep_mode=mode, expert_load=load)) for load in loads]
    sent = [sum(times * float(n.op.cost.bytes) for n, times in g.weighted() if n.op and n.group == "ep") for g in made]
    assert sent == sorted(sent)
    assert sent[-1] > 1.3 * sent[0]
    even = [expert_parallel(uneven, plan(4, ep_mode=mode, expert_load=load, token_drop=True)) for load in loads]
    assert len({flops(graph, "grouped_gemm") for graph in even}) == 1
    assert flops(made[-1], "grouped_gemm") == pytest.approx(4 * flops(even[0], "grouped_gemm"), rel=0.02)


@settings(deadline=None, max_examples=20)
@given(st.floats(0.5, 3.0), st.sampled_from([1, 2, 4]))
def test_capacity_makes_loads_even(uneven: Graph, capacity: float, ep: int):
    shared = expert_parallel(uneven, plan(ep, capacity=capacity))
    assert {n.op.imbalance for n in products(shared) if n.op} == {100}
    rows = {n.op.tokens for n in products(shared) if n.op}
    assert max(rows) == pytest.approx(capacity * TOKENS * TOPK, abs=1)
    assert len(rows) == 1


def test_modes_differ_in_what_is_sent(graphs: dict[tuple[str, bool], Graph]):
    graph = graphs["qwen3_moe", False]
    modes = {
        mode: [n for n, _ in expert_parallel(graph, plan(4, ep_mode=mode)).weighted() if n.group == "ep"]
        for mode in ("normal", "low_latency", "alltoall")
    }
    moved = {mode: sum(n.op.cost.read_bytes for n in nodes if n.op) for mode, nodes in modes.items()}
    assert moved["normal"] < moved["low_latency"] == moved["alltoall"]
    assert {n.op.kind for n in modes["alltoall"] if n.op} == {"all_to_all"}
    usual = expert_parallel(graph, plan(4, Stack(ep_mode="alltoall")))
    assert [n.op for n, _ in usual.weighted() if n.group == "ep"] == [n.op for n in modes["alltoall"]]
    sorts = [n for n, _ in usual.weighted() if n.source == "opcast.sort"]
    assert {(n.op.tokens, n.op.topk) for n in sorts if n.op} == {(TOKENS * TOPK, 1)}
    assert len(sorts) == len(modes["alltoall"])
    alone = expert_parallel(graph, plan(EXPERTS["qwen3_moe"], Stack(ep_mode="alltoall")))
    assert not [n for n, _ in alone.weighted() if n.source == "opcast.sort"]
    small = expert_parallel(graph, plan(4, dispatch_dtype="fp8"))
    assert {n.op.dtype for n, _ in small.weighted() if n.op and n.op.kind == "ep_dispatch"} == {"fp8"}


def test_tensor_ranks_with_the_same_tokens_each_send_their_part(
    graphs: dict[tuple[str, bool], Graph], assert_sound: Callable[..., None]
):
    graph = graphs["qwen3_moe", False]
    shared = expert_parallel(graph, plan(4, tp=2))
    assert_sound(shared)
    assert flops(shared, "grouped_gemm") * 2 == flops(graph, "grouped_gemm")
    assert {n.op.tokens for n, _ in shared.weighted() if n.op and n.group == "ep"} == {TOKENS // 2}
    gathered = [n.op.size_bytes for n, _ in shared.weighted() if n.group == "tp" and n.op]
    assert set(gathered) == {TOKENS * HIDDEN * 2}
    kept = expert_parallel(graph, plan(4, tp=2, sequence_parallel=True))  # tensor parallelism shares them out later
    assert flops(kept, "grouped_gemm") == flops(graph, "grouped_gemm")


def test_ranks_of_an_engine_that_hold_the_same_tokens_send_none_and_sum_what_experts_say(
    graphs: dict[tuple[str, bool], Graph], assert_sound: Callable[..., None]
):
    graph = graphs["qwen3_moe", False]
    engine = Stack(ep_mode="replicated")
    shared = expert_parallel(graph, plan(4, engine, tp=4))
    assert_sound(shared)
    assert not [n for n, _ in shared.weighted() if n.group == "ep"]
    sums = [n.op for n, _ in shared.weighted() if n.group == "tp" and n.op]
    assert {(op.kind, op.size_bytes) for op in sums} == {("all_reduce", TOKENS * HIDDEN * 2)}
    assert {n.op.experts for n in products(shared) if n.op} == {EXPERTS["qwen3_moe"] // 4}
    assert flops(shared, "grouped_gemm") * 4 == flops(graph, "grouped_gemm")
    apart = expert_parallel(graph, plan(4, engine))  # ranks with tokens of their own
    usual = expert_parallel(graph, plan(4))
    assert [n.op for n, _ in apart.weighted()] == [n.op for n, _ in usual.weighted()]


def test_ranks_that_gather_have_all_tokens_and_scatter_what_experts_say(
    graphs: dict[tuple[str, bool], Graph], assert_sound: Callable[..., None]
):
    """vLLM's allgather_reducescatter; tensor ranks that hold the same tokens gather none."""
    graph, engine = graphs["qwen3_moe", False], Stack(ep_mode="gathered")
    shared = expert_parallel(graph, plan(4, engine))
    assert_sound(shared)
    exchanges = {(n.op.kind, n.op.size_bytes) for n, _ in shared.weighted() if n.op and n.group == "ep"}
    assert exchanges == {(kind, 4 * TOKENS * HIDDEN * 2) for kind in ("all_gather", "reduce_scatter")}
    assert flops(shared, "grouped_gemm") == flops(graph, "grouped_gemm")
    alike, replicated = (
        expert_parallel(graph, plan(4, Stack(ep_mode=mode), tp=4)) for mode in ("gathered", "replicated")
    )
    assert [n.op for n, _ in alike.weighted()] == [n.op for n, _ in replicated.weighted()]


def test_nothing_to_do_returns_the_same_graph(graphs: dict[tuple[str, bool], Graph], small_model: Make):
    graph = graphs["mixtral", False]
    assert expert_parallel(graph, plan(1)) is graph
    dense = trace(small_model("llama"), Workload("prefill", seq_len=16, optimizer="none"), "bf16")
    assert expert_parallel(dense, plan(1, capacity=1.0)) is dense
    with pytest.raises(PlanError, match=r"has none; take parallel\.ep=1"):
        expert_parallel(dense, plan(2))


def test_bad_degrees_name_the_nearest_good_one(graphs: dict[tuple[str, bool], Graph]):
    with pytest.raises(PlanError, match=r"parallel\.ep=3 does not divide 8 experts; take parallel\.ep=2"):
        expert_parallel(graphs["qwen3_moe", False], plan(3))
    with pytest.raises(PlanError, match="ep_mode='fast' is not one of normal"):
        expert_parallel(graphs["qwen3_moe", False], plan(2, ep_mode="fast"))


def test_shared_experts_are_not_routed_ones():
    assert is_expert("model.layers.3.mlp.experts")
    assert is_expert("model.layers.3.mlp.experts.act_fn")
    assert not is_expert("model.layers.3.mlp.shared_experts.up_proj")
    assert not is_expert("model.layers.3.mlp.gate")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("ep", "etp"), [(1, 2), (2, 2), (4, 4)])
def test_parts_of_experts_compute_all_rows_of_their_ranks(
    family: str, ep: int, etp: int, graphs: dict[tuple[str, bool], Graph], assert_sound: Callable[..., None]
):
    for accumulate in (False, True):
        graph = graphs[family, accumulate]
        shared = expert_parallel(graph, Plan(Parallel(ep=ep, etp=etp), CLUSTER))
        assert_sound(shared)
        known = {f.name: f for f in families(Draft(graph), plan(1))}
        dense, expert = (int(graph.tensor_bytes[known[name].weights].sum()) for name in ("dense", "expert"))
        assert bytes_of(shared, "weight") == dense + expert // (ep * etp)
        assert bytes_of(shared, "gradient") == dense + expert // (ep * etp)
        assert flops(shared, "grouped_gemm") == flops(graph, "grouped_gemm")
        assert {n.op.tokens for n in products(shared) if n.op} == {TOKENS * TOPK * etp}
        gathers = [n for n, _ in shared.weighted() if n.group == "etp"]
        assert {n.op.kind for n in gathers if n.op} == {"all_gather", "reduce_scatter"}
        forward = [n.op for n in products(shared) if n.op and n.phase == "forward"]
        whole = [n.op for n in products(graph) if n.op and n.phase == "forward"]
        assert [(op.n, op.k) for op in forward[:2]] == [(whole[0].n // etp, HIDDEN), (HIDDEN, whole[1].k // etp)]


def test_widths_that_do_not_divide_are_one_line(graphs: dict[tuple[str, bool], Graph]):
    with pytest.raises(PlanError, match=r"parallel\.etp=3 shares the inner width of experts: .* nearest degree"):
        expert_parallel(graphs["qwen3_moe", False], Plan(Parallel(etp=3), CLUSTER))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("etp", [1, 2, 4])
def test_tensor_ranks_share_the_work_of_experts_once(
    etp: int, sequence_parallel: bool, graphs: dict[tuple[str, bool], Graph], assert_sound: Callable[..., None]
):
    graph = graphs["qwen3_moe", False]
    given = Plan(Parallel(tp=4, ep=2, etp=etp, sequence_parallel=sequence_parallel), CLUSTER)
    shared = tensor_parallel(expert_parallel(graph, given), given)
    assert_sound(shared)
    assert flops(shared, "grouped_gemm") == pytest.approx(flops(graph, "grouped_gemm") / 4)
    mine = [n for n, _ in shared.weighted() if n.group == "tp" and n.path.endswith("experts")]
    assert {n.op.ranks for n in mine if n.op and n.op.kind == "all_gather"} == (
        {4 // etp} if etp < 4 and not sequence_parallel else set()
    )
