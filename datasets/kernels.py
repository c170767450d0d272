"""What is known beforehand of the backends that the harness measures: package, chips, and kernels that a call launches.

One row a backend in :data:`BACKENDS`, by the names that rows of a store have; a row without a colon speaks for all
kernels of a package. The kinds of ops that a backend runs are those of its builders (``harness/cases``). Whose kernels
a stack launches is :mod:`.launches`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .devices import Device
from .ops import KINDS, Op


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
            return (
                f"it runs on compute capability {' and '.join(f'{major}.x' for major in self.majors)}, not {device.sm}"
            )
        return f"it needs compute capability {self.least} or later, not {device.sm}" if device.sm < self.least else ""


@dataclass(frozen=True)
class Backend:
    """A backend, or all kernels of a package.

    ``chips`` is what it runs on (None: what its package runs on), ``formats`` has formats that it runs on fewer chips.
    ``kernels`` says how many kernels one call launches by kind of op, where more than one. ``eager`` says the same of
    kinds that it runs as torch's operators one by one: what eager PyTorch runs, and no stack that fuses. ``package`` is
    imported for it (None: the first word of a name with a colon; empty: torch has it).
    """

    chips: ChipNeed | None = None
    formats: Mapping[str, ChipNeed] = field(default_factory=dict)
    kernels: Mapping[str, int] = field(default_factory=dict)
    eager: Mapping[str, int] = field(default_factory=dict)
    package: str | None = None


AMPERE, ADA, HOPPER, BLACKWELL = ChipNeed(8.0), ChipNeed(8.9), ChipNeed(9.0, (9,)), ChipNeed(10.0, (10,))
HOPPER_ON, FP4, ADA_ALONE = ChipNeed(9.0, (9, 10)), ChipNeed(10.0), ChipNeed(8.9, (8,))
FLASHINFER_SUMS = tuple(f"flashinfer:{family}_all_reduce" for family in ("trtllm", "mnnvl"))
NORM_SUMS = tuple(f"{name}_norm" for name in FLASHINFER_SUMS)  # with the residual's add and the norm in the kernel
MANY = 16  # kernels of forms whose number depends on the op: one or more for each expert or chunk
DECODING = {"attention_decode": 2}  # splits of the keys, and their sum
TRAINING = {"attention_backward": 3}  # one kernel, and two small ones around it

BACKENDS: Mapping[str, Backend] = {
    # torch: operators one by one are counted by dispatch (tests/harness/test_outline.py, test_launches.py)
    "torch": Backend(
        eager={
            "rope": 5,
            "silu_mul": 2,
            "silu_mul_backward": 3,
            "quantize": 7,
            "cross_entropy": 2,
            "cross_entropy_backward": 2,
            "causal_conv1d": 3,
            "causal_conv1d_backward": 3,
            "mla_decode": 3,
            "sparse_index_prefill": 6,
            "sparse_index_decode": 6,
            "sparse_attention_prefill": 10,
            "sparse_attention_decode": 8,
            "sparse_attention_backward": 10,
            "linear_attention_prefill": MANY,
            "linear_attention_backward": MANY,
            "linear_attention_decode": 9,
            "moe_route": 4,
            "moe_permute": 3,  # of the way back; the way there is one
            "fused_moe": 13,
        }
    ),
    "autograd": Backend(eager={"rms_norm_backward": 2}),
    "math": Backend(eager={"attention_prefill": MANY, "attention_decode": 10, "attention_backward": 11}),
    "loop": Backend(eager={"grouped_gemm": MANY, "adamw": 9}),
    "foreach": Backend(eager={"adamw": 9}),
    "cublas": Backend(formats={"fp8_block": HOPPER}),  # ScaledBlas.cpp: scales of blocks in CUDA for SM90 alone
    "tinygemm": Backend(AMPERE),
    "flash2": Backend(AMPERE, kernels=TRAINING),
    "cudnn": Backend(AMPERE),
    # what torch brings, though its names have colons
    "triton": Backend(package=""),
    "triton:block_scaled_mm": Backend(ChipNeed(8.9, (8, 12))),  # where no stack has another kernel for these blocks
    "nccl": Backend(package=""),
    "gloo": Backend(package=""),
    "symm_mem": Backend(package=""),
    "symm_mem:multimem": Backend(HOPPER_ON),
    # packages: kernels of one call as their sources launch them
    "vllm": Backend(AMPERE),
    "vllm:fused_experts": Backend(kernels={"fused_moe": 7}),
    "vllm:marlin": Backend(kernels={"fused_moe": 5}),
    "vllm:paged": Backend(kernels=DECODING),
    "vllm:flash_mla": Backend(HOPPER, kernels={"mla_decode": 2}),
    "vllm:flash_attn_mla": Backend(HOPPER, kernels={"mla_decode": 2}),
    "vllm:machete": Backend(HOPPER),
    "vllm:cutlass_scaled_mm": Backend(ADA, {"fp8_block": ChipNeed(9.0)}),
    "vllm:w8a8_triton_block_scaled_mm": Backend(ADA_ALONE),
    "vllm:scaled_fp4_quant": Backend(FP4),
    "sglang": Backend(AMPERE),
    "sglang:fused_experts": Backend(kernels={"fused_moe": 7}),
    "sglang:w8a8_block_fp8_matmul_triton": Backend(ADA_ALONE),
    "flash_attn:2": Backend(AMPERE, kernels=DECODING | TRAINING),
    "flash_attn:3": Backend(HOPPER, kernels={"attention_decode": 3} | TRAINING, package="flash_attn_interface"),
    "flashinfer": Backend(AMPERE),
    "flashinfer:cutlass": Backend(
        ChipNeed(8.9, (8, 9, 10, 12)),  # modules of FlashInfer's jit/fused_moe.py: sm89, sm90, sm100, sm103, sm120
        {"fp8_block": HOPPER, "mxfp4a16": HOPPER, "nvfp4": FP4},
        kernels={"fused_moe": 6},
    ),
    "flashinfer:trtllm": Backend(BLACKWELL, kernels={"fused_moe": 5}),
    **dict.fromkeys((*FLASHINFER_SUMS, *NORM_SUMS), Backend(HOPPER_ON)),  # where engines launch them
    "flashinfer:trtllm_mla": Backend(BLACKWELL),
    "flashinfer:trtllm_ragged": Backend(BLACKWELL),
    "flashinfer:mla": Backend(kernels={"mla_decode": 2}),
    "flashinfer:paged": Backend(kernels=DECODING),
    "flash_mla": Backend(HOPPER),
    "flash_mla:dense": Backend(kernels={"mla_decode": 2}),
    "deep_gemm": Backend(ChipNeed(9.0, (9, 10, 12))),
    "deep_gemm:experts": Backend(kernels={"fused_moe": 10}),
    "deep_ep": Backend(package="deep_ep"),
    "transformer_engine": Backend(AMPERE),
    "transformer_engine:gemm": Backend(formats={"fp8_block": HOPPER}),
    "transformer_engine:rmsnorm": Backend(kernels={"rms_norm_backward": 2}),
    "transformer_engine:attention": Backend(kernels=TRAINING),
    "transformer_engine:permute": Backend(kernels={"moe_permute": 4}),  # of the way there; the way back is one
}
"""By name. A backend that has no row runs on any chip, one kernel a call."""
NARROW: Mapping[str, ChipNeed] = {
    **dict.fromkeys(("fp8", "fp8_e5m2", "fp8_block"), ADA),
    **dict.fromkeys(("mxfp8", "nvfp4", "mxfp4", "mxfp4a8"), FP4),
    **dict.fromkeys(("bf16", "w4a16", "mxfp4a16"), AMPERE),
}
"""Of formats whose products need units for them."""


def _rows(backend: str) -> list[Backend]:
    """A backend's row and that of its package, as far as there are such."""
    names = dict.fromkeys((backend, backend.partition(":")[0]))
    return [BACKENDS[name] for name in names if name in BACKENDS]


def package_of(backend: str) -> str:
    """The package of a backend; empty for what torch has itself."""
    packages = (row.package for row in _rows(backend) if row.package is not None)
    first, colon, _ = backend.partition(":")
    return next(packages, first if colon else "")


def kernels(kind: str, backend: str) -> int:
    """How many kernels one call launches."""
    row = BACKENDS.get(backend, Backend())
    return row.kernels.get(kind) or row.eager.get(kind, 1)


def is_eager(kind: str, backend: str) -> bool:
    """Whether a backend runs a kind as torch's operators one by one."""
    return kind in BACKENDS.get(backend, Backend()).eager


def value_of(dim: str, backend: str) -> int:
    """Which value of a dimension (:attr:`.vocabulary.Dim.of_backend`) a backend runs. KeyError for another one."""
    return int({"norm": backend in NORM_SUMS}[dim])


def other_form(op: Op, backend: str) -> str:
    """Why an op is not the form of its kind that a backend runs, or nothing."""
    for dim in KINDS[op.kind].dims:
        if dim.of_backend and getattr(op, dim.name) != (runs := value_of(dim.name, backend)):
            return f"{backend} runs {op.kind} with {dim.name}={dim.choices[runs]} alone"
    return ""


def lacking(op: Op, backend: str, device: Device) -> str:
    """Why a device cannot run an op on a backend, or nothing."""
    if why := other_form(op, backend):
        return why
    rows = _rows(backend)
    needs = [next((row.chips for row in rows if row.chips is not None), None)]
    needs.append(BACKENDS.get(backend, Backend()).formats.get(op.dtype))
    if KINDS[op.kind].family in ("gemm", "moe", "attention"):
        if device.vendor == "nvidia":
            needs.append(NARROW.get(op.dtype))
        elif not device.supports(op.dtype):
            return f"{device.name} has no units for {op.dtype}"
    return next((why for need in needs if need is not None and (why := need.lacks(device))), "")
