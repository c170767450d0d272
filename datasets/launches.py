"""Who launches an op, and whose kernels: one table for what a campaign measures and for which rows answer.

:data:`FRAMEWORKS` has a row for each framework that does not run PyTorch's kernels alone; :func:`launches` reads it.
``harness/coverage.py`` measures for a step what stands there first, and :mod:`..models.choice` lets own rows of it
answer first. What each backend is stands in :mod:`.kernels`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .backends import DEFAULT_BACKEND, means
from .devices import Device
from .kernels import ChipNeed, is_eager, value_of
from .ops import KINDS, Op

SIXTEEN_BITS = ("bf16", "fp16", "fp32", "tf32")  # linear layers that engines leave to PyTorch
PYTORCH = ("cublas", "torch", "rowwise", "tinygemm")  # what PyTorch calls for a product, as the harness names it
NCCL = ("nccl", "gloo")
GRAPHS = ("nccl:graph", "nccl:registered")  # as engines call it while they decode
FUSED = ("inductor", "triton")  # one kernel, as compilers and engines make it
MIXERS = ("mamba_ssm", "fla", "causal_conv1d")  # whose kernels everybody takes
FLASH2 = ("flash2", "flash_attn:2", "sdpa", "efficient")
CUDNN = ("cudnn", "flash_attn:3", "sdpa", "flash_attn", "flash2", "efficient")
SDPA = ("sdpa", "flash2", "cudnn", "efficient")
GENERATED = ("flashinfer:trtllm", "flashinfer:trtllm_mla", "flashinfer:trtllm_ragged")  # for SM10x, engines' first

ANY_CHIP = ""
Names = tuple[str, ...]
"""Backends or packages, best first, as :func:`.backends.means` understands them."""


@dataclass(frozen=True)
class Framework:
    """Whose kernels a framework launches.

    ``packages`` for all that stands nowhere else; ``attention``, ``latent`` (MLA, where it differs), ``experts`` (fused
    ones), ``sums`` (an engine's own all-reduces of small tensors) and ``norm_sums`` (those with the norm in them) by
    architecture of the chip, :data:`ANY_CHIP` for all others; ``blocks`` for products in blocks of fp8 (empty: its
    packages). ``nearest`` are kernels of others that are measured where none of its own can be: alike, but not what it
    launches. ``chips`` are those that it runs an op of a kind and format on, where it has kernels for some alone.
    """

    packages: Names = ()
    attention: Mapping[str, Names] = field(default_factory=dict)
    latent: Mapping[str, Names] = field(default_factory=dict)
    experts: Mapping[str, Names] = field(default_factory=dict)
    sums: Mapping[str, Names] = field(default_factory=dict)
    norm_sums: Mapping[str, Names] = field(default_factory=dict)
    blocks: Names = ()
    nearest: Names = ()
    chips: Mapping[tuple[str, str], ChipNeed] = field(default_factory=dict)


ENGINE_EXPERTS = {"blackwell": ("flashinfer:trtllm", "flashinfer")}
FLASH3 = ("flash_attn:3", "vllm:flash_attn", "vllm:flash_attn_mla")  # on Hopper: of a prompt, and of latents
CUSTOM_SUM = "vllm:custom_all_reduce"  # vLLM's CustomAllreduce, which sgl-kernel has, too
BY_PEERS = ("flashinfer:trtllm_all_reduce_norm", "flashinfer:mnnvl_all_reduce_norm")
BY_MULTICAST = BY_PEERS[::-1]
NEW_CHIPS, OLD_CHIPS = ("hopper", "blackwell"), ("ada", "ampere")  # whose engines have latents by Triton
TRANSFORMER_ENGINE = Framework(
    ("transformer_engine", "flash_attn"), attention={ANY_CHIP: ("transformer_engine", *CUDNN)}
)

FRAMEWORKS: Mapping[str, Framework] = {
    "vllm": Framework(
        ("vllm", "flashinfer", "deep_gemm", "flash_mla"),
        attention={
            "hopper": ("vllm:flash_attn_mla", "vllm", "flash_attn:3", "flash_mla", "flashinfer"),
            "blackwell": (*GENERATED, "flashinfer", "vllm", "flash_mla"),
            ANY_CHIP: ("vllm", "flash_attn:2", "flashinfer"),
        },
        latent=dict.fromkeys(OLD_CHIPS, ("vllm", "flash_attn:2")),  # TRITON_MLA decodes (platforms/cuda.py)
        experts=ENGINE_EXPERTS,
        sums={  # flashinfer_all_reduce.py: by multicast where there is one, else by peers; others on no other chip
            **dict.fromkeys(NEW_CHIPS, ("flashinfer:mnnvl_all_reduce", CUSTOM_SUM)),
            ANY_CHIP: (CUSTOM_SUM,),
        },
        norm_sums=dict.fromkeys(NEW_CHIPS, BY_MULTICAST),
        blocks=("deep_gemm", "vllm", "triton"),
    ),
    "sglang": Framework(
        ("sglang", "flashinfer", "deep_gemm", "flash_mla"),
        attention={
            "hopper": ("sglang", *FLASH3, "flash_mla", "flashinfer"),
            "blackwell": ("sglang", *GENERATED, "flashinfer", "flash_mla"),
            ANY_CHIP: ("sglang", "flashinfer", "flash_mla"),
        },
        latent=dict.fromkeys(OLD_CHIPS, ("sglang",)),  # Triton's (docs/advanced_features/attention_backend.md)
        experts=ENGINE_EXPERTS,
        sums={ANY_CHIP: (CUSTOM_SUM,)},
        norm_sums={"hopper": BY_PEERS, "blackwell": BY_MULTICAST},  # _resolve_backend of flashinfer_comm_fusion.py
        blocks=("deep_gemm", "sglang", "triton"),
        nearest=("vllm",),  # sgl-kernel took many of vLLM's kernels over
    ),
    "trtllm": Framework(
        ("trtllm", "flashinfer", "deep_gemm"),
        attention={
            "hopper": ("trtllm", "flash_mla", "vllm:flash_mla"),  # cpp/tensorrt_llm/kernels/flashMLA
            "blackwell": ("trtllm", *GENERATED),
            ANY_CHIP: ("trtllm",),
        },
        experts=ENGINE_EXPERTS,
        sums=dict.fromkeys(NEW_CHIPS, ("trtllm", "flashinfer:trtllm_all_reduce")),
        norm_sums=dict.fromkeys(NEW_CHIPS, BY_PEERS),
        # FP8 Block Scales of its MOE_DEVELOPER_GUIDE.md: Cutlass on SM90 and SM120, others on SM100 and SM103
        chips={("fused_moe", "fp8_block"): ChipNeed(9.0, (9, 10, 12))},
        nearest=("flashinfer",),  # attention: fmha_v2 and XQA are its own (cpp/kernels, attn_backend TRTLLM)
    ),
    "megatron": TRANSFORMER_ENGINE,
    "nemo": TRANSFORMER_ENGINE,
    "torchtitan": Framework(attention={"hopper": CUDNN, "blackwell": CUDNN}),
}
"""By the start of a stack's name, the longest that fits. Sources: ``conf/stack``, ``sources.attention``."""


@dataclass(frozen=True)
class Caller:
    """Who launches an op: a stack on an architecture, or nobody in particular.

    ``norm`` says that it is about all-reduces with the norm in them, which other kernels run than those without.
    ``framework`` is the stack's id, ``engine`` the serving engine whose kernels it runs, ``collectives`` whose library
    sums, ``attention`` as :class:`..simulator.question.plan.Stack` has it. ``eager`` is None where nobody said.
    """

    framework: str = ""
    engine: str = ""
    collectives: str = ""
    attention: str = "fused"
    architecture: str = ""
    eager: bool | None = None
    norm: bool = False

    @property
    def known(self) -> Framework:
        """What is known of its framework, the engine's before the stack's own; an empty row of one that is unknown."""
        label = self.engine or self.framework
        names = [name for name in FRAMEWORKS if label.startswith(name)]
        return FRAMEWORKS[max(names, key=len)] if names else Framework()

    def of_chip(self, table: Mapping[str, Names]) -> Names:
        """The entry of a table by architecture that is for its chip."""
        return table.get(self.architecture) or table.get(ANY_CHIP, ())

    def admits(self, kind: str, backend: str) -> bool:
        """Whether a backend may answer at all: operators one by one do not where the caller fuses."""
        if value_of("norm", backend) != self.norm:
            return False
        return self.eager is not False or not is_eager(kind, backend)


ANYONE = Caller()


def launches(caller: Caller, kind: str, dtype: str) -> Names:
    """Whose kernels a caller launches for an op, best first."""
    family = KINDS[kind].family
    known, serves = caller.known, bool(caller.engine)
    packages = known.packages
    if family in ("collective", "expert_parallel"):
        if serves and kind == "all_reduce" and not caller.collectives:
            return (*caller.of_chip(known.norm_sums if caller.norm else known.sums), *packages, "symm_mem")
        return (*(GRAPHS if serves else ()), *NCCL, "deep_ep", *packages)
    if kind == "gemm":
        if serves:
            blocks = known.blocks if dtype == "fp8_block" else ()
            return PYTORCH[:2] if dtype in SIXTEEN_BITS else blocks or packages
        return (*packages, *PYTORCH)
    if family == "attention":
        return _attention(caller, kind)
    if serves and (family == "moe" or kind == "grouped_gemm"):
        return (*(caller.of_chip(known.experts) if kind == "fused_moe" else ()), *packages, *FUSED)
    plain = (*packages, *MIXERS, *FUSED, DEFAULT_BACKEND)
    return (DEFAULT_BACKEND, *MIXERS) if caller.eager else plain


def _attention(caller: Caller, kind: str) -> Names:
    """Whose attention a caller launches; a chooser of sparse keys is a kernel as any other."""
    if caller.engine:
        latent = caller.of_chip(caller.known.latent) if kind.startswith("mla") else ()
        return latent or caller.of_chip(caller.known.attention)
    compiled = (*FUSED, DEFAULT_BACKEND) if kind.startswith(("sparse", "mla")) else ()
    if caller.attention == "flash2":
        return (*FLASH2, *compiled)
    if caller.attention != "fused":  # older than any kernel that torch has
        return compiled
    return (*(caller.of_chip(caller.known.attention) or SDPA), *compiled)


def unable(caller: Caller, op: Op, device: Device) -> str:
    """Why a caller has no kernel for an op on a device, whatever others have; or nothing."""
    need = caller.known.chips.get((op.kind, op.dtype))
    return "" if need is None else need.lacks(device)


def place(caller: Caller, kind: str, dtype: str, backend: str) -> int | None:
    """The place of a backend among those that a caller launches for an op; None for another kernel.

    Whoever did not say who launches takes any single kernel, PyTorch's usual one first.
    """
    if (not caller.eager and is_eager(kind, backend)) or not caller.admits(kind, backend):
        return None
    labels = launches(caller, kind, dtype)
    nowhere = len(labels) if caller.eager is None else None
    return next((at for at, label in enumerate(labels) if means(label, backend)), nowhere)
