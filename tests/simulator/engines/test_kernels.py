"""Kernels that a framework runs and another one's table timed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.ops import Op, make_op
from opcast.models.registry import Registry
from opcast.simulator.engines import ask, build_engine
from opcast.simulator.engines.kernels import KernelsEngine
from opcast.simulator.engines.learned import LearnedEngine
from opcast.simulator.question.kernels import KernelChoice
from opcast.simulator.question.plan import PlanError, load_stack
from opcast.simulator.step.build import engine_of
from opcast.simulator.workbench import SHIPPED_PREDICTORS

EXPERTS = make_op(
    "fused_moe", "fp8_block", out_dtype="bf16", tokens=8, hidden=7168, inter=2048, topk=8, experts=256, tp=8
)
PRODUCT = make_op("gemm", "fp8", out_dtype="bf16", m=8, n=10240, k=8192, layout="nt")
TAKEN = KernelChoice("fused_moe", "fp8_block", "sglang:sglang_flashinfer_trtllm_moe", "a test", "blackwell")


def learned(device_id: str, backend: str | None = None) -> LearnedEngine:
    return LearnedEngine(load_device(device_id), [Registry(SHIPPED_PREDICTORS)], backend)


def latency(engine: object, op: Op) -> float:
    return float(ask(engine, [op], "cold").latency_us[0])  # type: ignore[arg-type]


def test_the_reading_that_is_named_answers_and_no_other_op_is_touched() -> None:
    engine = KernelsEngine(learned("b200_sxm", "trtllm"), [TAKEN])
    named = learned("b200_sxm", "sglang-0.5.14:sglang_flashinfer_trtllm_moe")
    assert latency(engine, EXPERTS) == pytest.approx(latency(named, EXPERTS))
    assert latency(engine, EXPERTS) < 0.6 * latency(learned("b200_sxm", "trtllm"), EXPERTS)
    assert len(ask(engine, [PRODUCT], "cold").open) == 1


def test_a_choice_of_another_architecture_or_of_fewer_rows_declines() -> None:
    assert len(ask(KernelsEngine(learned("h200_sxm"), [TAKEN]), [EXPERTS], "cold").open) == 1
    few = KernelsEngine(learned("b200_sxm"), [replace(TAKEN, most_tokens=4)])
    assert len(ask(few, [EXPERTS, EXPERTS.replace(tokens=4)], "cold").open) == 1
    alone = KernelsEngine(learned("b200_sxm"), [replace(TAKEN, most_ep=1)])
    assert len(ask(alone, [EXPERTS, EXPERTS.replace(tp=1, ep=8)], "cold").open) == 1
    unknown = KernelsEngine(learned("b200_sxm"), [replace(TAKEN, backend="sglang:nothing_of_it")])
    assert len(ask(unknown, [EXPERTS], "cold").open) == 1


def test_the_rounding_that_a_table_timed_too_is_taken_off() -> None:
    choice = KernelChoice("gemm", "fp8", "trtllm:torch_flow", "a test", without="quantize")
    whole = latency(learned("b200_sxm", "trtllm-1.3.0rc20:torch_flow+quantize"), PRODUCT)
    parts = [
        latency(
            learned("b200_sxm", "trtllm"), make_op("quantize", "bf16", out_dtype="fp8", rows=8, cols=8192, part=part)
        )
        for part in ("scale", "apply")
    ]
    assert sum(parts) > 5
    assert latency(KernelsEngine(learned("b200_sxm"), [choice]), PRODUCT) == pytest.approx(whole - sum(parts))


def test_a_stack_has_its_kernels_before_its_tables() -> None:
    plain = build_engine(load_device("b200_sxm"), [], [SHIPPED_PREDICTORS], ("learned", "analytical"))
    stack = load_stack("trtllm")
    assert all(each.source for each in stack.kernels)
    own, without = engine_of(stack, plain), engine_of(replace(stack, kernels=()), plain)
    assert latency(own, EXPERTS) < 0.6 * latency(without, EXPERTS)
    assert latency(own, PRODUCT) < latency(without, PRODUCT) - 5


@pytest.mark.parametrize("stack", ["vllm", "sglang"])
def test_experts_of_gpt_oss_in_16_bits_are_triton_s_on_blackwell(stack: str) -> None:
    plain = build_engine(load_device("b200_sxm"), [], [SHIPPED_PREDICTORS], ("learned", "analytical"))
    own, without = engine_of(load_stack(stack), plain), engine_of(replace(load_stack(stack), kernels=()), plain)
    oss = make_op("fused_moe", "bf16", tokens=64, hidden=2880, inter=2880, topk=4, experts=128)
    assert latency(own, oss) == pytest.approx(
        latency(learned("b200_sxm", "sglang-0.5.14:sglang_fused_moe_triton"), oss)
    )
    assert latency(own, oss) > 1.3 * latency(without, oss)
    aligned = oss.replace(hidden=4096, inter=1536)
    assert latency(own, aligned) == latency(without, aligned)


def test_a_choice_of_no_kind_is_refused() -> None:
    with pytest.raises(PlanError, match="gem"):
        KernelChoice("gem", "fp8", "trtllm:x", "")
    with pytest.raises(PlanError, match=r"stack\.kernels\.sm"):
        KernelChoice("gemm", "fp8", "trtllm:x", "", sm="12.0")  # type: ignore[arg-type]


LATENT = make_op("mla_decode", batch=64, heads=16, seq_q=1, seq_kv=4096)
PROMPT = make_op("mla_prefill", batch=4, heads=16, seq_q=4096, seq_kv=4096)


@pytest.mark.parametrize(
    ("stack", "device", "op", "backend"),
    [
        ("vllm", "h200_sxm", LATENT, "sglang-0.5.14:flash_attention"),
        ("vllm", "h200_sxm", LATENT.replace(kv_dtype="fp8"), "trtllm-1.3.0rc20:default"),
        ("vllm", "b200_sxm", LATENT, "sglang-0.5.14:trtllm_mla"),
        ("vllm", "b200_sxm", LATENT.replace(kv_dtype="fp8"), "sglang-0.5.14:trtllm_mla"),
        ("vllm", "l40s", LATENT, "sglang-0.5.14:triton"),
        ("vllm", "a100_sxm_80gb", LATENT, "trtllm-1.0.0:default"),
        ("vllm", "h200_sxm", PROMPT, "trtllm-1.3.0rc20:default"),
        ("sglang", "h200_sxm", LATENT, "sglang-0.5.14:flash_attention"),
        ("sglang", "h200_sxm", PROMPT, "trtllm-1.3.0rc20:default"),
        ("sglang", "b200_sxm", PROMPT, "sglang-0.5.14:trtllm_mla"),
        ("sglang", "l40s", PROMPT, "trtllm-1.0.0:default"),
        ("sglang", "rtx_pro_6000_server", PROMPT, "trtllm-1.3.0rc20:default"),
        ("sglang", "rtx_pro_6000_server", LATENT, "sglang-0.5.14:triton"),
        ("trtllm", "h200_sxm", LATENT, "trtllm-1.3.0rc20:default"),
    ],
)
def test_latent_attention_is_read_off_the_kernel_that_the_engine_runs(
    stack: str, device: str, op: Op, backend: str
) -> None:
    plain = build_engine(load_device(device), [], [SHIPPED_PREDICTORS], ("learned", "analytical"))
    found = ask(engine_of(load_stack(stack), plain), [op], "cold")
    assert found.predictor[0].split("@")[1].startswith(f"{backend}/")


def test_prompts_of_sglang_on_hopper_are_not_absorbed() -> None:
    """Its table takes as long as 1,088 columns a head, where its prompts are of 320."""
    table, chosen = learned("h200_sxm", "sglang"), learned("h200_sxm", "trtllm")
    assert 2.0 < latency(table, PROMPT) / latency(chosen, PROMPT) < 1088 / 320


def test_a_format_of_the_cache_is_for_kinds_that_have_one() -> None:
    assert KernelChoice("mla_decode", "bf16", "trtllm:x", "", kv_dtype="fp8").kv_dtype == "fp8"
    with pytest.raises(PlanError, match="kv_dtype"):
        KernelChoice("gemm", "bf16", "trtllm:x", "", kv_dtype="fp8")
    with pytest.raises(PlanError, match="kv_dtype"):
        KernelChoice("mla_decode", "bf16", "trtllm:x", "", kv_dtype="fp4")


def test_sglang_runs_openais_experts_of_gpt_oss_on_hopper() -> None:
    """Its table timed a kernel that widens weights to 16 bits first: 2.4 times as long."""
    experts = make_op(
        "fused_moe", "mxfp4a16", out_dtype="bf16", tokens=64, hidden=2880, inter=2880, topk=4, experts=32, tp=1
    )
    engines = build_engine(load_device("h100_sxm"), [], [SHIPPED_PREDICTORS])
    found = ask(engine_of(load_stack("sglang"), engines), [experts], "cold")
    assert "oaitriton" in found.predictor[0]
    assert found.latency_us[0] < 0.6 * latency(learned("h100_sxm", "sglang-0.5.14:sglang_fused_moe_triton"), experts)


OSS_PACKED = make_op("fused_moe", "mxfp4a16", out_dtype="bf16", tokens=64, hidden=2880, inter=2880, topk=4, experts=32)
ORDER = ("learned", "transfer", "analytical")


def experts_of(stack: str, device: str, op: Op = OSS_PACKED) -> tuple[float, str]:
    """Microseconds of experts in a stack on a device, and who says so."""
    engine = engine_of(load_stack(stack), build_engine(load_device(device), [], [SHIPPED_PREDICTORS], ORDER))
    answers = ask(engine, [op], "cold")
    return float(answers.latency_us[0]), str(answers.predictor[0])


@pytest.mark.parametrize("device", ["gb200", "gb300", "b300_sxm"])
def test_experts_of_few_bits_are_the_framework_s_of_a_near_chip_where_its_table_here_has_none(device: str) -> None:
    of_b200, _ = experts_of("vllm", "b200_sxm")
    latency_us, predictor = experts_of("vllm", device)
    assert "vllm_gptossmxfp4moe" in predictor
    assert "b200_sxm" in predictor
    assert 0.8 * of_b200 < latency_us < 1.1 * of_b200


@pytest.mark.parametrize("device", ["l40s", "rtx_4090"])
def test_sglang_s_experts_of_gpt_oss_read_four_bits_on_ada(device: str) -> None:
    latency_us, _ = experts_of("sglang", device)
    assert latency_us == pytest.approx(experts_of("vllm", device)[0])
    over_ranks = OSS_PACKED.replace(experts=32, ep=2)
    assert experts_of("sglang", device, over_ranks)[0] > 1.3 * experts_of("vllm", device, over_ranks)[0]


def test_a_reading_that_a_stack_names_is_read_off_near_kin_of_a_chip_without_tables() -> None:
    """SGLang's own table of Hopper widens weights first; the reading of OpenAI's kernels goes before it on H20, too."""
    assert "oaitriton" in experts_of("sglang", "h20_sxm")[1]
    assert "oaitriton" not in experts_of("sglang", "rtx_5090")[1]
