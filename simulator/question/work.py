"""What is asked of the simulator: a training step, a prompt, a token, a whole generation or a served batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...datasets.loading import choice, nearest, number, whole
from ...models.intervals import COVERAGE as COVERAGE
from ..trace.workload import CACHES, LORA_MODULES, check_trained, load_text, parse_load
from .declaration import setting
from .iteration import Iteration, pairs_of

KINDS_OF_WORK = ("train", "prefill", "decode", "generate", "batch")
TRAINED, BATCHED, INFERRED = ("train",), ("batch",), ("prefill", "decode", "generate")  # who reads a setting
WITH_IMAGES = ("train", "prefill", "generate")
# Of trained routers: aiconfigurator times experts under this power law and takes it for all of its answers
TRAINED_ROUTING = "power_law:1.2"
LONGEST_SEQUENCE = 4_000_000  # tokens: positions of more are not followed by value when a model is traced


class WorkloadError(ValueError):
    """A workload whose parts do not fit together. The message says which and how to mend it."""


@dataclass(frozen=True)
class Work:
    """What is asked: a training step, a prompt, a generated token, a whole generation or one iteration of an engine.

    ``train`` uses ``micro_batch``, ``global_batch`` and ``seq_len``; without a ``global_batch`` it is as large as the
    layout needs (:func:`..step.checks.filled`). The others use ``batch``, ``input_len`` and
    (``generate``) ``output_len``. ``decode`` is one step with ``input_len`` tokens in the cache. ``batch`` is one pass
    over ``prompts`` (new and cached tokens of each chunk) and ``decodes`` (sequences and their cached tokens), of which
    ``samples`` yield a token, on ``padded_tokens`` (:class:`.iteration.Iteration`). ``data_loading_ms`` is what a
    training step on a cluster waits for its batch. ``frozen``, those of ``lora_`` and ``mtp_layers`` say
    what it trains (:class:`..trace.workload.Workload`). ``images`` go before the text of each sequence, in addition to
    its tokens, with ``image_px`` pixels a side (0: as the model has them).
    """

    kind: str = setting("train", "train | prefill | decode | generate | batch", name="workload", chosen=True)
    seq_len: int = setting(2048, of=TRAINED)
    micro_batch: int = setting(1, of=TRAINED)
    global_batch: int | None = setting(
        None, "null fills the layout: a micro-batch for each data rank, under a pipeline 4 for each stage", of=TRAINED
    )
    batch: int = setting(1, of=INFERRED)
    input_len: int = setting(1024, of=INFERRED)
    output_len: int = setting(128, of=("generate",))
    cache: str = setting(
        "", "dynamic | static: of keys and values; empty: static of a batch, else dynamic", of=(*BATCHED, *INFERRED)
    )
    expert_load: str = setting(
        "",
        "tokens of experts: balanced | zipf:EXPONENT | power_law:EXPONENT (how rare busy experts are: loads are most "
        "uneven near 2) | shares, one an expert; empty: balanced in training, power_law:1.2 in inference, as routers "
        "are once they are trained",
    )
    data_loading_ms: float = setting(0.0, "what a step on a cluster waits for its batch", of=TRAINED)
    frozen: str = setting("", "a pattern of names of weights that are not trained", of=TRAINED)
    lora_rank: int = setting(
        0, "above 0: adapters of this rank are trained, and nothing else (docs/passes.md)", of=TRAINED
    )
    lora_modules: str = setting(
        LORA_MODULES, "a pattern of the paths of Linears that adapters stand beside", of=TRAINED
    )
    lora_dropout: float = setting(0.0, "share of their input that adapters drop (docs/passes.md)", of=TRAINED)
    mtp_layers: int = setting(
        0, "layers of multi-token prediction that are trained beside the model (docs/passes.md)", of=TRAINED
    )
    images: int = setting(0, "before the text of each sequence, beside its tokens (docs/passes.md)", of=WITH_IMAGES)
    image_px: int = setting(0, "pixels a side; 0: as the model has them, 1024 where it takes any", of=WITH_IMAGES)
    prompts: tuple[tuple[int, int], ...] = setting(
        (), "[[new tokens, tokens cached before], …] of each chunk", of=BATCHED
    )
    decodes: tuple[tuple[int, int], ...] = setting((), "[[sequences, cached tokens of each], …]", of=BATCHED)
    samples: int | None = setting(None, "sequences that yield a token; null: all", of=BATCHED)
    padded_tokens: int | None = setting(
        None, "tokens of the CUDA graph that the batch is padded to; null: as many as there are", of=BATCHED
    )

    def __post_init__(self) -> None:
        if self.kind not in KINDS_OF_WORK:
            raise WorkloadError(
                f"workload={self.kind!r} does not exist; {nearest(self.kind, KINDS_OF_WORK, 'choose from')}"
            )
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
        object.__setattr__(self, "cache", self.cache or ("static" if self.kind == "batch" else "dynamic"))
        choice(WorkloadError, "workload.cache", self.cache, CACHES)
        object.__setattr__(self, "expert_load", load_text(self.expert_load))
        parse_load(self.routing)
        check_trained(self, "workload.")
        whole(WorkloadError, "workload.mtp_layers", self.mtp_layers, 0)
        self._check_images()
        self._check_batch()
        if self.kind == "train" and self.sequences % self.micro_batch:
            raise WorkloadError(
                f"workload.global_batch={self.global_batch} is no multiple of workload.micro_batch={self.micro_batch}"
            )

    def _check_images(self) -> None:
        """WorkloadError for images where no prompt or sequence begins with them."""
        for name in ("images", "image_px"):
            whole(WorkloadError, f"workload.{name}", getattr(self, name), 0)
        if self.image_px and not self.images:
            raise WorkloadError(f"workload.image_px={self.image_px} is the size of images: say workload.images, too")
        if self.images and self.kind in ("decode", "batch"):
            where = "workload.input_len" if self.kind == "decode" else "workload.prompts"
            raise WorkloadError(
                f"workload.images is of prompts: for workload={self.kind} count their tokens in {where}"
            )

    def _check_batch(self) -> None:
        """WorkloadError for a batch of nothing, or one that cannot be."""
        for name, least in (("prompts", (1, 0)), ("decodes", (1, 0))):
            object.__setattr__(self, name, pairs_of(WorkloadError, f"workload.{name}", getattr(self, name), least))
        if self.kind != "batch":
            return
        if not self.prompts and not self.decodes:
            raise WorkloadError(
                "workload=batch has no sequence: give workload.prompts=[[new,cached],…] or "
                "workload.decodes=[[sequences,cached],…]"
            )
        if max(self.longest, self.iteration.tokens) > LONGEST_SEQUENCE:
            raise WorkloadError(f"a batch of more than {LONGEST_SEQUENCE:,} tokens is not simulated")
        sequences = len(self.prompts) + self.iteration.decoding
        if self.samples is not None and not 0 <= self.samples <= sequences:
            raise WorkloadError(f"workload.samples={self.samples} must be from 0 to the {sequences} sequences")
        if self.padded_tokens is not None:
            whole(WorkloadError, "workload.padded_tokens", self.padded_tokens, 1)
            if self.padded_tokens < (tokens := replace(self.iteration, padded=None).tokens):
                raise WorkloadError(
                    f"workload.padded_tokens={self.padded_tokens} is less than the {tokens} tokens given"
                )

    @property
    def routing(self) -> str:
        """How tokens spread over experts: as asked, else as usual for what is asked."""
        return self.expert_load or ("balanced" if self.kind in TRAINED else TRAINED_ROUTING)

    @property
    def iteration(self) -> Iteration:
        """The batch that an engine runs."""
        return Iteration(self.prompts, self.decodes, self.samples, self.padded_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: of a prompt, its answer and what is cached before."""
        if self.kind == "batch":
            return max([sum(prompt) for prompt in self.prompts] + [context + 1 for _, context in self.decodes])
        if self.kind == "train":
            return self.seq_len
        return self.input_len + {"prefill": 0, "decode": 1, "generate": self.output_len}[self.kind]

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
        "batch": work.iteration.decoding + work.iteration.prefill_tokens,
    }[work.kind]


def plainest(work: Work) -> Work:
    """The same work as a plainer question where it is one: a batch of equal prompts, or of decoding sequences alone.

    Decoding sequences have the mean context, rounded; padding decodes with an empty cache, so that the keys read stay
    as many.
    """
    if work.kind != "batch":
        return work
    batch = work.iteration
    none: dict[str, Any] = {"prompts": (), "decodes": (), "samples": None, "padded_tokens": None}
    if not work.prompts:
        context = max(round(batch.decode_context / batch.tokens), 1)
        return replace(work, kind="decode", batch=batch.tokens, input_len=context, **none)
    new = work.prompts[0][0]
    unpadded = batch.tokens == batch.prefill_tokens and batch.sampled == len(work.prompts)
    if not work.decodes and unpadded and set(work.prompts) == {(new, 0)}:
        return replace(work, kind="prefill", batch=len(work.prompts), input_len=new, **none)
    return work
