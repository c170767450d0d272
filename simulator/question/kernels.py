"""Which kernels an engine runs where the tables of its own name say nothing of them: what ``conf/stack`` names."""

from __future__ import annotations

from dataclasses import dataclass

from ...datasets.loading import check_fields, choice, number, whole
from ...datasets.ops import KINDS, KV_DTYPE
from .errors import PlanError


@dataclass(frozen=True)
class KernelChoice:
    """Whose reading answers for ops of a ``kind`` and format where a framework's own table timed another kernel.

    ``backend`` is ``framework:words``, words of the kernel's name. ``architecture`` empty: on all; ``sm`` is the one
    compute capability of it that is meant (0: any). ``least_tokens`` and ``most_tokens`` are the rows that it is for,
    ``most_ep`` the expert ranks (0: any, each), ``kv_dtype`` the format of the cache (empty: any). With ``unaligned``
    it is for experts whose hidden size is no multiple of it (0: any). ``without`` is
    ``quantize`` where that table timed the rounding of the input too and the framework does not run it: the time of its
    tables of that is taken off.
    """

    kind: str
    dtype: str
    backend: str
    source: str
    architecture: str = ""
    without: str = ""
    most_tokens: int = 0
    least_tokens: int = 0
    most_ep: int = 0
    unaligned: int = 0
    kv_dtype: str = ""
    sm: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "stack.kernels")
        choice(PlanError, "stack.kernels.kind", self.kind, tuple(KINDS))
        formats = KV_DTYPE.choices if "kv_dtype" in KINDS[self.kind].names else ()
        choice(PlanError, "stack.kernels.kv_dtype", self.kv_dtype, ("", *formats))
        choice(PlanError, "stack.kernels.without", self.without, ("", "quantize"))


@dataclass(frozen=True)
class MatVec:
    """A kernel of an engine's own for products with few rows, which waits for its weights.

    It reaches ``share`` of the memory's bandwidth for weights of ``bits``, scales included, on chips of ``vendor``
    (empty: any), up to ``most_rows`` rows; of several the nearest in bits answers. A product is ``launches`` kernels:
    2 where another one rounds what comes in.
    """

    bits: float
    share: float
    source: str
    vendor: str = ""
    most_rows: int = 1
    launches: int = 1

    def __post_init__(self) -> None:
        number(PlanError, "stack.mat_vecs.bits", self.bits, 1)
        if not 0 < number(PlanError, "stack.mat_vecs.share", self.share) <= 1:
            raise PlanError(f"stack.mat_vecs.share={self.share} must be a share of the bandwidth, at most 1")
        for name in ("most_rows", "launches"):
            whole(PlanError, f"stack.mat_vecs.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class Unpacking:
    """What an engine's kernels reach that unpack weights of few bits before they multiply.

    A ``share`` of the rate that the library has in 16 bits, on NVIDIA's GPUs of the compute capability ``sm`` (0: any):
    less than 1 by an instruction of older chips, more where they multiply in 8 bits. 1 where none is named.
    """

    share: float
    source: str
    sm: float = 0.0

    def __post_init__(self) -> None:
        number(PlanError, "stack.unpackings.sm", self.sm)
        if not number(PlanError, "stack.unpackings.share", self.share) > 0:
            raise PlanError(f"stack.unpackings.share={self.share} must be a share of a rate, above 0")


@dataclass(frozen=True)
class ReducedNorm:
    """All-reduces of tensor ranks in an inference engine that add the residual and normalise in the same kernel.

    They are those of ``ranks`` ranks on devices of the compute capability ``sm``, of at most ``most_mib`` and
    ``most_tokens`` tokens (0: any, each), and in models with experts alone where ``mixtures`` says so.
    """

    source: str
    sm: float = 0.0
    ranks: int = 0
    most_mib: float = 0.0
    most_tokens: int = 0
    mixtures: bool = False

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "stack.reduced_norms")
