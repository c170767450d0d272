"""Data parallelism: nothing is lost or made up when gradients, optimizer and weights are shared out."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opcast.datasets.clusters import Cluster
from opcast.simulator.graph import Graph, Node
from opcast.simulator.memory.lifetimes import peak_memory
from opcast.simulator.passes.data import data_parallel, micro_batch_variant
from opcast.simulator.passes.order import TRAINING, apply_passes
from opcast.simulator.passes.verify import tensor_flops
from opcast.simulator.passes.zero.stages import (
    AFTER_UPDATE,
    BY_LAYER,
    EACH,
    LAST,
    NEVER,
    PART,
    ROWS,
    WHOLE,
    cells,
    table,
)
from opcast.simulator.question.plan import Parallel, Plan, Stack
from opcast.simulator.trace import Workload, trace

CLUSTER = Cluster("c", "c", "h100_sxm", nodes=2)
MIXED = Stack(master_weights=True, gradient_dtype="fp32", gradient_clipping=True, bucket_mib=0.02)
OVERLAPPED = replace(MIXED, overlap=("dp", "dp_gather"))
STAGES = (0, 1, 2, 3)
Make = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def dense(small_model: Make) -> Graph:
    return trace(small_model("llama", layers=4), Workload("train", batch=2, seq_len=16), "bf16")


@pytest.fixture(scope="module")
def sparse(small_model: Make) -> Graph:
    return trace(small_model("qwen3_moe", layers=4), Workload("train", batch=2, seq_len=16), "bf16")


def plan(stage: int = 0, stack: Stack = MIXED, cluster: Cluster = CLUSTER, **parallel: Any) -> Plan:
    options = parallel.pop("options", {})
    return Plan(Parallel(zero_stage=stage, **parallel), cluster, stack, options=options)


def bytes_of(graph: Graph, role: str) -> int:
    return sum(t.size_bytes * t.count for t in graph.tensors if t.role == role)


def touched(graph: Graph, role: str) -> int:
    """Bytes of the tensors of a role that nodes read."""
    ids = {t for node in graph.nodes() for t in node.reads}
    return sum(int(graph.tensor_bytes[t]) for t in ids if graph.tensor(t).role == role)


def sent(graph: Graph, *kinds: str) -> float:
    """Bytes that one rank sends in collectives, those of a few bytes left out."""
    return sum(
        repeat * float(node.op.cost.read_bytes)
        for node, repeat in graph.weighted()
        if node.op is not None and node.group and node.op.size_bytes > 4 and (not kinds or node.op.kind in kinds)
    )


@pytest.mark.parametrize("stack", [MIXED, OVERLAPPED], ids=["after", "beside"])
@pytest.mark.parametrize("stage", STAGES)
def test_lifetimes_stay_sound_and_the_model_is_the_same(
    stage: int, stack: Stack, dense: Graph, sparse: Graph, assert_sound: Callable[..., None]
):
    for graph in (dense, sparse):
        made = data_parallel(graph, plan(stage, stack))
        assert_sound(made)
        assert tensor_flops(made) == tensor_flops(graph)
        assert [b.repeat for b in made.blocks] == [b.repeat for b in graph.blocks]
        for first, last in ((True, False), (False, False), (False, True)):
            assert_sound(micro_batch_variant(made, first, last))


@pytest.mark.parametrize("stack", [MIXED, OVERLAPPED], ids=["after", "beside"])
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_sent_follow_the_stage(stage: int, stack: Stack, dense: Graph):
    made = data_parallel(dense, plan(stage, stack))
    share, numel = 15 / 16, dense.parameters
    assert sent(made, "all_reduce", "reduce_scatter") == pytest.approx(share * 4 * numel * (2 if stage == 0 else 1))
    outside = 2 * 256 * 64 + 64  # embedding, head and last norm are gathered once only
    gathered = {0: 0, 1: 2 * numel, 2: 2 * numel, 3: 2 * (2 * numel - outside)}[stage]
    assert sent(made, "all_gather") == pytest.approx(share * gathered)


def test_all_stages_but_the_last_send_twice_the_weights_and_that_thrice(dense: Graph):
    """Rajbhandari et al. 2020, sec. 7: 2Ψ for stages 0 to 2, 3Ψ for 3 (what is outside of layers stays gathered)."""
    same = Stack()
    weights = bytes_of(dense, "weight") * 15 / 16
    for stage in (0, 1, 2):
        assert sent(data_parallel(dense, plan(stage, same))) == pytest.approx(2 * weights)
    outside = 2 * (2 * 256 * 64 + 64) * 15 / 16
    assert sent(data_parallel(dense, plan(3, same))) == pytest.approx(3 * weights - outside)


@pytest.mark.parametrize("stage", STAGES)
def test_shards_of_all_ranks_make_up_the_whole(stage: int, dense: Graph):
    made = data_parallel(dense, plan(stage))
    ranks, numel = 16 if stage else 1, dense.parameters
    states = 3 if stage < 3 else 2  # masters of stage 3 are the weights themselves
    assert touched(made, "optimizer_state") * ranks == pytest.approx(states * 4 * numel, rel=0.02)
    update = next(node for node in made.nodes() if node.op is not None and node.op.kind == "adamw")
    assert update.op is not None
    assert update.op.numel * ranks == pytest.approx(numel, rel=0.02)
    assert (update.op.dtype, update.op.out_dtype) == ("fp32", "fp32")
    gradients = sum(int(made.tensor_bytes[t]) for t in update.reads if made.tensor(t).role == "gradient")
    assert gradients * (16 if stage > 1 else 1) == pytest.approx(4 * numel, rel=0.02)
    if stage == 3:
        assert bytes_of(made, "weight") * ranks == pytest.approx(4 * numel, rel=0.02)


def test_experts_are_summed_over_the_ranks_that_hold_them(sparse: Graph):
    made = data_parallel(sparse, plan(1, ep=4))
    by_group = {node.group: node.op for node in made.nodes() if node.op is not None and node.op.kind == "all_gather"}
    assert {name: op.ranks for name, op in by_group.items()} == {"dp_cp": 16, "edp": 4}
    experts = 4 * 8 * 3 * 64 * 32
    assert by_group["edp"].size_bytes == 2 * experts
    assert by_group["dp_cp"].size_bytes == 2 * (sparse.parameters - experts)


def test_hybrid_shards_stay_in_a_node(dense: Graph):
    made = data_parallel(dense, plan(3, Stack(overlap=("dp",)), shard=8))
    ops = {node.op.kind: node.op for node in made.nodes() if node.op is not None and node.group}
    assert (ops["all_gather"].ranks, ops["all_gather"].ranks_per_node, ops["all_gather"].link) == (8, 8, 0)
    assert (ops["all_reduce"].ranks, ops["all_reduce"].ranks_per_node) == (2, 1)
    assert sent(made, "all_reduce") == pytest.approx(bytes_of(dense, "weight") / 8, rel=0.02)


def test_a_single_rank_that_keeps_every_dtype_keeps_its_graph(dense: Graph):
    alone = Cluster("c", "c", "h100_sxm", devices_per_node=1)
    assert data_parallel(dense, plan(0, Stack(), alone)) is dense
    inference = replace(dense, blocks=dense.blocks[:3])
    assert data_parallel(inference, plan(1)) is inference


def test_gathers_are_one_layer_ahead(dense: Graph):
    made = data_parallel(dense, plan(3, OVERLAPPED))
    layers = next(block for block in made.blocks if block.repeat > 1 and block.nodes[0].phase == "forward")
    unrolled = [node for index in range(layers.repeat) for node in layers.repetition(index)]
    casts = [node for node in unrolled if node.stream == "comm:dp" and node.source.endswith("cast")]
    for index, cast in enumerate(casts[1:], 1):
        token = cast.reads[-1]
        writer = next(node for node in unrolled if token in node.writes)
        assert writer.path.startswith(f"model.layers.{index - 1}.")
        assert made.tensor(token).size_bytes == 0


@pytest.mark.parametrize("stack", [Stack(), MIXED, replace(MIXED, fused_gradients=True)], ids=["same", "fp32", "fused"])
@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_share_the_work_of_a_step(stage: int, stack: Stack, dense: Graph):
    made = data_parallel(dense, plan(stage, stack, options={"reduce_every_micro_batch": False}))
    first, middle, last = (micro_batch_variant(made, *which) for which in ((1, 0), (0, 0), (0, 1)))
    assert micro_batch_variant(made, True, True) is made
    assert not any(node.phase == "optimizer" for graph in (first, middle) for node in graph.nodes())
    assert sent(first, "all_reduce", "reduce_scatter") == sent(middle, "all_reduce", "reduce_scatter") == 0
    assert sent(last, "all_reduce", "reduce_scatter") == sent(made, "all_reduce", "reduce_scatter")
    gradients = {t for node in last.nodes() for t in node.writes if last.tensor(t).role == "gradient"}
    seen: set[int] = set()
    for node in middle.nodes():
        for tensor in gradients & set(node.writes):
            assert tensor in node.reads or tensor in seen, node
        seen.update(node.reads)
    peaks = [peak_memory(graph).peak_gib for graph in (first, middle)]
    assert peaks[0] <= peaks[1]


def test_gathered_weights_stay_when_they_are_not_let_go_of(dense: Graph, assert_sound: Callable[..., None]):
    made = data_parallel(dense, plan(3, OVERLAPPED, options={"reshard_after_forward": False}))
    assert_sound(made)
    assert sent(made, "all_gather") == pytest.approx(15 / 16 * 2 * dense.parameters)
    first, last = micro_batch_variant(made, True, False), micro_batch_variant(made, False, True)
    assert sent(first, "all_gather") == sent(made, "all_gather")
    assert sent(last, "all_gather") == 0
    kept = {t for node in first.nodes() for t in node.frees if node.phase == "backward"}
    assert not any(first.tensor(t).role == "buffer" and first.tensor(t).size_bytes > 2000 for t in kept)


@pytest.mark.parametrize("every", [True, False])
def test_gradients_that_wait_for_the_last_micro_batch_are_whole_and_wide(
    every: bool, dense: Graph, assert_sound: Callable[..., None]
):
    two = replace(plan(3, options={"reduce_every_micro_batch": every}), micro_batches=2)
    graph = data_parallel(dense, two)
    assert_sound(graph)
    largest = 2 * max(t.size_bytes for t in dense.tensors if t.role == "weight")
    sizes = {t.size_bytes for t in graph.tensors if t.role == "gradient" and t.dtype == "fp32"}
    assert (largest in sizes) is not every


def test_fused_gradients_are_written_by_products(dense: Graph):
    made = data_parallel(dense, plan(1, replace(MIXED, fused_gradients=True)))
    writers = [
        n for n in made.nodes() if n.phase == "backward" and any(made.tensor(t).role == "gradient" for t in n.writes)
    ]
    products = [node for node in writers if node.op is not None and node.op.kind == "gemm"]
    assert len(products) == 4 * 7 + 1
    assert all(node.op is not None and node.op.out_dtype == "fp32" for node in products)
    assert sum(node.source == "aten.add_" for node in writers) == 4 * 2 + 2  # norms and the embedding


def test_gradients_that_are_converted_pass_memory_once_more(dense: Graph, assert_sound: Callable[..., None]) -> None:
    """DeepSpeed's BF16_Optimizer: ``hp_grad.data.add_(lp.grad.data.to(hp_grad.dtype))``: 18 bytes, not 12."""
    straight, converted = (
        data_parallel(dense, plan(1, replace(MIXED, converts_gradients=converts))) for converts in (False, True)
    )
    assert_sound(converted)

    def backward(graph: Graph, source: str = "") -> list[Node]:
        return [n for n in graph.nodes() if n.phase == "backward" and source in n.source]

    casts = [backward(graph, "_to_copy") for graph in (straight, converted)]
    moved = [sum(n.bytes_moved for n in backward(graph)) for graph in (straight, converted)]
    numel = [sum(n.op.numel for n in nodes if n.op is not None) for nodes in casts]
    assert len(casts[1]) - len(casts[0]) >= 4 * 7 + 1  # the weights of products
    assert moved[1] - moved[0] == 6 * (numel[1] - numel[0])


def test_buckets_hold_whole_gradients_in_order(dense: Graph):
    made = data_parallel(dense, plan(0, replace(OVERLAPPED, bucket_mib=0.03)))
    sizes = [n.op.size_bytes for n in made.nodes() if n.op is not None and n.source == "sync.all_reduce"]
    assert sum(sizes) == 4 * dense.parameters
    assert len(sizes) > len(dense.blocks)
    assert np.all(np.array(sizes) > 0)


def test_a_bucket_is_cut_between_parameters_and_takes_what_is_left_of_a_layer(dense: Graph):
    """As torch's DDP assigns buckets: q, k, v of one product are one parameter; norms alone fill no bucket."""
    merged = apply_passes(dense, plan(0, replace(OVERLAPPED, fusion=("qkv", "gate_up"), bucket_mib=0.005)), TRAINING)
    found = [n for n in merged.nodes() if n.source == "sync.all_reduce"]
    elements = {t: merged.tensor(t).size_bytes // 4 for n in found for t in n.reads}
    first = [n for n in found if ".layers.3" in n.path or n.path.endswith("layers.3")]
    parts = [sorted(elements[t] for t in n.reads) for n in first]
    assert sum(map(sum, parts)) * 4 == sum(n.op.size_bytes for n in first if n.op)
    assert all(4 * sum(part) >= 0.005 * 2**20 for part in parts)
    assert [len(part) for part in parts] == [1, 2, 1 + 1, 3 + 1]  # down; gate and up; o and a norm; q, k, v and a norm


def test_memory_is_that_of_fsdp_on_two_ranks(small_model: Make):
    """To the byte: what a step allocates under FSDP2, and one layer's weights that are gathered ahead.

    On a busy machine a gathered buffer may outlive its step by a moment: of three runs one has to be undisturbed.
    """
    config = small_model("llama", layers=6, vocab_size=200)
    graph = trace(config, Workload("train", batch=4, seq_len=48), "fp32")
    two = Cluster("c", "c", "h100_sxm", devices_per_node=2)
    made = data_parallel(graph, plan(3, Stack(overlap=("dp",)), two))
    layers = [n.op.size_bytes for n in made.nodes() if n.source == "fsdp.all_gather" and n.op and ".layers." in n.path]
    expected = peak_of_new_tensors(made) + max(layers)
    runs = (measured_peak(config, ranks=2) for _ in range(3))
    assert expected in runs


def peak_of_new_tensors(graph: Graph) -> int:
    """The most bytes of tensors made in the step, before the optimizer runs."""
    living = peak = 0
    there: set[int] = set()
    for node in graph.nodes():
        if node.phase == "optimizer":
            break
        living += sum(int(graph.tensor_bytes[t]) for t in node.writes if t not in there and t not in node.reads)
        there |= {*node.reads, *node.writes}
        peak = max(peak, living)
        living -= sum(int(graph.tensor_bytes[t]) for t in node.frees)
    return peak


def measured_peak(config: dict[str, Any], ranks: int) -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("run_fsdp.py")), json.dumps(config), "4", "48"]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen(command, env=os.environ | world | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in started]
    found: int = json.loads(outputs[0].splitlines()[-1])["peak"]
    return found


def updated(graph: Graph) -> int:
    """Bytes of the gradients that the optimizer reads."""
    ids = {t for node in graph.nodes() if node.phase == "optimizer" for t in node.reads}
    return sum(int(graph.tensor_bytes[t]) for t in ids if graph.tensor(t).role == "gradient")


def observed(graph: Graph, usual: Graph, stage: int) -> dict[str, str]:
    """The rows of the table of ZeRO stages, read off the graph of a rank (``usual``: that of stage 0)."""
    ranks = plan(stage).group("dp_cp").ranks

    def part(found: float, whole: float) -> str:
        share = found / whole
        return WHOLE if share == pytest.approx(1.0, rel=0.02) else PART if share < 1.2 / ranks else f"{share:.2f}"

    def collectives(kind: str) -> list[Any]:
        return [node for node, _ in graph.weighted() if node.op is not None and node.op.kind == kind and node.group]

    summing = [
        node for kind in ("all_reduce", "reduce_scatter") for node in collectives(kind) if node.op.size_bytes > 4
    ]
    gathered = {node.phase for node in collectives("all_gather")}
    weights = bytes_of(usual, "weight")
    return {
        "optimizer's states, fp32 masters": part(
            bytes_of(graph, "optimizer_state"), bytes_of(usual, "optimizer_state")
        ),
        "gradients kept": part(updated(graph), updated(usual)),
        "weights between layers": part(touched(graph, "weight") / (2 if stage == 3 else 1), weights),
        "gradients are summed by": " ".join({node.op.kind for node in summing}),
        "gradients are summed": LAST if all(node.phase == "optimizer" for node in summing) else EACH,
        "weights are gathered": {
            frozenset(): NEVER,
            frozenset({"optimizer"}): AFTER_UPDATE,
            frozenset({"forward", "backward"}): BY_LAYER,
        }[frozenset(gathered)],
        "bytes sent by a rank": f"{round(sent(graph) / weights)}Ψ(n-1)/n",
    }


@pytest.mark.parametrize("stage", STAGES)
def test_the_table_of_stages_is_what_the_passes_do(stage: int, dense: Graph) -> None:
    same = replace(MIXED, gradient_dtype="same", overlap=())
    usual, graph = (data_parallel(dense, plan(each, same)) for each in (0, stage))
    found = observed(graph, usual, stage)
    assert found == {row.what: cells(row)[stage] for row in ROWS if row.what in found}
    assert {row.what for row in ROWS} - set(found) == {"frozen weights"}


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_weights_are_sharded_as_the_table_says(stage: int, small_model: Make) -> None:
    graph = trace(small_model("llama", layers=4), Workload("train", batch=2, seq_len=16, frozen="mlp"), "bf16")
    usual, made = (touched(data_parallel(graph, plan(each)), "frozen") for each in (0, stage))
    row = next(row for row in ROWS if row.what == "frozen weights")
    shared = made / usual < 2.5 / plan(stage).group("dp_cp").ranks  # read twice, forward and backward, by layer
    assert cells(row)[stage] == (PART if shared else WHOLE)
    assert shared or made == usual


def test_the_page_has_the_table_of_stages() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "passes.md"
    assert table() in page.read_text("utf-8"), "put the output of opcast.simulator.passes.zero.stages.table() there"


def sums_before_the_update(graph: Graph) -> list[Node]:
    """Sums over tensor ranks in the phase of the optimizer."""
    nodes = [node for node in graph.nodes() if node.phase == "optimizer" and node.group == "tp"]
    return [node for node in nodes if node.op is not None and node.op.kind == "all_reduce"]


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_norms_are_summed_over_tensor_ranks_as_they_lie(stage: int, dense: Graph) -> None:
    """Of whole gradients all of them; of scattered ones the shards, which are all that is left."""
    split = plan(stage, tp=2, sequence_parallel=True)
    graph = apply_passes(dense, split, TRAINING)
    (node,) = sums_before_the_update(graph)
    (whole,) = sums_before_the_update(apply_passes(dense, plan(0, tp=2, sequence_parallel=True), TRAINING))
    assert node.op is not None
    assert whole.op is not None
    shards = split.group("dp_cp").ranks if split.parallel.shards_gradients else 1
    assert node.op.size_bytes == pytest.approx(whole.op.size_bytes / shards, abs=1.0)
    assert {graph.tensor(t).role for t in node.reads} == {"gradient"}
