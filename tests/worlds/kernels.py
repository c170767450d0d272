"""Which kernel runs an op: behind a backend of the harness, and in a framework.

Names are those of libraries; a world knows by them how implementations differ (:mod:`.laws`). What a framework launches is
read off its sources, as ``conf/stack`` quotes them; whether a campaign measures that very kernel is what is tested.
"""

from __future__ import annotations

from opcast.datasets.ops import KINDS, Op
from opcast.tests.worlds.chip import World

SDPA = {"flash": "flash2", "flash2": "flash2", "efficient": "efficient", "cudnn": "cudnn", "math": "efficient"}
BEHIND = {
    "cublas": "cublas",
    "torch": "aten",
    "rowwise": "rowwise",
    "flash2": "flash2",
    "cudnn": "cudnn",
    "efficient": "efficient",
    "flash_attn:2": "flash2",
    "flash_attn:3": "flash3",
    "flashinfer:paged": "flashinfer",
    "vllm:cutlass_scaled_mm": "cutlass",
    "vllm:fused_experts": "triton_experts",
    "deep_gemm:fp8": "deep_gemm",
}
ATTENTION = ("attention_prefill", "attention_decode", "attention_backward", "mla_prefill", "mla_decode")
OWN = {"torch": "aten", "torchtitan": "inductor", "megatron_core": "te", "vllm": "vllm", "sglang": "flashinfer", "trtllm": "trtllm"}
ENGINES = ("vllm", "sglang", "trtllm")


def kernel_behind(op: Op, backend: str, said: str | None) -> str:
    """The kernel of a backend of the harness; ``said``: what its builder says of SDPA's choice."""
    if backend == "sdpa":
        return SDPA.get(str(said), "flash2")
    if backend in ("vllm:paged", "vllm:mla"):
        return "flash3" if "flash_attn 3" in str(said) or backend == "vllm:mla" else "flash2"
    if backend in BEHIND:
        return BEHIND[backend]
    package, _, name = backend.partition(":")
    return package if KINDS[op.kind].collective is False or package != "nccl" else backend


def kernel_launched(world: World, stack: str, op: Op) -> str:
    """The kernel that a framework launches for an op."""
    family = KINDS[op.kind].family
    if family == "collective":
        small = stack in ("vllm", "sglang", "trtllm") and op.kind == "all_reduce" and op.size_bytes <= 2**23
        return "custom" if small else "nccl"
    if family == "expert_parallel":
        return "deep_ep" if stack in ENGINES else "nccl"
    if op.kind in ATTENTION:
        return _attention(world, stack, op)
    if op.kind == "gemm":
        return _product(stack, op)
    if op.kind == "grouped_gemm":
        return "deep_gemm" if op.dtype == "fp8_block" else "aten"
    if op.kind == "fused_moe":
        return {"trtllm": "trtllm"}.get(stack, "triton_experts")
    return OWN[stack]


def _attention(world: World, stack: str, op: Op) -> str:
    new = world.name != "slow_pcie"  # Hopper's generation and later
    if stack == "torch":
        return "flash2"
    if stack in ("torchtitan", "megatron_core"):
        return "cudnn" if new else "flash2"
    if stack == "trtllm":
        return "trtllm"
    return "flash3" if new else "flash2"


def _product(stack: str, op: Op) -> str:
    if op.dtype == "fp8_block":
        return "deep_gemm" if stack in ENGINES else "cublas"
    if op.dtype == "fp8" and stack == "vllm":
        return "cutlass"
    if op.dtype == "fp8" and stack == "trtllm":
        return "trtllm"
    return "cublas"
