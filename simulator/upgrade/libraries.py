"""Which libraries a step's kernels are of, which of them a change touches, and how far releases moved them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ...datasets.kernels import BACKENDS, package_of
from ...datasets.launches import Caller, launches
from ...datasets.loading import load
from ...datasets.ops import KINDS, Op
from ...datasets.reading import read_yaml
from ..question.canonical import RequestError

FILE = Path(__file__).resolve().parents[2] / "conf" / "release_moves.yaml"
OTHER = "other"
TORCH = "torch"
OF_TORCH = {"cublas": "cublas", "cudnn": "cudnn", "triton": "triton", "inductor": "triton", "nccl": "nccl"}
PACKAGES = tuple(sorted({package_of(name) or OF_TORCH.get(name, "") for name in BACKENDS} - {""}))
# torch's wheels pin these (Requires-Dist of torch 2.x: nvidia-cublas, nvidia-cudnn, nvidia-nccl, triton), and what
# engines need of torch, attention and communication they pin in turn (vllm's requirements/cuda.txt)
WITH_TORCH = (TORCH, "cublas", "cudnn", "nccl", "triton")
EVERYTHING = ("engine", "driver", "cuda")
OF_ROCM = {"cublas": "hipblaslt", "cudnn": "miopen", "nccl": "rccl"}  # what PyTorch calls in place of them on AMD GPUs
OF_ENGINES = ("gemm", "attention", "norm", "pointwise", "moe", "collective", "expert_parallel")
FAMILIES = {  # of ops that a package has kernels for; others have all that they stand for
    "transformer_engine": ("gemm", "attention", "norm", "moe", "optimizer"),
    "vllm": OF_ENGINES,
    "sglang": OF_ENGINES,
    "flash_attn": ("attention",),
    "flash_mla": ("attention",),
    "deep_gemm": ("gemm", "moe"),
    "deep_ep": ("expert_parallel",),
    "flashinfer": ("gemm", "attention", "norm", "moe", "collective"),
}
# Transformer Engine's products are cuBLASLt's (common/gemm/cublaslt_gemm.cu), its attention cuDNN's (common/fused_attn)
UNDERNEATH = {("transformer_engine", "gemm"): "cublas", ("transformer_engine", "attention"): "cudnn"}
CHANGES = tuple(dict.fromkeys((*EVERYTHING, *WITH_TORCH, *PACKAGES, *OF_ROCM.values())))


@dataclass(frozen=True)
class ReleaseMoves:
    """How far kernels of a family moved between releases: standard deviations of logarithms, in so many tables."""

    common: float
    within: float
    pairs: int


@lru_cache
def release_moves() -> Mapping[str, ReleaseMoves]:
    """By family of ops; :data:`OTHER` for those without a row."""
    values = read_yaml(FILE, RequestError)
    return {name: load(ReleaseMoves, row, RequestError, f"{FILE.name}: {name}") for name, row in values.items()}


def moves_of(kind: str) -> ReleaseMoves:
    """How far a kind moved."""
    family = KINDS[kind].family
    family = "collective" if family == "expert_parallel" else family
    return release_moves().get(family) or release_moves()[OTHER]


def library_of(op: Op, caller: Caller, vendor: str = "nvidia") -> str:
    """The library whose kernel a caller launches for an op: the first that has kernels of its family."""
    library = _library_of(op, caller)
    return OF_ROCM.get(library, library) if vendor == "amd" else library


def _library_of(op: Op, caller: Caller) -> str:
    family = KINDS[op.kind].family
    for name in launches(caller, op.kind, op.dtype):
        base = name.partition(":")[0]
        library = package_of(name) or OF_TORCH.get(base) or (base if base in PACKAGES else TORCH)
        if family in FAMILIES.get(library, (family,)):
            return library
    return TORCH


def touched(library: str, kind: str, changes: Sequence[str]) -> bool:
    """Whether one of the changes brings another version of a library, or of what it calls for a kind."""
    libraries = (library, UNDERNEATH.get((library, KINDS[kind].family), library))
    with_torch = {*WITH_TORCH, *OF_ROCM.values()}
    return any(
        change in EVERYTHING or change in libraries or (change == TORCH and not with_torch.isdisjoint(libraries))
        for change in changes
    )
