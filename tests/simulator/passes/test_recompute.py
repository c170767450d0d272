"""Recomputation: the same step, less kept, more computed; and as much memory as torch's own checkpoints take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import Cluster
from opcast.simulator.graph import Graph
from opcast.simulator.passes.recompute import recompute
from opcast.simulator.question.plan import Parallel, Plan, PlanError
from opcast.simulator.question.stack import STACK_DIRECTORY, load_stack
from opcast.simulator.trace import Workload, trace
from opcast.simulator.trace.build import build
from opcast.simulator.trace.models import resolve
from opcast.simulator.trace.steps import prepare
from opcast.tests.simulator.peaks import peak_of_new_tensors, torch_peak

CLUSTER = Cluster("c", "c", "h100_sxm")
FAMILIES = ("llama", "gemma2", "deepseek_v3", "qwen3_moe")
STACKS = sorted(path.stem for path in STACK_DIRECTORY.glob("*.yaml"))
POLICIES = (
    "full",
    "full:2",
    "layers:1,3",
    "selective",
    "selective:mlp",
    "selective:layernorm,moe_act,core_attn",
    "ops",
)
Make = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def graphs(small_model: Make) -> dict[str, Graph]:
    workload = Workload("train", batch=2, seq_len=16, attention="fused")
    return {family: trace(small_model(family, layers=6), workload, "bf16") for family in FAMILIES}


def plan(policy: str, **options: Any) -> Plan:
    return Plan(Parallel(), CLUSTER, recompute=policy, options=options)


def products(graph: Graph, phase: str) -> float:
    return sum(
        repeat * float(node.op.cost.flops)
        for node, repeat in graph.weighted()
        if node.op is not None and node.op.cost.unit == "tensor" and node.phase == phase
    )


def left(graph: Graph) -> int:
    """Bytes of activations that outlive the step."""
    written = {t for node in graph.nodes() for t in node.writes}
    freed = {t for node in graph.nodes() for t in node.frees}
    return sum(int(graph.tensor_bytes[t]) for t in written - freed if graph.tensor(t).role == "activation")


def saved(graph: Graph) -> int:
    """Bytes of activations that live when the forward pass ends."""
    written: set[int] = set()
    for node in graph.nodes():
        if node.phase == "backward":
            break
        written |= set(node.writes)
        written -= set(node.frees)
    return sum(int(graph.tensor_bytes[t]) for t in written)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_lifetimes_stay_sound_and_no_work_is_lost(
    family: str, policy: str, graphs: dict[str, Graph], assert_sound: Callable[..., None]
):
    graph = graphs[family]
    made = recompute(graph, plan(policy))
    assert_sound(made)
    assert left(made) == left(graph)
    for phase in ("forward", "backward"):
        assert products(made, phase) == products(graph, phase)
    assert saved(made) <= saved(graph)


@pytest.mark.parametrize("family", FAMILIES)
def test_full_recomputation_keeps_one_tensor_a_layer(family: str, graphs: dict[str, Graph]):
    graph = graphs[family]
    more, less = saved(graph), saved(recompute(graph, plan("full")))
    hidden = 2 * 16 * 64 * 2
    assert less < 0.5 * more
    by_layer = saved(recompute(graph, plan("layers:0"))) - saved(recompute(graph, plan("layers:0,1")))
    kept = more - saved(recompute(graph, plan("layers:1"))) - by_layer
    assert abs(kept) <= 2 * hidden
    everything = recompute(graph, plan("full", recompute_early_stop=False))
    layers = sum(
        repeat * float(node.op.cost.flops)
        for node, repeat in graph.weighted()
        if node.op is not None and node.op.cost.unit == "tensor" and node.phase == "forward" and ".layers." in node.path
    )
    assert products(everything, "recompute") == layers
    assert 0 < products(recompute(graph, plan("full")), "recompute") <= layers


def test_layers_that_do_not_repeat_run_again_too():
    """Every second layer of Switch is a mixture, so that one block has both passes of the last."""
    switch = {
        "model_type": "switch_transformers",
        "is_encoder_decoder": True,
        **dict.fromkeys(("num_layers", "num_decoder_layers"), 4),
        **dict.fromkeys(("num_sparse_encoder_layers", "num_sparse_decoder_layers"), 2),
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_heads": 4,
        "num_experts": 4,
        "vocab_size": 256,
    }
    graph = trace(switch, Workload("train", batch=2, seq_len=16, attention="fused"), "bf16")
    less = recompute(graph, plan("full", recompute_early_stop=False))
    layers = sum(
        repeat * float(node.op.cost.flops)
        for node, repeat in graph.weighted()
        if node.op is not None
        and node.op.cost.unit == "tensor"
        and node.phase == "forward"
        and "decoder.block" in node.path
    )
    assert products(less, "recompute") == layers > 0
    assert left(less) <= left(graph)
    assert saved(less) < saved(graph)


def test_frameworks_stop_early_or_not(graphs: dict[str, Graph]):
    graph, usual = graphs["llama"], plan("full")
    stops = recompute(graph, usual)
    runs_on = recompute(graph, replace(usual, stack=load_stack("megatron")))
    assert products(stops, "recompute") < products(runs_on, "recompute")
    asked = replace(usual, stack=load_stack("megatron"), options={"recompute_early_stop": True})
    assert products(recompute(graph, asked), "recompute") == products(stops, "recompute")
    whole = {name for name in STACKS if not load_stack(name).recompute_early_stop}
    assert {name for name in STACKS if name.startswith("megatron")} <= whole
    assert whole.isdisjoint({"torch", "torchtitan", "llm_foundry"})


def test_the_attention_core_alone_keeps_its_output(graphs: dict[str, Graph]):
    graph = graphs["llama"]
    made = recompute(graph, plan("selective"))
    again = [node for node in made.nodes() if node.phase == "recompute"]
    assert [node.op.kind for node in again if node.op is not None] == ["attention_prefill"] * 6
    assert saved(graph) - saved(made) == 6 * 2 * 4 * 16 * 4  # the softmax's log-sum-exp, fp32
    assert [node.path for node in again] == [f"model.layers.{layer}.self_attn" for layer in reversed(range(6))]


@settings(deadline=None, max_examples=8)
@given(layers=st.sets(st.integers(0, 5)), family=st.sampled_from(FAMILIES))
def test_the_layers_named_are_those_that_run_again(
    layers: set[int], family: str, graphs: dict[str, Graph], assert_sound: Callable[..., None]
):
    if not layers:
        return
    made = recompute(graphs[family], plan("layers:" + ",".join(map(str, sorted(layers)))))
    assert_sound(made)
    again = {int(node.path.split(".")[2]) for node in made.nodes() if node.phase == "recompute"}
    assert again == layers


def test_blocks_of_a_chunk(graphs: dict[str, Graph]):
    made = recompute(graphs["llama"], Plan(Parallel(pp=2), Cluster("c", "c", "h100_sxm"), recompute="full:1"))
    again = {int(node.path.split(".")[2]) for node in made.nodes() if node.phase == "recompute"}
    assert again == {0, 3}


@pytest.mark.parametrize("policy", ["some", "selective:heads", "full:x", "layers:a-b", "ops:2"])
def test_unknown_policies_are_named(policy: str, graphs: dict[str, Graph]):
    with pytest.raises(PlanError, match="recompute="):
        recompute(graphs["llama"], plan(policy))


def test_nothing_to_do_is_the_same_graph(graphs: dict[str, Graph], small_model: Make):
    assert recompute(graphs["llama"], plan("none")) is graphs["llama"]
    prompt = trace(small_model("llama"), Workload("prefill", batch=1, seq_len=8), "bf16")
    assert recompute(prompt, plan("full")) is prompt


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_peak_is_that_of_torch_with_checkpoints(family: str, small_model: Make):
    workload = Workload("train", batch=4, seq_len=48, optimizer="none")
    config = small_model(family, layers=6, vocab_size=200)
    module = build(resolve(config), workload, "fp32").module
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    forward = prepare(module, workload)

    def run() -> object:
        output = forward.run()
        output.loss.backward()
        return output

    run()
    module.zero_grad(set_to_none=True)
    measured = torch_peak(run)
    graph = trace(config, workload, "fp32")
    assert peak_of_new_tensors(recompute(graph, plan("full"))) == pytest.approx(measured, rel=0.02)
    assert peak_of_new_tensors(graph) > 1.2 * measured
