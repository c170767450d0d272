"""What a campaign measures for a step: the kernels that the step's stack launches."""

from __future__ import annotations

import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.harness.coverage import EAGER, to_measure, ways
from opcast.models.choice import launched
from opcast.simulator.engines.chain import caller_of
from opcast.simulator.question.plan import load_stack

H100 = load_device("h100_sxm")
ATTENTION = make_op("attention_backward", heads_q=32, heads_kv=8, head_dim=128, v_head_dim=128, seq_q=4096, seq_kv=4096)


@pytest.mark.parametrize(("stack", "wanted"), [("torchtitan", {"cudnn", "sdpa"}), ("torch", {"sdpa"})])
def test_attention_is_measured_as_the_stack_runs_it(stack: str, wanted: set[str]) -> None:
    assert {way.backend for way in to_measure(ways(ATTENTION, H100, caller_of(load_stack(stack), H100)))} == wanted


@pytest.mark.parametrize(
    ("mib", "stack", "wanted"),
    [
        (
            1,
            "vllm",
            {"flashinfer:mnnvl_all_reduce", "vllm:custom_all_reduce", "nccl:graph"},
        ),
        (512, "vllm", {"nccl"}),
        (
            1,
            "sglang",
            {"vllm:custom_all_reduce", "nccl:graph"},
        ),
        (1, "trtllm_2023", {"nccl:graph"}),
        (1, "torchtitan", {"nccl"}),
        (1, "megatron_core", {"nccl"}),
    ],
)
def test_sums_are_measured_as_the_stack_issues_them(mib: int, stack: str, wanted: set[str]) -> None:
    op = make_op("all_reduce", size_bytes=mib << 20, ranks=8)
    assert {way.backend for way in to_measure(ways(op, H100, caller_of(load_stack(stack), H100)))} == wanted


PRODUCT = {"m": 64, "n": 2048, "k": 2048}
STACKS = ("torchtitan", "torchtitan_2025", "megatron_core", "torch", "vllm", "sglang", "trtllm")
OPS = {
    "16-bit product": make_op("gemm", "bf16", **PRODUCT),
    "fp8 product": make_op("gemm", "fp8", "bf16", **PRODUCT),
    "product in blocks": make_op("gemm", "fp8_block", "bf16", **PRODUCT),
    "norm": make_op("rms_norm", "bf16", rows=64, cols=2048),
    "rotation": make_op("rope", "bf16", tokens=64, heads=8, head_dim=128),
    "gate": make_op("silu_mul", "bf16", rows=64, cols=2048),
    "rounding": make_op("quantize", "bf16", "fp8", rows=64, cols=2048),
    "prompt": make_op("attention_prefill", heads_q=8, heads_kv=8, head_dim=128, v_head_dim=128, seq_q=512, seq_kv=512),
    "latent": make_op("mla_decode", "bf16", batch=8, heads=16, seq_q=1, seq_kv=4096),
    "loss": make_op("cross_entropy", "bf16", tokens=64, vocab=4096),
}


@pytest.mark.parametrize("device", ["h100_sxm", "b200_sxm", "a100_sxm_80gb"])
@pytest.mark.parametrize(
    "stack", ["torchtitan", "torchtitan_2025", "megatron_core", "torch", "vllm", "sglang", "trtllm"]
)
def test_what_is_measured_first_is_what_the_rule_lets_answer(stack: str, device: str) -> None:
    """A campaign's best row is the one that answers: both read one table."""
    chip = load_device(device)
    caller = caller_of(load_stack(stack), chip)
    compared = 0
    for name, op in OPS.items():
        able = [way.backend for way in ways(op, chip, caller) if way.runs]
        answering = launched(dict.fromkeys(able, 10), (), op.kind, op.dtype, caller)
        if answering:
            assert to_measure(ways(op, chip, caller))[0].backend == answering[0], name
            compared += 1
    assert compared > 4


@pytest.mark.parametrize("stack", ["megatron_core", "vllm"])
def test_no_stack_that_fuses_measures_operators_one_by_one(stack: str) -> None:
    """Their rows would never answer for it."""
    refused = {way.backend: way.refusal for way in ways(OPS["loss"], H100, caller_of(load_stack(stack), H100))}
    assert refused["torch"] == EAGER
    assert not refused["inductor"]


def test_rows_of_experts_are_moved_by_the_kernel_that_megatron_fuses() -> None:
    """``moe_permute_fusion`` of conf/stack/megatron_core.yaml; torch's three operators are what it replaces."""
    op = make_op("moe_permute", "bf16", tokens=64, hidden=2048, topk=8, direction="unpermute")
    found = ways(op, H100, caller_of(load_stack("megatron_core"), H100))
    assert [way.backend for way in to_measure(found)] == ["transformer_engine:permute"]


def test_kernels_alike_are_measured_where_an_engine_s_own_cannot_be() -> None:
    caller = caller_of(load_stack("sglang"), H100)
    assert to_measure(ways(OPS["fp8 product"], H100, caller))[0].backend == "vllm:cutlass_scaled_mm"
    assert to_measure(ways(OPS["gate"], H100, caller))[0].backend == "inductor"


EXPERTS = {"tokens": 64, "hidden": 7168, "inter": 2048, "topk": 8, "experts": 256, "tp": 8}


def test_what_a_stack_has_no_kernel_for_is_not_measurable() -> None:
    """TensorRT-LLM runs experts in blocks of fp8 from Hopper on: kernels of others on Ada say nothing of it."""
    ada, op = load_device("l40s"), make_op("fused_moe", "fp8_block", "bf16", **EXPERTS)
    trtllm = caller_of(load_stack("trtllm"), ada)
    assert [way.backend for way in to_measure(ways(op, H100, caller_of(load_stack("trtllm"), H100)))]
    assert not to_measure(ways(op, ada, trtllm))
    assert [(way.backend, way.refusal) for way in ways(op, ada, trtllm)] == [
        ("trtllm", "it runs on compute capability 9.x and 10.x and 12.x, not 8.9")
    ]
    assert to_measure(ways(op, ada, caller_of(load_stack("vllm"), ada)))[0].backend == "vllm:fused_experts"


def test_experts_of_tensorrt_llm_are_measured_on_ada_in_16_bits() -> None:
    ada, op = load_device("l40s"), make_op("fused_moe", "bf16", **EXPERTS)
    assert to_measure(ways(op, ada, caller_of(load_stack("trtllm"), ada)))[0].backend == "flashinfer:cutlass"
