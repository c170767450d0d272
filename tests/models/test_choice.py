"""Which measurement answers: the rule, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from opcast.datasets.launches import ANYONE, Caller, place
from opcast.models.choice import is_own, launched, matching, ranked

VLLM = Caller("vllm", "vllm", architecture="hopper", eager=False)
BLACKWELL = Caller("vllm", "vllm", architecture="blackwell", eager=False)
SGLANG = Caller("sglang", "sglang", architecture="hopper", eager=False)
TRTLLM = Caller("trtllm_2023", "trtllm", "nccl", architecture="ampere", eager=False)
TITAN = Caller("torchtitan", architecture="hopper", eager=False)
TITAN_2025 = Caller("torchtitan_2025", attention="flash2", architecture="hopper", eager=False)
MEGATRON = Caller("megatron_core", architecture="hopper", eager=False)
OLDER = Caller("llm_foundry", attention="flash1_triton", architecture="ampere", eager=False)
EAGER = Caller("torch", architecture="hopper", eager=True)


def best(caller: Caller, kind: str, dtype: str, backends: Sequence[str]) -> str | None:
    return next(iter(launched(dict.fromkeys(backends, 10), (), kind, dtype, caller)), None)


SUMS = (  # the last two with the norm in them
    *("nccl", "vllm:custom_all_reduce", "flashinfer:trtllm_all_reduce", "flashinfer:mnnvl_all_reduce"),
    *("flashinfer:trtllm_all_reduce_norm", "flashinfer:mnnvl_all_reduce_norm"),
)
CASES: Mapping[str, tuple[Caller, str, str, Sequence[str], str | None]] = {
    "PyTorch's product, by an engine": (VLLM, "gemm", "bf16", ["cublas", "vllm:cutlass_scaled_mm"], "cublas"),
    "PyTorch's product, by a trainer": (TITAN, "gemm", "fp8", ["cublas", "rowwise"], "cublas"),
    "an engine's own product": (VLLM, "gemm", "fp8", ["cublas", "vllm:cutlass_scaled_mm"], "vllm:cutlass_scaled_mm"),
    "no 8-bit product of PyTorch's in an engine": (SGLANG, "gemm", "fp8", ["cublas", "rowwise"], None),
    "blocks by DeepGEMM": (SGLANG, "gemm", "fp8_block", ["cublas", "deep_gemm:fp8"], "deep_gemm:fp8"),
    "blocks by DeepGEMM before CUTLASS": (
        VLLM,
        "gemm",
        "fp8_block",
        ["vllm:cutlass_scaled_mm", "deep_gemm:fp8"],
        "deep_gemm:fp8",
    ),
    "blocks on Ada": (
        Caller("vllm", "vllm", architecture="ada", eager=False),
        "gemm",
        "fp8_block",
        ["triton:block_scaled_mm", "vllm:w8a8_triton_block_scaled_mm"],
        "vllm:w8a8_triton_block_scaled_mm",
    ),
    "blocks on Ada without packages": (
        Caller("sglang", "sglang", architecture="ada", eager=False),
        "gemm",
        "fp8_block",
        ["triton:block_scaled_mm"],
        "triton:block_scaled_mm",
    ),
    "no triton in TensorRT-LLM": (
        Caller("trtllm", "trtllm", architecture="ada", eager=False),
        "gemm",
        "fp8_block",
        ["triton:block_scaled_mm"],
        None,
    ),
    "Transformer Engine's before PyTorch's": (
        MEGATRON,
        "gemm",
        "fp8",
        ["cublas", "transformer_engine:gemm"],
        "transformer_engine:gemm",
    ),
    "one kernel where a stack fuses": (MEGATRON, "rope", "bf16", ["torch", "triton:rope"], "triton:rope"),
    "what torch.compile makes": (TITAN, "cross_entropy", "bf16", ["torch", "inductor"], "inductor"),
    "the engine's own kernel": (
        VLLM,
        "silu_mul",
        "bf16",
        ["triton:silu_mul", "vllm:silu_and_mul"],
        "vllm:silu_and_mul",
    ),
    "never several kernels where a stack fuses": (TITAN, "quantize", "bf16", ["torch"], None),
    "several kernels where it runs eager": (EAGER, "quantize", "bf16", ["torch", "triton:quantize"], "torch"),
    "a kernel of torch's own is one": (VLLM, "rms_norm", "bf16", ["torch"], "torch"),
    "no decoding in parts": (VLLM, "mla_decode", "bf16", ["torch"], None),
    "FlashMLA": (VLLM, "mla_decode", "bf16", ["torch", "flash_mla:decode"], "flash_mla:decode"),
    "no attention of training in an engine": (VLLM, "attention_decode", "bf16", ["sdpa", "flash2", "cudnn"], None),
    "an engine's attention by architecture": (
        SGLANG,
        "attention_prefill",
        "bf16",
        ["flashinfer:paged", "flash_attn:3"],
        "flash_attn:3",
    ),
    "cuDNN's attention on Hopper": (TITAN, "attention_prefill", "bf16", ["sdpa", "flash2", "cudnn"], "cudnn"),
    "FlashAttention-2 where a stack says so": (TITAN_2025, "attention_prefill", "bf16", ["sdpa", "flash2"], "flash2"),
    "FlashAttention of before": (OLDER, "attention_prefill", "bf16", ["sdpa", "flash2"], None),
    "what torch picks": (EAGER, "attention_backward", "bf16", ["math", "efficient", "sdpa"], "sdpa"),
    "plain NCCL by a trainer": (MEGATRON, "all_reduce", "bf16", ["nccl"], "nccl"),
    "no plain NCCL in place of a custom all-reduce": (VLLM, "all_reduce", "bf16", ["nccl"], None),
    "the custom one": (VLLM, "all_reduce", "bf16", ["nccl", "vllm:custom_all_reduce"], "vllm:custom_all_reduce"),
    "sums with the norm behind them": (replace(VLLM, norm=True), "all_reduce", "bf16", SUMS, SUMS[-1]),
    "by the memory of peers": (replace(SGLANG, norm=True), "all_reduce", "bf16", SUMS, SUMS[-2]),
    "sums without the norm": (VLLM, "all_reduce", "bf16", SUMS, "flashinfer:mnnvl_all_reduce"),
    "SGLang's without the norm": (SGLANG, "all_reduce", "bf16", SUMS, "vllm:custom_all_reduce"),
    "no sum alone in place of both": (replace(VLLM, norm=True), "all_reduce", "bf16", SUMS[:-2], None),
    "no norm in place of a sum alone": (SGLANG, "all_reduce", "bf16", SUMS[-2:], None),
    "no norm where nobody asked for one": (ANYONE, "all_reduce", "bf16", SUMS[-2:], None),
    "SGLang's, which is vLLM's": (
        SGLANG,
        "all_reduce",
        "bf16",
        ["vllm:custom_all_reduce", "nccl"],
        "vllm:custom_all_reduce",
    ),
    "an engine that sums by NCCL": (TRTLLM, "all_reduce", "bf16", ["nccl"], "nccl"),
    "gathers of an engine are NCCL's": (VLLM, "all_gather", "bf16", ["nccl:inplace", "nccl"], "nccl"),
    "experts of an engine": (VLLM, "fused_moe", "fp8_block", ["torch", "vllm:fused_experts"], "vllm:fused_experts"),
    "experts of an engine on Blackwell": (
        BLACKWELL,
        "fused_moe",
        "fp8_block",
        ["vllm:fused_experts", "flashinfer:trtllm"],
        "flashinfer:trtllm",
    ),
    "FlashAttention's MLA on Hopper": (
        VLLM,
        "mla_decode",
        "bf16",
        ["flash_mla:dense", "vllm:flash_mla", "vllm:flash_attn_mla"],
        "vllm:flash_attn_mla",
    ),
    "kernels made for Blackwell before others of FlashInfer": (
        BLACKWELL,
        "fused_moe",
        "fp8_block",
        ["flashinfer:cutlass", "flashinfer:trtllm"],
        "flashinfer:trtllm",
    ),
    "TensorRT-LLM's FlashMLA on Hopper": (
        Caller("trtllm", "trtllm", architecture="hopper", eager=False),
        "mla_decode",
        "bf16",
        ["flashinfer:mla", "vllm:flash_mla"],
        "vllm:flash_mla",
    ),
    "gathers in graphs by an engine": (VLLM, "all_gather", "bf16", ["nccl", "nccl:graph"], "nccl:graph"),
    "experts one by one are no grouped product": (MEGATRON, "grouped_gemm", "bf16", ["loop", "torch"], "torch"),
    "nobody said who launches": (ANYONE, "rope", "bf16", ["torch", "triton:rope"], "triton:rope"),
    "and several kernels are another kernel": (ANYONE, "rope", "bf16", ["torch"], None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_that_is_launched_answers(name: str) -> None:
    caller, kind, dtype, backends, wanted = CASES[name]
    assert best(caller, kind, dtype, backends) == wanted
    assert best(caller, kind, dtype, backends[::-1]) == wanted


def test_a_form_of_several_kernels_stands_behind_one_and_under_a_stack_that_fuses_nowhere() -> None:
    rows = {"torch": 100, "triton:rope": 1}
    assert ranked(rows, None, (), "rope") == ["triton:rope", "torch"]
    assert ranked(rows, None, (), "rope", EAGER) == ["torch", "triton:rope"]
    assert ranked(rows, None, (), "rope", TITAN) == ["triton:rope"]
    assert ranked(rows, "torch", (), "rope", TITAN) == ["torch"]  # whoever names one gets it
    assert not TITAN.admits("mla_decode", "torch")
    assert place(TITAN, "mla_decode", "bf16", "torch") is None


def test_preferences_and_rows_decide_between_backends_of_one_place() -> None:
    rows = {"vllm-0.24.0:linear": 1, "vllm-0.24.0:marlin": 2, "trtllm:cublas": 3}
    assert launched(rows, (), "gemm", "bf16", ANYONE)[0] == "trtllm:cublas"
    assert launched(rows, ("vllm",), "gemm", "bf16", ANYONE)[0] == "vllm-0.24.0:marlin"


def test_a_wide_format_that_nobody_timed_is_answered_by_sixteen_bits() -> None:
    """FP8 kernels have more rows, but do not run fp64 and TF32; 8 bits that nobody timed are theirs."""
    cards = {
        "vllm-1:cutlass_fp8": {"dtypes": ["fp8"], "n": 300},
        "vllm-1:torch.linear": {"dtypes": ["bf16"], "n": 200},
        "sglang-1:torch.linear": {"dtypes": ["fp16"], "n": 100},
    }

    def chosen(dtype: str, label: str | None = None) -> str | None:
        return matching(list(cards), cards.__getitem__, label, dtype, (), "gemm")

    assert {chosen(dtype) for dtype in ("tf32", "fp64", "fp32", "bf16")} == {"vllm-1:torch.linear"}
    assert chosen("tf32", "vllm") == "vllm-1:torch.linear"
    assert chosen("int8") == chosen("fp8") == "vllm-1:cutlass_fp8"
    del cards["vllm-1:torch.linear"], cards["sglang-1:torch.linear"]
    assert chosen("fp64") == "vllm-1:cutlass_fp8"


def test_rows_are_own_where_opcast_timed_them_here() -> None:
    assert is_own(("harness",))
    assert is_own(())
    assert is_own(("harness", "site:elsewhere"))
    assert not is_own(("aiconfigurator",))
    assert not is_own(("site:elsewhere",))
