"""QLoRA: what frozen weights weigh in few bits, and what unpacks them, by hand and against bitsandbytes' own order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from opcast.datasets.clusters import load_cluster, one_device
from opcast.datasets.devices import load_device
from opcast.simulator.graph import Graph
from opcast.simulator.passes.order import apply_passes
from opcast.simulator.question.plan import Parallel, Plan, PlanError, load_stack
from opcast.simulator.question.requests import SimulateRequest, plan_of
from opcast.simulator.question.work import Work
from opcast.simulator.simulate import laid_out
from opcast.simulator.step.build import LaidOut, lay_out
from opcast.simulator.step.checks import prepared
from opcast.simulator.trace import TraceError, Workload, trace
from opcast.simulator.trace.stored_formats import EVERY_MODULE, ModuleRule, WeightFormat

LAYERS, HIDDEN, FFN, VOCABULARY, RANK = 3, 256, 512, 1024, 8
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
}
LINEAR = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
LEFT = 2 * VOCABULARY * HIDDEN + (2 * LAYERS + 1) * HIDDEN  # embedding, head, norms
LORA = Workload("train", 1, 32, attention="fused", lora_rank=RANK)
A10G = load_device("a10g")
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}


def plan(quantization: str = "nf4", recompute: str = "none") -> Plan:
    return Plan(Parallel(), one_device(A10G), load_stack("torch"), quantization=quantization, recompute=recompute)


@pytest.fixture(scope="module")
def traced() -> Graph:
    return trace(MODEL, Workload("train", 1, 32, attention="fused", lora_rank=RANK, kbit=True))


@pytest.fixture(scope="module")
def packed(traced: Graph) -> Graph:
    return apply_passes(traced, plan())


def test_frozen_weights_lie_in_eight_bits_where_the_plan_says_so() -> None:
    in_eight, graph = replace(plan("fp8"), cluster=one_device(load_device("h100_sxm"))), trace(MODEL, LORA)
    usual, stored = (apply_passes(graph, replace(in_eight, options=each)) for each in ({}, {"fp8_params": True}))
    assert held(usual, "frozen", "bf16") == 2 * (LINEAR + LEFT)
    assert held(stored, "frozen", "fp8") == LINEAR
    assert held(stored, "frozen", "bf16") == 2 * LEFT
    assert held(stored, "weight", "bf16") == held(usual, "weight", "bf16") > 0  # adapters stay as they are


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("device", "copies"), [("h100_sxm", True), ("mi300x", True), ("b200_sxm", False)])
def test_stored_weights_are_transposed_for_gradients_where_products_take_one_layout(
    device: str, copies: bool, tp: int
) -> None:
    machine = replace(one_device(load_device(device)), devices_per_node=tp)
    on_device = replace(plan("fp8"), parallel=Parallel(tp=tp), cluster=machine, options={"fp8_params": True})
    graph = apply_passes(trace(MODEL, LORA), on_device)
    nodes = [(node, times) for node, times in graph.weighted() if node.source == "fused.transpose"]
    read_first = 3 * HIDDEN * HIDDEN  # queries, keys and values of the first layer: what they read has no gradient
    turned = sum(node.op.size_bytes * times for node, times in nodes if node.op is not None)
    assert turned == (LINEAR - read_first) * copies / tp
    assert {node.phase for node, _ in nodes} <= {"backward"}


def held(graph: Graph, role: str, dtype: str) -> int:
    return sum(t.size_bytes * t.count for t in graph.tensors if (t.role, t.dtype) == (role, dtype))


def kernels(graph: Graph, phase: str) -> Counter[str]:
    made: Counter[str] = Counter()
    for node, times in graph.weighted():
        if node.phase == phase:
            made[node.source] += times
    return made


def test_each_weight_weighs_half_a_byte_and_its_scales(packed: Graph) -> None:
    assert held(packed, "frozen", "nf4") == LINEAR // 2
    assert held(packed, "buffer", "uint8") == pytest.approx(LINEAR / 64 * (1 + 4 / 256), rel=1e-3)
    assert held(packed, "frozen", "fp32") == 4 * LEFT
    assert held(packed, "frozen", "bf16") == 0
    assert held(packed, "weight", "bf16") == 2 * LAYERS * 4 * RANK * 2 * HIDDEN


def test_scales_that_are_not_packed(traced: Graph) -> None:
    single = ModuleRule(WeightFormat("nf4", 64, 4.0), patterns=EVERY_MODULE)
    plainly = apply_passes(traced, replace(plan(), weight_rules=(single,)))
    assert held(plainly, "buffer", "uint8") == LINEAR / 64 * 4
    assert kernels(plainly, "forward")["bitsandbytes.dequantize_blockwise"] == 0


def test_each_product_unpacks_its_weight_anew(packed: Graph) -> None:
    forward, backward = kernels(packed, "forward"), kernels(packed, "backward")
    assert forward["bitsandbytes.dequantize_4bit"] == forward["bitsandbytes.dequantize_blockwise"] == 7 * LAYERS
    # nothing learns before the first layer's q, k and v, so that no gradient goes through their frozen weights
    assert backward["bitsandbytes.dequantize_4bit"] == 7 * LAYERS - 3
    for node, _ in packed.weighted():
        if node.op is not None and node.op.kind == "gemm":
            assert node.op.dtype == "bf16"


def test_unpacked_copies_die_with_their_product(packed: Graph) -> None:
    nodes = list(packed.nodes())
    for at, node in enumerate(nodes):
        if node.source == "bitsandbytes.dequantize_4bit":
            following = nodes[at + 1]
            assert set(node.writes) <= set(following.reads)
            assert set(node.writes) <= set(following.frees)


def test_recomputation_unpacks_once_more(traced: Graph) -> None:
    again = kernels(apply_passes(traced, plan(recompute="full")), "recompute")
    assert again["bitsandbytes.dequantize_4bit"] >= 6 * LAYERS  # torch ends with the last tensor that is read


def asked(stored: dict[str, Any], rank: int = RANK, precision: str = "auto") -> LaidOut:
    work = Work("train", seq_len=32, lora_rank=rank)
    request = SimulateRequest(model=MODEL | {"quantization_config": stored}, work=work, device=A10G)
    return laid_out(request.model, work, plan_of(replace(request, precision=precision), A10G), A10G)


def test_checkpoint_of_bitsandbytes_is_trained_as_it_is_stored() -> None:
    double = asked(BNB)
    assert double.plan.quantization == "nf4"
    assert held(double.pipelines[0][0].graph, "frozen", "nf4") == LINEAR // 2
    assert any("weights in nf4, as the checkpoint stores them" in note for note in double.plan.notes)
    single = asked(BNB | {"bnb_4bit_use_double_quant": False})
    assert held(single.pipelines[0][0].graph, "buffer", "uint8") == LINEAR / 64 * 4


def test_checkpoint_of_gptq_leaves_the_rest_in_16_bits() -> None:
    groups = asked({"quant_method": "gptq", "bits": 4, "group_size": 128})
    assert groups.plan.quantization == "w4a16"
    graph = groups.pipelines[0][0].graph
    assert held(graph, "frozen", "int4") == LINEAR // 2
    assert held(graph, "frozen", "bf16") == 2 * LEFT


@pytest.mark.parametrize(("stored", "rank"), [(BNB, 0), ({"quant_method": "fp8"}, RANK)])
def test_what_is_unpacked_says_so(stored: dict[str, Any], rank: int) -> None:
    laid = asked(stored, rank)
    assert laid.plan.quantization == ""
    assert any("training is simulated in bf16" in note for note in laid.plan.notes)


def test_what_cannot_be_trained_says_the_way_out() -> None:
    with pytest.raises(PlanError, match=r"workload\.lora_rank=16"):
        laid_out(MODEL, Work("train", seq_len=32), plan(), A10G)
    with pytest.raises(TraceError, match="take precision=nf4"):
        asked({"quant_method": "bitsandbytes", "load_in_8bit": True})
    cut = Plan(Parallel(tp=2), load_cluster("dgx_h100"), load_stack("torch"), quantization="nf4")
    with pytest.raises(PlanError, match=r"parallel\.tp=2 .* parallel\.zero_stage=3"):
        laid_out(MODEL, Work("train", seq_len=32, lora_rank=RANK), cut, load_device("h100_sxm"))


def test_shards_of_zero_3_are_packed() -> None:
    cluster = load_cluster("dgx_h100")
    sharded = Plan(Parallel(zero_stage=3), cluster, load_stack("torch"), quantization="nf4")
    work = Work("train", seq_len=32, global_batch=cluster.devices, lora_rank=RANK)
    laid = lay_out(MODEL, work, prepared(sharded, work, load_device("h100_sxm")), load_device("h100_sxm"), None)
    (chunk,) = laid.pipelines[0]
    assert held(chunk.graph, "frozen", "nf4") == pytest.approx(LINEAR / 2 / cluster.devices, rel=0.01)
    assert held(chunk.graph, "frozen", "fp32") == pytest.approx(4 * LEFT / cluster.devices, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gigabytes"), [("llama2_7b", 4.6), ("llama2_70b", 38.0)])
def test_published_sizes(name: str, gigabytes: float) -> None:
    """What people saw on their cards after loading (artidoro/qlora 193, LLaMA-Factory 4559)."""
    laid = laid_out(name, Work("train", seq_len=32, lora_rank=16), plan(), A10G)
    (chunk,) = laid.pipelines[0]
    resident = sum(t.size_bytes * t.count for t in chunk.graph.tensors if t.role in ("frozen", "weight"))
    scales = held(chunk.graph, "buffer", "uint8")
    assert (resident + scales) / 1e9 == pytest.approx(gigabytes, rel=0.05)
