"""Products of int8 that write 32 or 8 bits, as FasterTransformer's encoders have them, and the kernels around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from opcast.datasets.clusters import load_cluster
from opcast.simulator.graph import Graph
from opcast.simulator.passes.int8_results import write_integers
from opcast.simulator.passes.order import INFERENCE, apply_passes
from opcast.simulator.question.plan import Parallel, Plan, PlanError, Stack, load_stack
from opcast.simulator.trace import Workload, trace

BATCH, LENGTH, LAYERS, HIDDEN, INTER, HEADS = 4, 32, 3, 128, 512, 2
TOKENS = BATCH * LENGTH
ENCODER = {
    "model_type": "bert",
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": 512,
}
SIXTEEN, ONE, TWO = "fastertransformer_fused", "fastertransformer_int8_v1", "fastertransformer_int8_v2"
# Bytes that a layer's kernels between products move for an element of a token's hidden state, by the source:
BETWEEN = {
    ONE: 2 * (2 + 1)  # invokeQuantization
    + 3 * (4 + 1)  # invokeTrtAddQkvBiasInt32Iint8O
    + (1 + 1)  # invokeRowMajorToCOL32
    + 2 * (4 + 2 + 2)  # invokeAddBiasResidualLayerNormCol32
    + 4 * (4 + 1),  # invokeAddBiasGeluCol32
    TWO: 3 * (1 + 1) + (1 + 1) + 2 * (1 + 1 + 1) + 4 * (1 + 1),
}


@pytest.fixture(scope="module")
def traced() -> Graph:
    return trace(ENCODER, Workload("prefill", BATCH, LENGTH, attention="fused", optimizer="none"), "fp16")


def plan(stack: str, **options: Any) -> Plan:
    return Plan(
        Parallel(),
        load_cluster("dgx_a100"),
        load_stack(stack),
        precision="fp16",
        quantization="int8",
        options=options,
    )


def layers(graph: Graph) -> list[Any]:
    """Ops of the layers, each as often as it runs."""
    runs = ((node, times) for node, times in graph.weighted() if "layer." in node.path and node.op is not None)
    return [node.op for node, times in runs for _ in range(times)]


@pytest.mark.parametrize(("stack", "results"), [(SIXTEEN, "fp16"), (ONE, "int32"), (TWO, "int8")])
def test_products_write_what_the_mode_says(traced: Graph, stack: str, results: str) -> None:
    products = [op for op in layers(apply_passes(traced, plan(stack), INFERENCE)) if op.kind == "gemm"]
    assert len(products) == 4 * LAYERS
    assert {(op.dtype, op.out_dtype) for op in products} == {("int8", results)}


@pytest.mark.parametrize("stack", [ONE, TWO])
def test_kernels_between_products_move_what_the_source_has(
    traced: Graph, stack: str, assert_sound: Callable[[Graph], None]
) -> None:
    made = apply_passes(traced, plan(stack), INFERENCE)
    assert_sound(made)
    between = [op for op in layers(made) if op.kind not in ("gemm", "attention_prefill")]
    moved = sum(float(op.cost.bytes) for op in between)
    assert moved == pytest.approx(LAYERS * TOKENS * HIDDEN * BETWEEN[stack], rel=1e-3)
    rounded = Counter(op.kind for op in between)["quantize"]
    assert rounded == (2 * LAYERS if stack == ONE else 0)


@pytest.mark.parametrize("stack", [ONE, TWO])
def test_attention_is_in_int8(traced: Graph, stack: str) -> None:
    attention = [op for op in layers(apply_passes(traced, plan(stack), INFERENCE)) if op.kind == "attention_prefill"]
    assert [(op.dtype, op.out_dtype) for op in attention] == LAYERS * [("int8", "int8")]


def test_padding_is_left_out_of_these_kernels_too(traced: Graph) -> None:
    whole, half = (
        sum(
            float(op.cost.bytes)
            for op in layers(apply_passes(traced, plan(ONE, **options), INFERENCE))
            if op.kind != "gemm"
        )
        for options in ({}, {"real_tokens": 0.5})
    )
    assert half == pytest.approx(whole / 2, rel=1e-3)


def test_other_formats_and_stacks_stay_as_they_are(traced: Graph) -> None:
    assert write_integers(traced, plan(SIXTEEN)) is traced
    unquantized = Plan(Parallel(), load_cluster("dgx_a100"), load_stack(ONE), precision="fp16")
    assert write_integers(traced, unquantized) is traced


def test_a_format_that_no_product_writes() -> None:
    with pytest.raises(PlanError, match=r"stack\.int8_results"):
        Stack(int8_results="int4")
