"""Which kernel runs an op: behind a backend of the harness, and in a framework.

Names are those of libraries; a world knows by them how implementations differ (:mod:`.laws`). What a framework
launches is read off its sources, as ``conf/stack`` quotes them; whether a campaign measures that very kernel is what
is tested.
"""

from __future__ import annotations

from opcast.datasets.ops import KINDS, Op
from opcast.tests.worlds.chip import World

SDPA = {"flash": "flash2", "flash2": "flash2", "efficient": "efficient", "cudnn": "cudnn", "math": "efficient"}
BEHIND = {
    "cublas": "cublas",
    "torch": "aten",
    "vllm:custom_all_reduce": "custom",
    "flash_attn:2": "flash2",
    "flash_attn:3": "flash3",
    "vllm:cutlass_scaled_mm": "cutlass",
    "vllm:w8a8_triton_block_scaled_mm": "triton_blocks",
    "sglang:w8a8_block_fp8_matmul_triton": "triton_blocks",
    "deep_gemm:experts": "deep_gemm",
    "vllm:fused_experts": "triton_experts",
    "sglang:fused_experts": "triton_experts",
    "vllm:marlin": "marlin",
    "vllm:machete": "machete",
    "flashinfer:cutlass": "cutlass",
    "vllm:flash_mla": "flash_mla",
    "flash_mla:dense": "flash_mla",
    "transformer_engine:gemm": "cublas",
    "transformer_engine:grouped_gemm": "cublas",
}
FLASH = ("vllm:paged", "vllm:flash_attn", "vllm:flash_attn_mla")  # vLLM's build: 3 on Hopper, else 2
ATTENTION = ("attention_prefill", "attention_decode", "attention_backward", "mla_prefill", "mla_decode")
OWN = {
    "torch": "aten",
    "torchtitan": "inductor",
    "megatron_core": "transformer_engine",
    "vllm": "vllm",
    "sglang": "flashinfer",
    "trtllm": "trtllm",
}
LARGEST_IN_GRAPH = 2**24  # bytes of a sum: larger batches than those of decoding are issued one by one
ENGINES = ("vllm", "sglang", "trtllm")


def kernel_behind(world: World, op: Op, backend: str, said: str | None) -> str:
    """The kernel of a backend of the harness; ``said``: what its builder says of SDPA's choice.

    TransformerEngine's attention is the very call that Megatron-Core makes, and chooses as it does there.
    """
    if backend == "transformer_engine:attention":
        return _attention(world, "megatron_core", op)
    if backend == "sdpa":
        return SDPA.get(str(said), "flash2")
    if backend in FLASH:
        return "flash2" if "flash_attn 2" in str(said) else "flash3"
    if backend.startswith("flashinfer:") and KINDS[op.kind].collective:
        return "custom"  # one law for the kernels of engines, which read the memory of their peers
    if backend.startswith("flashinfer:trtllm"):
        return "trtllm"
    return BEHIND.get(backend) or (backend if KINDS[op.kind].collective else backend.partition(":")[0])


def kernel_launched(world: World, stack: str, op: Op) -> str:
    """The kernel that a framework launches for an op."""
    family = KINDS[op.kind].family
    if family == "collective":
        return _reduction(world, stack, op)
    if family == "expert_parallel":
        return "deep_ep" if stack in ENGINES else "nccl"
    if op.kind in ATTENTION:
        return _attention(world, stack, op)
    if op.kind == "gemm":
        return _product(world, stack, op)
    if op.kind == "grouped_gemm":
        return "deep_gemm" if op.dtype == "fp8_block" else "aten"
    if op.kind == "fused_moe":
        return _experts(stack, op)
    return OWN[stack]


def _experts(stack: str, op: Op) -> str:
    if stack == "trtllm":
        return "cutlass"
    return "marlin" if op.dtype in ("mxfp4a16", "w4a16") else "triton_experts"


def _reduction(world: World, stack: str, op: Op) -> str:
    """Engines have a kernel of their own for small sums between GPUs that NVLink joins, and NCCL for all others."""
    if stack not in ENGINES:
        return "nccl"
    one_node = op.ranks <= op.ranks_per_node and world.cluster.link == "nvlink"
    if op.kind == "all_reduce" and op.size_bytes <= 2**23 and one_node:
        return "custom"
    return "nccl:graph" if op.size_bytes <= LARGEST_IN_GRAPH else "nccl"


def _attention(world: World, stack: str, op: Op) -> str:
    new = world.device.sm >= 9.0
    if stack == "torch":
        return "flash2"
    if stack in ("torchtitan", "megatron_core"):
        return "cudnn" if new else "flash2"
    if stack == "trtllm":
        return "trtllm"
    if new:
        return "flash3"
    if op.kind == "mla_decode" or (op.kind == "mla_prefill" and stack == "sglang"):
        return "triton"  # no backend of the harness is that
    return "flash2" if stack == "vllm" else "flashinfer"


def _product(world: World, stack: str, op: Op) -> str:
    if op.dtype == "fp8_block":
        older = "cutlass" if stack == "trtllm" else "triton_blocks"  # before Hopper
        return ("deep_gemm" if world.device.sm >= 9.0 else older) if stack in ENGINES else "cublas"
    if op.dtype == "fp8" and stack == "vllm":
        return "cutlass"
    if op.dtype == "fp8" and stack == "trtllm":
        return "trtllm"
    return "cublas"
