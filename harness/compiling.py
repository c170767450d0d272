"""Which kernels are compiled at their first call, which may take longer than any other of their calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plan import Case

# First words of backends that compile: FlashInfer and DeepGEMM by nvcc, the others by Triton or TorchInductor.
COMPILING = ("flashinfer", "deep_gemm", "triton", "inductor", "vllm", "sglang", "fla", "mamba_ssm")


def compiled_module(case: Case) -> tuple[Any, ...] | None:
    """What cases have in common that are compiled once: a kernel for formats and heads. None where nothing is."""
    if case.backend.partition(":")[0] not in COMPILING:
        return None
    heads = (getattr(case.op, name, 0) for name in ("head_dim", "v_head_dim"))
    return case.op.kind, case.backend, case.op.dtype, case.op.out_dtype, *heads
