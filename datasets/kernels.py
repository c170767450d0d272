"""What is known beforehand of the backends that the harness measures: package, chips, and kernels that a call launches.

The names are those of rows. :data:`KERNELS` tells operators that run one by one (``rope`` of torch: five kernels) from
kernels that a stack fuses; who chooses among rows, and who makes synthetic ones, reads it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .devices import Device
from .ops import KINDS, Op

KERNELS: Mapping[tuple[str, str], int] = {
    # torch: operators one by one, counted by dispatch (tests/harness/test_outline.py)
    ("rope", "torch"): 5,
    ("silu_mul", "torch"): 2,
    ("silu_mul_backward", "torch"): 3,
    ("quantize", "torch"): 7,
    ("mla_decode", "torch"): 3,
    ("cross_entropy", "torch"): 2,
    ("cross_entropy_backward", "torch"): 2,
    ("moe_route", "torch"): 4,  # vLLM's is one
    ("fused_moe", "torch"): 17,
    # packages: what their sources launch for one call
    ("fused_moe", "vllm:fused_experts"): 7,
    ("fused_moe", "sglang:fused_experts"): 7,
    ("fused_moe", "vllm:marlin"): 5,
    ("fused_moe", "flashinfer:cutlass"): 6,
    ("fused_moe", "flashinfer:trtllm"): 5,
    ("mla_decode", "vllm:flash_mla"): 2,
    ("mla_decode", "flash_mla:dense"): 2,
    ("mla_decode", "vllm:flash_attn_mla"): 2,
    ("mla_decode", "flashinfer:mla"): 2,
    ("attention_decode", "vllm:paged"): 2,
    ("attention_decode", "flash_attn:2"): 2,
    ("attention_decode", "flash_attn:3"): 3,
    ("attention_decode", "flashinfer:paged"): 2,
    ("rms_norm_backward", "transformer_engine:rmsnorm"): 2,
    ("attention_backward", "flash2"): 3,
    ("attention_backward", "flash_attn:2"): 3,
    ("attention_backward", "flash_attn:3"): 3,
    ("attention_backward", "transformer_engine:attention"): 3,
}
"""Kernels of one call by kind and backend, where they are more than one."""


@dataclass(frozen=True)
class ChipNeed:
    """What a backend runs on: compute capabilities from ``least``, of the major versions ``majors`` (empty: any)."""

    least: float = 0.0
    majors: tuple[int, ...] = ()

    def lacks(self, device: Device) -> str:
        """Why a device does not have it, or nothing."""
        if device.vendor != "nvidia":
            return "" if self == ChipNeed() else f"{device.name} is no GPU of NVIDIA's"
        if self.majors and int(device.sm) not in self.majors:
            return f"it runs on compute capability {' and '.join(f'{each}.x' for each in self.majors)}, not {device.sm}"
        return f"it needs compute capability {self.least} or later, not {device.sm}" if device.sm < self.least else ""


AMPERE, ADA, HOPPER, BLACKWELL = ChipNeed(8.0), ChipNeed(8.9), ChipNeed(9.0, (9,)), ChipNeed(10.0, (10,))
HOPPER_ON = ChipNeed(9.0, (9, 10))
CHIPS: Mapping[str, ChipNeed] = {
    "flash2": AMPERE,
    "cudnn": AMPERE,
    "tinygemm": AMPERE,
    "flash_attn:2": AMPERE,
    "flash_attn:3": HOPPER,
    "flashinfer:trtllm": BLACKWELL,
    "flashinfer:trtllm_mla": BLACKWELL,
    "flashinfer:trtllm_ragged": BLACKWELL,
    "flashinfer:cutlass": HOPPER_ON,
    "flashinfer": AMPERE,
    "vllm:flash_mla": HOPPER,
    "vllm:flash_attn_mla": HOPPER,
    "vllm:machete": HOPPER,
    "vllm:cutlass_scaled_mm": ADA,
    "vllm:scaled_fp4_quant": ChipNeed(10.0),
    "vllm": AMPERE,
    "sglang": AMPERE,
    "flash_mla": HOPPER,
    "symm_mem:multimem": HOPPER_ON,
    "deep_gemm": HOPPER_ON,
    "transformer_engine": AMPERE,
}
"""By backend, or by the package that it is of."""
FORMATS: Mapping[tuple[str, str], ChipNeed] = {
    ("cublas", "fp8_block"): HOPPER,  # ScaledBlas.cpp: scales of blocks in CUDA for SM90 alone
    ("flashinfer:cutlass", "fp8_block"): HOPPER,
    ("flashinfer:cutlass", "mxfp4a16"): HOPPER,
    ("flashinfer:cutlass", "nvfp4"): ChipNeed(10.0),
    ("transformer_engine:gemm", "fp8_block"): HOPPER,
}
"""Of backends that run a format on fewer chips than others."""
NARROW: Mapping[str, ChipNeed] = {
    **dict.fromkeys(("fp8", "fp8_e5m2", "fp8_block"), ADA),
    **dict.fromkeys(("mxfp8", "nvfp4", "mxfp4", "mxfp4a8"), ChipNeed(10.0)),
    **dict.fromkeys(("bf16", "w4a16", "mxfp4a16"), AMPERE),
}
"""Of formats whose products need units for them."""
GENERATED = (
    "flashinfer:trtllm",
    "flashinfer:trtllm_mla",
    "flashinfer:trtllm_ragged",
)  # for SM10x, the engines' first there
LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm", *GENERATED, "flashinfer", "deep_gemm", "flash_mla"),
    "sglang": ("sglang", *GENERATED, "flashinfer", "deep_gemm", "flash_attn:3", "flash_mla", "vllm"),
    "trtllm": (*GENERATED, "flashinfer", "deep_gemm", "vllm:flash_mla"),
    "torchtitan": ("cudnn",),  # sdpa_kernel's order of backends on Hopper and later (conf/stack)
    "megatron": ("transformer_engine",),
    "nemo": ("transformer_engine",),
}
"""By the start of a stack's name, whose kernels it launches beside torch's, the likeliest first."""
OF_TORCH = ("nccl", "gloo", "symm_mem", "triton")
"""Backends with a colon that are no package to install beside torch (which brings triton)."""
FUSED_ALONE = ("rope", "silu_mul", "silu_mul_backward", "quantize", "mla_decode", "fused_moe")
"""Kinds that are in a graph only where the stack runs them as one: their operators one by one are no answer."""


def package_of(backend: str) -> str:
    """The package of a backend; empty for what torch has itself."""
    name = backend.partition(":")[0]
    if name in OF_TORCH:
        return ""
    return {"flash_attn": "flash_attn_interface" if backend.endswith(":3") else "flash_attn"}.get(
        name, name if ":" in backend else ""
    )


def kernels(kind: str, backend: str) -> int:
    """How many kernels one call launches."""
    return KERNELS.get((kind, backend), 1)


def is_eager(kind: str, backend: str) -> bool:
    """Whether a backend is torch's operators one by one, of a kind that stacks fuse."""
    return kind in FUSED_ALONE and not package_of(backend) and kernels(kind, backend) > 1


def lacking(op: Op, backend: str, device: Device) -> str:
    """Why a device cannot run an op on a backend, or nothing."""
    needs = [CHIPS.get(backend) or CHIPS.get(package_of(backend)), FORMATS.get((backend, op.dtype))]
    if KINDS[op.kind].family in ("gemm", "moe", "attention"):
        if device.vendor == "nvidia":
            needs.append(NARROW.get(op.dtype))
        elif not device.supports(op.dtype):
            return f"{device.name} has no units for {op.dtype}"
    return next((why for need in needs if need is not None and (why := need.lacks(device))), "")


def libraries(stack: str) -> tuple[str, ...]:
    """Whose kernels a stack launches beside torch's; none where it is torch alone."""
    return next((each for name, each in LIBRARIES.items() if stack.startswith(name)), ())
