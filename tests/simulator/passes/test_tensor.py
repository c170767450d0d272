"""Tensor parallelism conserves arithmetic, weights and Megatron's volumes, whatever the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from opcast.datasets.dtypes import itemsize
from opcast.datasets.ops import bus_factor
from opcast.simulator.graph import Graph, Node
from opcast.simulator.passes.fuse import fuse
from opcast.simulator.passes.serving import serve
from opcast.simulator.passes.tensor import tensor_parallel
from opcast.simulator.question.plan import Plan, PlanError, load_stack

from .conftest import FAMILIES

TOKENS, HIDDEN = 80, 128
ROW = TOKENS * HIDDEN * 2  # bytes of the residual stream
WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "mlp.gate")  # products that every rank runs in full
PARALLEL = ("gpt_neox", "falcon")  # attention and MLP side by side: their sums are one
BACK = {"olmo2": 5}  # norms follow its layers, so that every product's gradient meets the residual stream by itself
DENSE = [name for name in FAMILIES if name not in ("mixtral", "qwen3_moe", "deepseek_v3")]
LAYERS = {name: 4 if name == "gemma2" else 3 for name in FAMILIES}

Traced = Callable[..., Graph]
Planned = Callable[..., Plan]


def tensor_flops(graph: Graph, paths: tuple[str, ...] = ("",)) -> float:
    """Floating-point operations of matrix units in modules whose path ends so."""
    costs = [
        times * float(node.op.cost.flops)
        for node, times in graph.weighted()
        if node.op is not None and node.op.cost.unit == "tensor" and node.path.endswith(paths)
    ]
    return sum(costs)


def held(graph: Graph, role: str) -> int:
    """Bytes of all tensors of a role."""
    return sum(tensor.size_bytes * tensor.count for tensor in graph.tensors if tensor.role == role)


def sums(graph: Graph, phase: str, kind: str = "", least: int = ROW) -> int:
    """How many collectives of the residual stream's size run in a phase."""
    return sum(times for node, times in graph.weighted() if is_sum(node, phase, kind) and node.op.size_bytes == least)


def is_sum(node: Node, phase: str, kind: str = "") -> bool:
    """Whether a node is a collective of tensor ranks."""
    return node.group == "tp" and node.phase == phase and (not kind or node.op.kind == kind)


def wire(graph: Graph, phase: str) -> float:
    """Bytes that one rank sends for the residual stream in a phase, in parts (n-1)/n of it."""
    sent = 0.0
    for node, times in graph.weighted():
        if is_sum(node, phase) and node.op.size_bytes == ROW:
            sent += times * float(bus_factor(node.op.kind, node.op.ranks)) * ROW
    ranks = next(node.op.ranks for node, _ in graph.weighted() if node.group == "tp")
    return sent / (ROW * (ranks - 1) / ranks)


@pytest.mark.parametrize("sequence", [False, True], ids=["sums", "sequence"])
@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_add_up_to_the_model(
    family: str, tp: int, sequence: bool, traced: Traced, planned: Planned, assert_sound: Callable[..., None]
) -> None:
    graph = traced(family)
    shared = tensor_parallel(graph, planned(tp=tp, etp=tp, sequence_parallel=sequence))
    assert_sound(shared, given=True)
    assert [block.repeat for block in shared.blocks] == [block.repeat for block in graph.blocks]
    whole = 0.0 if sequence else tensor_flops(graph, WHOLE)
    total = tensor_flops(graph)
    assert tensor_flops(shared) == pytest.approx((total - whole) / tp + whole, rel=1e-12)
    assert held(shared, "gradient") == held(shared, "weight")
    assert held(shared, "optimizer_state") == 2 * held(shared, "weight")
    updates = [node.op for node, _ in shared.weighted() if node.phase == "optimizer" and node.op.kind == "adamw"]
    assert sum(op.numel * itemsize(op.dtype) for op in updates) == held(shared, "weight")  # routers may be in fp32
    assert held(shared, "activation") < held(graph, "activation")
    assert shared.model_flops == graph.model_flops
    assert shared.parameters == graph.parameters
    assert_products_share_weights(graph, shared, tp, LAYERS[family])


def assert_products_share_weights(graph: Graph, shared: Graph, tp: int, layers: int) -> None:
    """Each product has its part of its weight, but those that every rank runs in full."""
    before, after = graph.tensor_bytes, shared.tensor_bytes
    seen = 0
    for node in graph.nodes():
        if node.phase == "forward" and node.kind in ("gemm", "grouped_gemm"):
            weights = [t for t in node.reads if graph.tensor(t).role == "weight"]
            if weights:
                largest = max(weights, key=lambda t: before[t])
                assert before[largest] == after[largest] * (1 if node.path.endswith(WHOLE) else tp), node.path
                seen += 1
    assert seen >= 4 * layers


@pytest.mark.parametrize("family", DENSE)
def test_volumes_are_those_of_megatron(family: str, traced: Traced, planned: Planned) -> None:
    graph, layers = traced(family), LAYERS[family]
    a_layer = 1 if family in PARALLEL else 2
    plain = tensor_parallel(graph, planned(tp=4))
    assert sums(plain, "forward", "all_reduce") == a_layer * layers + 1  # and the embedding
    back = BACK.get(family, 2)
    assert sums(plain, "backward", "all_reduce") == back * layers + 1  # and the head
    assert wire(plain, "forward") == pytest.approx(2 * (a_layer * layers + 1))


@pytest.mark.parametrize("family", PARALLEL)
def test_engines_whose_products_reduce_by_themselves_sum_twice_a_layer(
    family: str, traced: Traced, planned: Planned
) -> None:
    plan = planned(tp=4)
    each = replace(plan, stack=replace(plan.stack, fusion=(*plan.stack.fusion, "reduce_each")))
    graph, layers = traced(family), LAYERS[family]
    assert sums(tensor_parallel(fuse(graph, plan), plan), "forward", "all_reduce") == layers + 1
    assert sums(tensor_parallel(graph, each), "forward", "all_reduce") == 2 * layers + 1


@pytest.mark.parametrize("family", [name for name in DENSE if name not in PARALLEL])
def test_sequence_parallelism_sends_as_much(family: str, traced: Traced, planned: Planned) -> None:
    graph, layers = traced(family), LAYERS[family]
    shared = tensor_parallel(graph, planned(tp=4, sequence_parallel=True))
    assert sums(shared, "forward", "reduce_scatter") == sums(shared, "forward", "all_gather") == 2 * layers + 1
    assert wire(shared, "forward") == pytest.approx(4 * layers + 2)
    assert wire(shared, "backward") == pytest.approx(
        (4 + BACK.get(family, 2)) * layers + 3
    )  # inputs are gathered again for weights' gradients
    small = [node for node, _ in shared.weighted() if is_sum(node, "optimizer", "all_reduce")]
    assert len(small) == 1
    assert small[0].op.size_bytes < 0.1 * held(shared, "gradient")  # norms, biases of rows, a table of positions


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("sequence", [False, True], ids=["sums", "sequence"])
def test_fused_graphs_are_shared_alike(
    family: str, sequence: bool, traced: Traced, planned: Planned, assert_sound: Callable[..., None]
) -> None:
    graph, plan = traced(family), planned(tp=4, etp=4, sequence_parallel=sequence)
    fused = fuse(graph, replace(plan, stack=load_stack("megatron")))
    assert sum(len(block.nodes) for block in fused.blocks) < sum(len(block.nodes) for block in graph.blocks)
    shared, eager = tensor_parallel(fused, plan), tensor_parallel(graph, plan)
    assert tensor_flops(shared) == pytest.approx(tensor_flops(eager), rel=1e-12)
    assert held(shared, "weight") == held(eager, "weight")
    assert held(shared, "gradient") == held(eager, "weight")
    assert_sound(shared, given=True)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_inference_shares_cache_and_gathers_logits(
    family: str, kind: str, traced: Traced, planned: Planned, assert_sound: Callable[..., None]
) -> None:
    graph = traced(family, kind)
    shared = tensor_parallel(graph, planned(tp=4))
    parts = 1 if family == "deepseek_v3" else 4  # the latent cache is every rank's
    assert held(shared, "cache") * parts == held(graph, "cache")
    logits = [node.op for node, _ in shared.weighted() if is_sum(node, "forward", "all_gather")]
    assert [op.size_bytes for op in logits] == [512 * 2 * (2 if kind == "decode" else logits_rows(graph))]
    assert tensor_flops(shared) >= tensor_flops(graph) / 4
    assert_sound(shared, given=True)


def logits_rows(graph: Graph) -> int:
    """Rows of the head's product."""
    return next(node.op.m for node, _ in graph.weighted() if node.path == "lm_head")


def test_few_heads_of_keys_are_held_by_several_ranks(traced: Traced, planned: Planned) -> None:
    graph = traced("llama", num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    shared = tensor_parallel(graph, planned(tp=8))
    ops = {
        node.path.rpartition(".")[2]: node.op
        for node, _ in shared.weighted()
        if node.phase == "forward" and node.op is not None and node.op.kind == "gemm"
    }
    assert (ops["q_proj"].n, ops["k_proj"].n, ops["v_proj"].n, ops["o_proj"].k) == (16, 16, 16, 16)
    attention = next(n.op for n, _ in shared.weighted() if n.op is not None and n.op.kind == "attention_prefill")
    assert (attention.heads_q, attention.heads_kv) == (1, 1)
    copied = next(node for node, _ in shared.weighted() if is_sum(node, "optimizer"))
    assert copied.op.size_bytes == 3 * 2 * 16 * HIDDEN * 2  # keys and values of every layer, one head each
    assert held(shared, "gradient") == held(shared, "weight")


def test_experts_stay_whole_on_ranks_that_share_tokens(traced: Traced, planned: Planned) -> None:
    graph = traced("mixtral")
    shared = tensor_parallel(graph, planned(tp=4, etp=1, sequence_parallel=True))
    before = {node.path: node.op for node, _ in graph.weighted() if node.op and node.op.kind == "grouped_gemm"}
    after = {node.path: node.op for node, _ in shared.weighted() if node.op and node.op.kind == "grouped_gemm"}
    for path, op in before.items():
        assert (after[path].tokens, after[path].n, after[path].k) == (op.tokens // 4, op.n, op.k)
    assert tensor_flops(shared) * 4 == pytest.approx(tensor_flops(graph))


def test_experts_between_whole_and_shared_by_all(traced: Traced, planned: Planned) -> None:
    graph = traced("mixtral")
    shared = tensor_parallel(graph, planned(tp=4, etp=2, sequence_parallel=True))
    assert tensor_flops(shared) * 4 == pytest.approx(tensor_flops(graph))
    gathered = {n.op.size_bytes for n, _ in shared.weighted() if n.group == "etp" and n.op.kind == "all_gather"}
    assert gathered == {2 * ROW // 2}  # two experts a token, the tokens of half of the ranks


def test_vocabulary_is_padded(traced: Traced, planned: Planned) -> None:
    graph = traced("llama", vocab_size=509)
    shared = tensor_parallel(graph, planned(tp=8))
    head = next(node.op for node, _ in shared.weighted() if node.path == "lm_head")
    assert head.n == 64
    assert shared.notes == ("vocabulary of 509 padded to 512 for tp=8",)
    assert int(shared.tensor_bytes[0]) == 64 * HIDDEN * 2


def test_one_rank_changes_nothing(traced: Traced, planned: Planned) -> None:
    graph = traced("llama")
    assert tensor_parallel(graph, planned(tp=1)) is graph


def test_sizes_that_do_not_divide_are_named(traced: Traced, planned: Planned) -> None:
    twelve = traced("llama", hidden_size=96, num_attention_heads=12, num_key_value_heads=12)
    with pytest.raises(PlanError, match=r"parallel.tp=8 does not divide the 12 attention heads .* take parallel.tp=6$"):
        tensor_parallel(twelve, planned(tp=8))
    with pytest.raises(PlanError, match=r"shares 80 tokens, which tp=3 does not divide; take parallel.tp=2"):
        tensor_parallel(twelve, planned(tp=3, sequence_parallel=True))
    with pytest.raises(PlanError, match=r"features between two products .* take parallel.tp=4"):
        tensor_parallel(traced("llama", intermediate_size=100), planned(tp=8))


def test_statistics_of_the_loss_are_small(traced: Traced, planned: Planned) -> None:
    shared = tensor_parallel(traced("llama"), planned(tp=4))
    sizes = [n.op.size_bytes for n, _ in shared.weighted() if is_sum(n, "forward") and n.op.dtype == "fp32"]
    assert sizes == [TOKENS * 4] * 3  # maximum, sum, and the target's logit
    assert np.all(np.asarray([n.op.ranks for n, _ in shared.weighted() if n.group == "tp"]) == 4)


def kept_for_backward(graph: Graph) -> int:
    """Bytes of activations alive where the forward pass ends."""
    alive: set[int] = set()
    for node in graph.nodes():
        if node.phase != "forward":
            break
        alive.update(t for t in node.writes if graph.tensor(t).role == "activation")
        alive.difference_update(node.frees)
    return sum(int(graph.tensor_bytes[t]) for t in alive)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mpt", "mixtral"])
def test_kept_activations_are_those_of_the_formula(family: str, traced: Traced, planned: Planned) -> None:
    """With sequence parallelism all of them are shared (arXiv 2205.05198, eq. 4); without it, not norms' inputs."""
    graph = traced(family)
    kept = kept_for_backward(graph)
    shared = tensor_parallel(graph, planned(tp=4, etp=4, sequence_parallel=True))
    assert kept_for_backward(shared) == pytest.approx(kept / 4, rel=0.03)
    plain = tensor_parallel(graph, planned(tp=4, etp=4))
    assert kept / 4 < kept_for_backward(plain) < kept


def test_norms_over_all_queries_sum_their_statistic(traced: Traced, planned: Planned):
    graph = traced("olmo2")
    for fused, sequence in ((False, False), (True, False), (True, True)):
        whole = fuse(graph, replace(planned(), stack=load_stack("megatron"))) if fused else graph
        shared = tensor_parallel(whole, planned(tp=4, sequence_parallel=sequence))
        assert tensor_flops(shared) == pytest.approx(tensor_flops(whole) / 4, rel=1e-6)
        norms = [n for n, _ in shared.weighted() if n.path.endswith("q_norm") and n.group == "tp"]
        assert {n.phase for n in norms} == {"forward", "backward"}
        assert {n.bytes_moved for n in norms} == {TOKENS * 4}
        rows = [n.op for n, _ in shared.weighted() if n.op and n.op.kind == "rms_norm" and n.path.endswith("q_norm")]
        assert {(op.rows, op.cols) for op in rows} == ({(TOKENS, HIDDEN // 4)} if fused else set())


def test_queries_and_keys_of_one_product_are_shared(traced: Traced, planned: Planned):
    whole = fuse(traced("phi3"), replace(planned(), stack=load_stack("megatron")))
    shared = tensor_parallel(whole, planned(tp=2))
    for before, after in zip(whole.nodes(), (n for n in shared.nodes() if not n.group), strict=True):
        if before.op is not None and before.op.kind == "rope":
            assert [shared.tensor(t).size_bytes * 2 for t in after.writes] == [
                whole.tensor(t).size_bytes for t in before.writes
            ]


def test_latent_attention_decodes_its_own_heads(traced: Traced, planned: Planned):
    plan = replace(planned(tp=2), stack=load_stack("vllm"))
    whole = serve(traced("deepseek_v3", "decode"), plan)
    absorbed = [n for n, _ in tensor_parallel(whole, plan).weighted() if n.source.startswith("fused.absorb")]
    before = [n for n, _ in whole.weighted() if n.source.startswith("fused.absorb")]
    assert absorbed
    assert [n.op.batch * 2 for n in absorbed if n.op] == [n.op.batch for n in before if n.op]
    assert [(n.op.m, n.op.n, n.op.k) for n in absorbed if n.op] == [(n.op.m, n.op.n, n.op.k) for n in before if n.op]
