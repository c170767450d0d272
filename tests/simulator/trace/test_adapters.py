"""What is trained: adapters and frozen weights, against torch itself, and what passes make of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from opcast.datasets.clusters import load_cluster
from opcast.simulator.graph import Graph
from opcast.simulator.passes.data import data_parallel
from opcast.simulator.passes.fuse import fuse
from opcast.simulator.passes.overlap import overlap
from opcast.simulator.passes.quantize import quantize
from opcast.simulator.passes.tensor import tensor_parallel
from opcast.simulator.passes.verify import verify
from opcast.simulator.question.plan import Parallel, Plan, load_stack
from opcast.simulator.question.work import Work, WorkloadError
from opcast.simulator.trace import Workload, trace
from opcast.simulator.trace.adapters import FirstProduct
from opcast.simulator.trace.build import build
from opcast.simulator.trace.models import resolve
from opcast.simulator.trace.steps import prepare
from opcast.simulator.trace.workload import TraceError

RANK, LAYERS, HIDDEN = 8, 3, 128
MODEL = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 512,
}
WORK = Workload("train", 2, 32, lora_rank=RANK)
DROPPED = replace(WORK, lora_dropout=0.1, attention="fused")


@pytest.fixture(scope="module")
def adapted() -> Graph:
    return trace(MODEL, WORK, "bf16")


@pytest.fixture(scope="module")
def one_adapter() -> Graph:
    """One adapter beside q, k and v, with dropout, as NeMo has it."""
    return trace(MODEL, replace(DROPPED, lora_groups=("qkv",)), "bf16")


def bytes_of(graph: Graph, role: str) -> int:
    return sum(tensor.size_bytes * tensor.count for tensor in graph.tensors if tensor.role == role)


def products(graph: Graph, phase: str) -> dict[str, int]:
    """Products of a phase by layout, and how many there are."""
    made: dict[str, int] = {}
    for node, times in graph.weighted():
        if node.phase == phase and node.op is not None and node.op.kind == "gemm":
            layout = node.op.to_dict().get("layout", "nt")
            made[layout] = made.get(layout, 0) + times
    return made


def test_only_adapters_have_gradients_and_states(adapted: Graph) -> None:
    adapters = LAYERS * 4 * RANK * 2 * HIDDEN
    assert adapted.parameters == adapters
    assert bytes_of(adapted, "gradient") == bytes_of(adapted, "weight") == 2 * adapters
    assert bytes_of(adapted, "optimizer_state") == 4 * adapters
    whole = trace(MODEL, replace(WORK, lora_rank=0), "bf16")
    assert bytes_of(adapted, "frozen") == bytes_of(whole, "weight")


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"lora_modules": "proj$"},
        {"lora_rank": 0, "frozen": "embed|mlp"},
        {"lora_modules": "proj$", "lora_dropout": 0.1, "lora_groups": ("qkv", "gate_up")},
    ],
)
def test_flops_are_those_that_torch_counts(chosen: dict[str, Any]) -> None:
    """Products of a real step; attention is left out by making it small beside them."""
    work = replace(WORK, **chosen)
    built = build(resolve(MODEL), work, "fp32")
    step = prepare(built.module, work)
    with FlopCounterMode(display=False) as counter:
        step.run().loss.backward()
    counted = counter.get_flop_counts()["Global"]
    of_products = sum(flops for op, flops in counted.items() if "attention" not in str(op))
    graph = trace(MODEL, work, "fp32")
    ours = sum(
        times * float(node.op.cost.flops)
        for node, times in graph.weighted()
        if node.op is not None and node.op.kind == "gemm" and node.path.rpartition(".")[2] != "self_attn"
    )
    assert ours == pytest.approx(of_products, rel=1e-6)


def test_a_first_layer_hands_no_gradient_down(adapted: Graph) -> None:
    """Nothing trained comes before its q, k and v: their frozen products need no gradient of their input."""
    whole = products(trace(MODEL, replace(WORK, lora_rank=0), "bf16"), "backward")
    made = products(adapted, "backward")
    thin = LAYERS * 4 * 2  # both products of an adapter
    assert made["tn"] == thin
    assert made["nn"] == whole["nn"] - 3 + thin - 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lora_modules": "conv"}, "'conv' matches no Linear of llama"),
        ({"frozen": "nothing_like_it"}, "matches no weight of llama"),
        ({"lora_rank": 0, "frozen": "."}, "leaves nothing of llama to train"),
    ],
)
def test_what_matches_nothing_is_said(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        trace(MODEL, replace(WORK, **given), "bf16")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lora_rank": -1}, "workload.lora_rank"),
        ({"frozen": "("}, "workload.frozen='\\('"),
        ({"lora_rank": 8, "lora_dropout": 1.0}, "workload.lora_dropout=1 leaves nothing"),
        ({"lora_rank": 8, "lora_dropout": -0.1}, "workload.lora_dropout=-0.1 must be"),
        ({"lora_dropout": 0.1}, "workload.lora_dropout=0.1 is of adapters"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises((TraceError, WorkloadError), match=words):
        Work("train", **given)


def sent(graph: Graph) -> list[int]:
    """Bytes of the collectives of a step, each as often as it runs, but for those of the optimizer."""
    kinds = ("all_reduce", "reduce_scatter", "all_gather")
    return sorted(
        node.op.size_bytes
        for node, times in graph.weighted()
        for _ in range(times)
        if node.op is not None and node.op.kind in kinds and node.phase != "optimizer"
    )


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_ranks_exchange_little_for_adapters(
    adapted: Graph, one_adapter: Graph, sequence: bool, dropped: bool, plan_of: Callable[..., Plan]
) -> None:
    """Beside what frozen layers exchange, only rows as long as the rank of an adapter."""
    adapted = one_adapter if dropped else adapted
    plan = plan_of(tp=2, sequence_parallel=sequence)
    plan = replace(plan, stack=replace(plan.stack, fusion=("qkv", "gate_up")))
    stream = WORK.tokens * HIDDEN * 2
    whole = trace(MODEL, replace(WORK, lora_rank=0), "bf16")
    with_adapters, without = (sent(tensor_parallel(fuse(graph, plan), plan)) for graph in (adapted, whole))
    assert max(with_adapters) <= stream
    assert sum(size == stream for size in with_adapters) <= sum(size == stream for size in without)


def test_frozen_weights_are_sharded_with_the_others(adapted: Graph, plan_of: Callable[..., Plan]) -> None:
    made = data_parallel(adapted, plan_of(dp=4, zero_stage=3))
    assert bytes_of(made, "frozen") == pytest.approx(bytes_of(adapted, "frozen") / 4, rel=0.01)
    assert bytes_of(made, "weight") + bytes_of(made, "frozen") < bytes_of(adapted, "frozen") / 2


def test_frozen_weights_are_rounded_before_the_step(adapted: Graph, plan_of: Callable[..., Plan]) -> None:
    made = quantize(adapted, replace(plan_of(), quantization="fp8"))
    names = [(node.source, node.op) for node, _ in made.weighted() if node.op is not None]
    assert not [source for source, _ in names if source.startswith("refresh.")]
    assert "fused.transpose" not in {source for source, _ in names}
    thin = [op for _, op in names if op.kind == "gemm" and RANK in (op.n, op.k, op.m)]
    assert thin
    assert {op.dtype for op in thin} == {"bf16"}
    assert any(op.kind == "gemm" and op.dtype == "fp8" for _, op in names)


@pytest.fixture(scope="module")
def plan_of() -> Callable[..., Plan]:
    """A plan of eager PyTorch on a node with this layout."""

    def made(**degrees: Any) -> Plan:
        return Plan(
            parallel=Parallel(**{"dp": 1, **degrees}), cluster=load_cluster("dgx_h100"), stack=load_stack("torch")
        )

    return made


def test_torch_trains_the_adapters_alone() -> None:
    built = build(resolve(MODEL), WORK, "fp32").module
    prepare(built, WORK).run().loss.backward()
    trained = {name for name, parameter in built.named_parameters() if parameter.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)


TOKENS, TENSOR_RANKS = 2 * 32, 4
EXCHANGES = {  # by style and sequence parallelism: each layer's collective forward and backward, and its buffer's bytes
    ("gather", True): (("all_gather", 2 * TOKENS * HIDDEN), ("all_gather", 2 * TOKENS * HIDDEN)),
    ("gather", False): (("all_gather", 2 * TOKENS * HIDDEN), None),  # backward each rank has all, and takes its share
    ("all_to_all", True): (("all_to_all", 2 * TOKENS * HIDDEN // 4), ("all_to_all", 2 * TOKENS * HIDDEN // 4)),
    ("all_to_all", False): (("all_gather", 2 * TOKENS * HIDDEN), None),  # without shares of tokens it is as gather
}


def collectives_of(graph: Graph, module: str) -> dict[tuple[str, str, int], int]:
    """How often a module's collectives run, by phase, kind and bytes of the buffer."""
    counts: Counter[tuple[str, str, int]] = Counter()
    for node, times in graph.weighted():
        if node.group == "tp" and module in node.path and node.op is not None:
            counts[node.phase, node.op.kind, int(node.op.size_bytes)] += times
    return dict(counts)


@pytest.mark.parametrize(("style", "sequence"), EXCHANGES)
def test_nemo_exchanges_what_adapters_add_to_layers_cut_by_rows(adapted: Graph, style: str, sequence: bool) -> None:
    parallel = Parallel(tp=TENSOR_RANKS, sequence_parallel=sequence)
    stack = replace(load_stack("nemo"), adapter_exchange=style)
    shared = tensor_parallel(adapted, Plan(parallel, load_cluster("dgx_h100"), stack))
    forward, backward = EXCHANGES[style, sequence]
    thin = ("all_reduce", 2 * TOKENS * RANK)  # the sum over ranks between both products, for all tokens
    expected = {("forward", *thin): LAYERS, ("backward", *thin): LAYERS}
    for phase, moved in (("forward", forward), ("backward", backward)):
        if moved is not None:
            expected[phase, *moved] = LAYERS
    assert collectives_of(shared, "o_proj.lora") == expected
    verify(shared)


def test_ranks_share_both_products_of_an_adapter_behind_rows(adapted: Graph) -> None:
    plan = Plan(Parallel(tp=TENSOR_RANKS, sequence_parallel=True), load_cluster("dgx_h100"), load_stack("nemo"))

    def flops(graph: Graph) -> float:
        costs = ((node, times) for node, times in graph.weighted() if node.op is not None and node.op.kind == "gemm")
        return sum(times * float(node.op.cost.flops) for node, times in costs if "o_proj.lora" in node.path)

    shared = tensor_parallel(adapted, plan)
    assert flops(shared) == flops(adapted) / TENSOR_RANKS
    assert bytes_of(shared, "gradient") == bytes_of(shared, "weight")


def test_megatron_bridge_gathers_what_adapters_add_to_layers_cut_by_rows(adapted: Graph) -> None:
    parallel, cluster = Parallel(tp=TENSOR_RANKS, sequence_parallel=True), load_cluster("dgx_h100")
    bridge, nemo = load_stack("megatron"), replace(load_stack("nemo"), adapter_exchange="gather")
    shared = [tensor_parallel(adapted, Plan(parallel, cluster, stack)) for stack in (bridge, nemo)]
    assert collectives_of(shared[0], "o_proj.lora") == collectives_of(shared[1], "o_proj.lora")


@pytest.mark.parametrize("name", ["torch", "megatron_core", "torchtitan"])
def test_other_frameworks_exchange_thin_tensors_alone(adapted: Graph, name: str) -> None:
    plan = Plan(Parallel(tp=TENSOR_RANKS, sequence_parallel=True), load_cluster("dgx_h100"), load_stack(name))
    sizes = {size for _, _, size in collectives_of(tensor_parallel(adapted, plan), "o_proj.lora")}
    assert sizes == {2 * TOKENS * RANK}


def test_nothing_runs_beside_an_exchange_of_adapters(adapted: Graph) -> None:
    plan = Plan(Parallel(tp=TENSOR_RANKS, sequence_parallel=True), load_cluster("dgx_h100"), load_stack("nemo"))
    assert "tp" in plan.stack.overlap
    placed = overlap(tensor_parallel(adapted, plan), plan)
    streams = {node.stream for node, _ in placed.weighted() if node.op is not None and node.op.kind == "all_to_all"}
    assert streams == {"compute"}


def dropouts(graph: Graph) -> dict[str, int]:
    """Kernels of dropout by source, and how many there are."""
    counts: Counter[str] = Counter()
    for node, times in graph.weighted():
        if "dropout" in node.source or "bernoulli" in node.source:
            counts[node.source] += times
    return dict(counts)


def test_each_adapter_drops_a_part_of_its_input() -> None:
    """As in PEFT, q, k, v and o draw their own masks; the first layer's q, k and v hand no gradient down."""
    graph = trace(MODEL, DROPPED, "bf16")
    assert dropouts(graph) == {"aten.native_dropout": 4 * LAYERS, "aten.native_dropout_backward": 4 * LAYERS - 3}


def test_a_cpu_draws_and_multiplies() -> None:
    drawn = dropouts(trace(MODEL, replace(DROPPED, attention="sdpa"), "bf16"))
    assert drawn == {"aten.bernoulli_": 4 * LAYERS}


def test_one_adapter_stands_beside_what_is_one_product(one_adapter: Graph, adapted: Graph) -> None:
    assert dropouts(one_adapter) == {"aten.native_dropout": 2 * LAYERS, "aten.native_dropout_backward": 2 * LAYERS - 1}
    assert adapted.parameters - one_adapter.parameters == 2 * LAYERS * RANK * HIDDEN  # of k and v
    verify(fuse(one_adapter, Plan(Parallel(), load_cluster("dgx_h100"), load_stack("nemo"))))


def test_masks_and_what_is_left_wait_for_the_backward_pass() -> None:
    """An adapter keeps two bytes an element of what is left, and one of the mask; q, k and v no more their input."""

    def kept_bytes(dropout: float) -> int:
        graph = trace(MODEL, replace(DROPPED, lora_dropout=dropout), "bf16")
        made, read = (
            {tensor for node in graph.nodes() if node.phase == phase for tensor in getattr(node, side)}
            for phase, side in (("forward", "writes"), ("backward", "reads"))
        )
        return sum(graph.tensor(tensor).size_bytes for tensor in made & read)

    first = 3  # masks of the first layer, which hands no gradient down
    assert kept_bytes(0.1) - kept_bytes(0.0) == (LAYERS * (4 * (2 + 1) - 2) - first) * DROPPED.tokens * HIDDEN


def test_what_was_made_of_an_input_is_let_go() -> None:
    work = replace(WORK, lora_dropout=0.5, lora_groups=("qkv",))
    built = build(resolve(MODEL), work, "fp32").module
    firsts = {module for module in built.modules() if isinstance(module, FirstProduct)}
    assert sorted(first.readers for first in firsts) == LAYERS * [1] + LAYERS * [3]
    prepare(built, work).run()
    assert not any(first._calls for first in firsts)
