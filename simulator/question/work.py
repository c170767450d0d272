"""What is asked of the simulator: a training step, a prompt, a generated token or a whole generation."""

from __future__ import annotations

from dataclasses import dataclass

from ...datasets.loading import choice, number, whole
from ...models.intervals import COVERAGE as COVERAGE
from ..trace.workload import CACHES, load_text, parse_load

KINDS_OF_WORK = ("train", "prefill", "decode", "generate")
LONGEST_SEQUENCE = 4_000_000  # tokens: positions of more are not followed by value when a model is traced


class WorkloadError(ValueError):
    """A workload whose parts do not fit together. The message says which and how to mend it."""


@dataclass(frozen=True)
class Work:
    """What is asked: a training step, a prompt, a generated token or a whole generation.

    ``train`` uses ``micro_batch``, ``global_batch`` and ``seq_len``; without a ``global_batch`` it is as large as the
    layout needs (:func:`..step.checks.filled`). The others use ``batch``, ``input_len`` and
    (``generate``) ``output_len``. ``decode`` is one step with ``input_len`` tokens in the cache. ``data_loading_ms`` is
    what a training step on a cluster waits for its batch.
    """

    kind: str = "train"
    seq_len: int = 2048
    micro_batch: int = 1
    global_batch: int | None = None
    batch: int = 1
    input_len: int = 1024
    output_len: int = 128
    cache: str = "dynamic"
    expert_load: str = "balanced"
    data_loading_ms: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS_OF_WORK:
            raise WorkloadError(f"workload={self.kind!r} does not exist; choose from {', '.join(KINDS_OF_WORK)}")
        for name in ("seq_len", "micro_batch", "global_batch", "batch", "input_len", "output_len"):
            if name == "global_batch" and self.global_batch is None:
                continue
            whole(WorkloadError, f"workload.{name}", getattr(self, name), 1)
        length = self.input_len + (self.output_len if self.kind == "generate" else 0)
        for name, value in (("seq_len", self.seq_len), ("input_len", length)):
            if value > LONGEST_SEQUENCE:
                most = f"the {LONGEST_SEQUENCE:,} tokens of a sequence that are simulated"
                raise WorkloadError(f"workload.{name}={value} is more than {most}")
        number(WorkloadError, "workload.data_loading_ms", self.data_loading_ms)
        choice(WorkloadError, "workload.cache", self.cache, CACHES)
        object.__setattr__(self, "expert_load", load_text(self.expert_load))
        parse_load(self.expert_load)
        if self.kind == "train" and self.sequences % self.micro_batch:
            raise WorkloadError(
                f"workload.global_batch={self.global_batch} is no multiple of workload.micro_batch={self.micro_batch}"
            )

    @property
    def sequences(self) -> int:
        """Sequences of a training step; those of one micro-batch where no ``global_batch`` says how many."""
        return self.micro_batch if self.global_batch is None else self.global_batch


def tokens_of(work: Work) -> int:
    """Tokens that a workload processes (training, prefill) or produces (decode, generate)."""
    return {
        "train": work.sequences * work.seq_len,
        "prefill": work.batch * work.input_len,
        "decode": work.batch,
        "generate": work.batch * work.output_len,
    }[work.kind]
