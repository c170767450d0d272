"""Norms of engines: adds go to the next layer's norm, small all-reduces normalise; all else stays as it was."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from opcast.datasets.clusters import load_cluster, one_node
from opcast.datasets.devices import load_device
from opcast.simulator.graph import Graph
from opcast.simulator.passes.norms import fuse_allreduce_norm, fuse_next_norm
from opcast.simulator.passes.order import INFERENCE, apply_passes
from opcast.simulator.question.kernels import ReducedNorm
from opcast.simulator.question.plan import Parallel, Plan, PlanError, Stack, load_stack
from opcast.simulator.question.work import Work
from opcast.simulator.step.checks import prepared
from opcast.simulator.trace import Workload, trace

ENGINE = load_stack("vllm").fusion
NORMS = ("next_norm", "reduce_once", "rounded_norms")
SMALL = ReducedNorm("a test", most_mib=1)
WITHOUT = tuple(name for name in ENGINE if name not in NORMS)
LAYERS = 4


def plan(*more: str, tp: int = 1, quantization: str = "", reduced_norms: tuple[ReducedNorm, ...] = ()) -> Plan:
    stack = Stack("engine", fusion=(*WITHOUT, *more), reduced_norms=reduced_norms)
    return Plan(Parallel(tp=tp), load_cluster("dgx_h100"), stack, quantization=quantization)


def step(model: object, kind: str = "decode", batch: int = 3, length: int = 17) -> Graph:
    workload = Workload(kind, batch=batch, seq_len=length, cache="static", optimizer="none", attention="fused")
    return trace(model, workload, "bf16")


def kernels(graph: Graph) -> Counter[str]:
    found: Counter[str] = Counter()
    for node, times in graph.weighted():
        added = node.source in ("fused.add_norm", "fused.residual_norm")
        found["fused.add_norm" if added else node.op.kind if node.op else node.source] += times
    return found


def bytes_of(graph: Graph, role: str) -> int:
    read = {t for node in graph.nodes() for t in node.reads}
    return int(sum(graph.tensor_bytes[t] for t in read if graph.tensor(t).role == role))


@pytest.mark.parametrize(("family", "tp"), [("llama", 1), ("qwen3_moe", 2), ("deepseek_v3", 2)])
def test_layers_leave_their_last_add_to_the_next_norm(family, tp, small_model, assert_sound):
    graph = step(small_model(family, layers=LAYERS))
    before, after = (apply_passes(graph, plan(*more, tp=tp), INFERENCE) for more in ((), ("next_norm",)))
    assert_sound(after)
    assert bytes_of(after, "weight") == bytes_of(before, "weight")
    one, other = kernels(before), kernels(after)
    moved = other["fused.add_norm"] - one["fused.add_norm"]
    assert moved == LAYERS
    assert one["rms_norm"] - other["rms_norm"] == one["elementwise"] - other["elementwise"] == moved
    rest = ("rms_norm", "elementwise", "fused.add_norm")
    assert {k: n for k, n in one.items() if k not in rest} == {k: n for k, n in other.items() if k not in rest}
    assert {block.repeat for block in after.blocks} == {block.repeat for block in before.blocks}


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_small_all_reduces_normalise_and_weigh_the_same(family, small_model, assert_sound):
    graph = step(small_model(family, layers=LAYERS))
    plans = (plan("next_norm", tp=2, reduced_norms=choices) for choices in ((), (SMALL,)))
    before, after = (apply_passes(graph, each, INFERENCE) for each in plans)
    assert_sound(after)
    assert bytes_of(after, "weight") == bytes_of(before, "weight")
    one, other = kernels(before), kernels(after)
    assert one["fused.add_norm"] >= 2 * LAYERS - 2
    assert other["fused.add_norm"] == 0
    assert {**one, "fused.add_norm": 0} == {**other, "fused.add_norm": 0}
    sums = Counter({"no": 0, "yes": 0})
    for node, times in after.weighted():
        if node.op is not None and node.op.kind == "all_reduce":
            sums[str(node.op.to_dict()["norm"])] += times
    assert sums["yes"] == one["fused.add_norm"]
    assert sums.total() == one["all_reduce"]


ONCE = {  # norms of a layer, beside the one at the end: around attention and MLP, of queries and keys, of latents
    "llama": 2,
    "mixtral": 2,
    "qwen3_moe": 4,
    "deepseek_v3": 4,
}


@pytest.mark.parametrize("device", ["h100_sxm", "b200_sxm", "a100_sxm_80gb"])
@pytest.mark.parametrize("stack", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("family", ONCE)
def test_an_engine_runs_each_norm_of_a_model_once_alone_or_with_a_sum(family, stack, device, small_model):
    graph, figures = step(small_model(family, layers=LAYERS)), load_device(device)
    fuses = {}
    for tp in (1, 2):
        asked = Plan(Parallel(tp=tp), one_node(figures), load_stack(stack))
        made = apply_passes(graph, prepared(asked, Work("decode"), figures), INFERENCE)
        inside = sum(
            times for node, times in made.weighted() if node.op is not None and node.op.to_dict().get("norm") == "yes"
        )
        counts = kernels(made)
        alone = counts["rms_norm"] + counts["fused.add_norm"]
        assert alone + inside == ONCE[family] * LAYERS + 1
        fuses[tp] = inside
    some = device != "a100_sxm_80gb" if stack != "trtllm" else True
    if stack == "sglang":
        some &= family != "llama"  # it fuses for mixtures alone
    assert fuses == {1: 0, 2: 2 * LAYERS * some}


@pytest.mark.parametrize(
    ("stack", "alone", "added"),
    [("sglang", 2 * LAYERS + 1, 2 * LAYERS), ("trtllm", 2 * LAYERS + 1, 2 * LAYERS), ("vllm", 1, 2 * LAYERS)],
)
def test_norms_on_both_sides_of_a_sublayer_run_by_themselves_unless_compiled(stack, alone, added, small_model):
    graph, figures = step(small_model("gemma2", layers=LAYERS)), load_device("h100_sxm")
    for tp in (1, 2):
        plan_of_stack = Plan(Parallel(tp=tp), one_node(figures), load_stack(stack))
        served = apply_passes(graph, prepared(plan_of_stack, Work("decode"), figures), INFERENCE)
        counts = kernels(served)
        assert (counts["rms_norm"], counts["fused.add_norm"]) == (alone, added)
        assert not any(node.op.norm for node, _ in served.weighted() if node.op and node.op.kind == "all_reduce")


def norms(graph: Graph, tp: int, *choices: ReducedNorm) -> int:
    return kernels(apply_passes(graph, plan(tp=tp, reduced_norms=choices), INFERENCE))["fused.add_norm"]


def test_large_all_reduces_and_ranks_alone_leave_norms_to_themselves(small_model):
    large = step(small_model("llama", hidden_size=1024), "prefill", batch=2, length=400)
    assert norms(large, 2, SMALL) == norms(large, 2) > 0
    small = step(small_model("llama"))
    assert norms(small, 1, SMALL) == norms(small, 1) > 0


def test_what_normalises_depends_on_ranks_tokens_and_experts(small_model):
    dense, mixture = (step(small_model(family), batch=3) for family in ("llama", "qwen3_moe"))
    fewer = norms(dense, 2, SMALL)
    assert fewer < norms(dense, 2)
    for one, other in (
        (ReducedNorm("a test", ranks=2), ReducedNorm("a test", ranks=4)),
        (ReducedNorm("a test", most_tokens=3), ReducedNorm("a test", most_tokens=2)),
        (ReducedNorm("a test"), ReducedNorm("a test", mixtures=True)),
    ):
        assert norms(dense, 2, one) == norms(dense, 2, other, one) == fewer
        assert norms(dense, 2, other) == norms(dense, 2)
    assert norms(mixture, 2, ReducedNorm("a test", mixtures=True)) < norms(mixture, 2)


def test_devices_without_the_kernel_normalise_by_another() -> None:
    def kept(device: str) -> tuple[ReducedNorm, ...]:
        cluster = one_node(load_device(device))
        asked = Plan(Parallel(tp=8), cluster, load_stack("vllm"))
        return prepared(asked, Work("decode"), load_device(device)).stack.reduced_norms

    assert {choice.sm for choice in kept("b200_sxm")} == {10.0}
    assert kept("l40s") == kept("a100_sxm_80gb") == ()
    with pytest.raises(PlanError, match=r"stack.reduced_norms.ranks=-1 must be a whole number"):
        ReducedNorm("a test", ranks=-1)


def test_without_names_a_graph_is_the_same_object(small_model):
    graph = step(small_model("llama"))
    assert fuse_next_norm(graph, plan()) is graph
    assert fuse_allreduce_norm(graph, plan()) is graph


@pytest.mark.parametrize(("quantization", "left"), [("fp8", 1), ("fp8_block", 4)])
def test_a_compiler_rounds_with_norms_and_activations_but_not_behind_attention(quantization, left, small_model):
    graph = step(small_model("llama", layers=LAYERS, hidden_size=256, intermediate_size=512))
    names = plan("rounded_norms", quantization=quantization)
    assert kernels(apply_passes(graph, plan(quantization=quantization), INFERENCE))["quantize"] == 4 * LAYERS
    assert kernels(apply_passes(graph, names, INFERENCE))["quantize"] == left * LAYERS
    every = replace(names, stack=replace(names.stack, fusion=(*names.stack.fusion, "rounded_outputs")))
    assert kernels(apply_passes(graph, every, INFERENCE))["quantize"] == 0


def test_activations_are_rounded_to_nvfp4_by_a_kernel_that_knows_the_scale(small_model):
    graph = step(small_model("llama", layers=LAYERS, hidden_size=256, intermediate_size=512))
    names = plan("rounded_outputs", quantization="nvfp4")
    made = apply_passes(graph, names, INFERENCE)
    left = [(node.op, times) for node, times in made.weighted() if node.op is not None and node.op.kind == "quantize"]
    assert sum(times for _, times in left) == LAYERS
    assert {(op.out_dtype, op.cols, op.part) for op, _ in left} == {("nvfp4", 512, 2)}


def test_tensor_ranks_that_share_experts_out_reduce_once_with_shared_ones(small_model, assert_sound):
    graph = step(small_model("deepseek_v3", layers=LAYERS))
    shared_out = replace(plan("next_norm", "reduce_once"), parallel=Parallel(tp=2, ep=2))
    shared_out = replace(shared_out, options={"ep_mode": "replicated"})
    apart = replace(shared_out, stack=replace(shared_out.stack, fusion=(*WITHOUT, "next_norm")))
    after, before = (apply_passes(graph, each, INFERENCE) for each in (shared_out, apart))
    assert_sound(after)
    mixtures = kernels(after)["fused_moe"]
    assert kernels(before)["all_reduce"] - kernels(after)["all_reduce"] == mixtures > 0
    assert bytes_of(after, "weight") == bytes_of(before, "weight")
    moe = [node.op for node, _ in after.weighted() if node.op is not None and node.op.kind == "fused_moe"]
    assert {(op.ep, op.tokens) for op in moe} == {(2, 3)}  # of three tokens that all ranks hold, no more
