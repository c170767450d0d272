"""Which measurement answers for an op: the one rule for rows of a store and for predictors, for steps and single ops.

1. Rows of this very device that opcast timed itself come first (*own*), of them the kernel that the caller launches.
2. Then tables of other labs: of the caller's own framework, else of any.
3. Own rows of another kernel for the same op come after tables of the caller's framework, before any other.
4. A form of several kernels (:mod:`..datasets.launches`) is what eager PyTorch runs: under a stack that fuses it never
   answers. For an op that nobody launches in particular (``opcast predict``) it is another kernel.

Outside of what own rows reach, a table is taken times what own rows are off it (:mod:`..simulator.engines.own`), and
up to :data:`.few_rows.ENOUGH_ROWS` rows are learned as a correction of the tables of their device where that is
better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..datasets.backends import DEFAULT_BACKEND, answers_anyone, means
from ..datasets.devices import RATE_OF
from ..datasets.launches import operators
from ..datasets.ops import KINDS
from .features import alike
from .labs import HARNESS

OWN = "own rows of the kernel that is launched"
BEYOND = "a table, times what own rows are off it"
OTHER = "own rows of another kernel"
TABLE = "a table of the kernel that is launched"
LIBRARY = "tables of PyTorch's own call"
ANY = "a table of the op"
ROW = "a row of another lab"
ALIKE = "another kind of op that is alike"
KIN = "tables of other devices"
NETWORK = "the network's formula"
LAW = "physics"
"""Clauses of the rule, as answers name them."""

OWN_ROWS = "own rows"  # the source of what was timed here; others go by the names of their labs
CORRECTED = f", corrected by {OWN_ROWS}"  # behind the name of a lab whose table they correct

SIXTEEN_BITS = ("bf16", "fp16", "fp32", "tf32")  # linear layers that engines leave to PyTorch
PYTORCH = ("cublas", "torch", "rowwise", "tinygemm")  # what PyTorch calls for a product, as the harness names it
NCCL = ("nccl", "gloo")
GRAPHS = ("nccl:graph", "nccl:registered")  # as engines call it while they decode
FUSED = ("inductor", "triton")  # one kernel, as compilers and engines make it
MIXERS = ("mamba_ssm", "fla", "causal_conv1d")  # whose kernels everybody takes
FLASH2 = ("flash2", "flash_attn:2", "sdpa", "efficient")
CUDNN = ("cudnn", "flash_attn:3", "sdpa", "flash_attn", "flash2", "efficient")
SDPA = ("sdpa", "flash2", "cudnn", "efficient")

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm", "flashinfer", "deep_gemm", "flash_mla"),
    "sglang": ("sglang", "sgl_kernel", "flashinfer", "deep_gemm", "flash_mla"),
    "trtllm": ("trtllm", "tensorrt_llm", "flashinfer", "deep_gemm"),
    "megatron": ("transformer_engine", "flash_attn"),
    "nemo": ("transformer_engine", "flash_attn"),
    "deepspeed_liger": ("liger",),
}
"""Packages whose kernels a framework launches, best first; of one that is not named, none but PyTorch's."""

ATTENTION: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("vllm", "hopper"): ("vllm:flash_attn_mla", "vllm", "flash_attn:3", "flash_mla", "flashinfer"),
    ("vllm", "blackwell"): ("flashinfer:trtllm_mla", "flashinfer", "vllm", "flash_mla"),
    ("vllm", ""): ("vllm", "flash_attn:2", "flashinfer"),
    ("sglang", "hopper"): ("sglang", "sgl_kernel", "flash_attn:3", "vllm:flash_attn_mla", "flash_mla", "flashinfer"),
    ("sglang", "blackwell"): ("sglang", "sgl_kernel", "flashinfer:trtllm_mla", "flashinfer", "flash_mla"),
    ("sglang", ""): ("sglang", "sgl_kernel", "flashinfer", "flash_mla"),
    ("trtllm", ""): ("trtllm", "tensorrt_llm", "flashinfer"),
    ("megatron", ""): ("transformer_engine", *CUDNN),
    ("nemo", ""): ("transformer_engine", *CUDNN),
    ("torchtitan", "hopper"): CUDNN,
    ("torchtitan", "blackwell"): CUDNN,
}
"""Whose attention a framework launches by architecture, best first (``conf/stack``, ``sources.attention``)."""


@dataclass(frozen=True)
class Caller:
    """Who launches an op: a stack on an architecture, or nobody in particular.

    ``framework`` is the stack's id, ``engine`` the serving engine whose kernels it runs, ``collectives`` whose library
    sums, ``attention`` as :class:`..simulator.question.plan.Stack` has it. ``eager`` is None where nobody said.
    """

    framework: str = ""
    engine: str = ""
    collectives: str = ""
    attention: str = "fused"
    architecture: str = ""
    eager: bool | None = None

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages whose kernels it launches, best first."""
        return _of(PACKAGES, self.engine or self.framework) or ()


ANYONE = Caller()


def launches(caller: Caller, kind: str, dtype: str) -> tuple[str, ...]:
    """Backends of own rows that are the kernel which a caller launches for an op, best first.

    Packages or whole names, as :func:`..datasets.backends.means` understands them.
    """
    family = KINDS[kind].family
    packages, serves = caller.packages, bool(caller.engine)
    if family in ("collective", "expert_parallel"):
        custom = serves and kind == "all_reduce" and not caller.collectives
        return (*packages, "symm_mem") if custom else (*(GRAPHS if serves else ()), *NCCL, "deep_ep", *packages)
    if kind == "gemm":
        if serves:
            return PYTORCH[:2] if dtype in SIXTEEN_BITS else packages
        return (*packages, *PYTORCH)
    if family == "attention":
        return _attention(caller, kind)
    if serves and (family == "moe" or kind == "grouped_gemm"):
        own = ("flashinfer", *packages) if caller.architecture == "blackwell" and kind == "fused_moe" else packages
        return (*own, *FUSED)
    plain = (*packages, *MIXERS, *FUSED, DEFAULT_BACKEND)
    return (DEFAULT_BACKEND, *MIXERS) if caller.eager else plain


def _attention(caller: Caller, kind: str) -> tuple[str, ...]:
    """Whose attention a caller launches; a chooser of sparse keys is a kernel as any other."""
    if caller.engine:
        return _by_architecture(caller.engine, caller.architecture)
    compiled = (*FUSED, DEFAULT_BACKEND) if kind.startswith(("sparse", "mla")) else ()
    if caller.attention == "flash2":
        return (*FLASH2, *compiled)
    if caller.attention != "fused":  # older than any kernel that torch has
        return compiled
    known = _by_architecture(caller.framework, caller.architecture) or SDPA
    return (*known, *compiled)


def _by_architecture(framework: str, architecture: str) -> tuple[str, ...]:
    names = {name for name, _ in ATTENTION}
    name = next((each for each in sorted(names, key=len, reverse=True) if framework.startswith(each)), "")
    return ATTENTION.get((name, architecture)) or ATTENTION.get((name, ""), ())


def _of(table: Mapping[str, tuple[str, ...]], framework: str) -> tuple[str, ...] | None:
    name = next((each for each in sorted(table, key=len, reverse=True) if framework.startswith(each)), None)
    return None if name is None else table[name]


def place(caller: Caller, kind: str, dtype: str, backend: str) -> int | None:
    """The place of a backend of own rows among those that a caller launches for an op; None for another kernel.

    Whoever did not say who launches takes any single kernel, PyTorch's usual one first.
    """
    if not caller.eager and operators(kind, backend) > 1:
        return None
    wanted = launches(caller, kind, dtype)
    nowhere = len(wanted) if caller.eager is None else None
    return next((at for at, each in enumerate(wanted) if means(each, backend)), nowhere)


def may_answer(caller: Caller, kind: str, backend: str) -> bool:
    """Whether a backend may answer at all: forms of several kernels do not where the caller fuses."""
    return caller.eager is not False or operators(kind, backend) == 1


def sources_of(card: Mapping[str, Any]) -> tuple[str, ...]:
    """Whose rows a predictor learned from, by its card."""
    return tuple(card.get("sources", {}).get("source", ()))


def is_own(sources: Sequence[str]) -> bool:
    """Whether rows with these sources were timed by opcast on the device itself; of none it is taken to be so."""
    return not sources or HARNESS in sources


def ranked(
    rows: Mapping[str, int], wanted: str | None, preferences: Sequence[str], kind: str = "", caller: Caller = ANYONE
) -> list[str]:
    """The backends that may answer, best first; ``rows`` says how many rows each has.

    With a wish those that it means, itself first; without one all that :func:`may_answer` admits, one kernel before
    several, ``torch`` first. Then the order of ``preferences`` (backends, versions or frameworks), then most rows, then
    the name.
    """
    first = DEFAULT_BACKEND if wanted is None else wanted
    known = [each for each in rows if (may_answer(caller, kind, each) if wanted is None else means(wanted, each))]

    def order(backend: str) -> tuple[bool, bool, bool, int, int, str]:
        at = next((at for at, each in enumerate(preferences) if means(each, backend)), len(preferences))
        parts = wanted is None and not caller.eager and operators(kind, backend) > 1
        return parts, backend != first, not means(first, backend), at, -rows[backend], backend

    return sorted(known, key=order)


def launched(rows: Mapping[str, int], preferences: Sequence[str], kind: str, dtype: str, caller: Caller) -> list[str]:
    """The backends of own rows that are what a caller launches for an op, best first; ``rows`` as in :func:`ranked`."""
    places = {each: place(caller, kind, dtype, each) for each in ranked(rows, None, preferences, kind, caller)}
    named = launches(caller, kind, dtype)  # itself before its variants: ``nccl`` before ``nccl:graph``
    known = [(at, each not in named, each) for each, at in places.items() if at is not None]
    return [each for *_, each in sorted(known, key=lambda item: item[:2])]


Card = Mapping[str, Any]


def matching(
    known: Sequence[str],
    card_of: Callable[[str], Card],
    wanted: str | None,
    dtype: str | None,
    preferences: Sequence[str],
    kind: str = "",
    caller: Caller = ANYONE,
) -> str | None:
    """Of backends with a predictor the one meant by ``wanted``: itself, or the best of a framework; None where none is.

    A format that none has learned is answered by those that know the units which it is computed on. Cards are asked
    for only where it takes them to choose.
    """
    if wanted is None:
        known = [each for each in known if may_answer(caller, kind, each)]
        known = [each for each in known if answers_anyone(each, dtype)] or known
    else:
        known = [each for each in known if means(wanted, each)]
    if wanted in known or len(known) < 2:
        return wanted if wanted in known else next(iter(known), None)
    cards = {backend: card_of(backend) for backend in known}
    formats = () if dtype is None else (dtype, *RATE_OF.get(dtype, ()))
    taught = ([backend for backend in known if has_learned(cards[backend], each)] for each in formats)
    seen = next(filter(None, taught), known)
    return ranked({backend: cards[backend].get("n", 0) for backend in seen}, wanted, preferences, kind, caller)[0]


def has_learned(card: Card, dtype: str) -> bool:
    """Whether a predictor has rows of a format; formats of 16 bits are alike to it."""
    return alike(dtype) in {alike(name) for name in card.get("dtypes", ())}
