"""What is run: one training step, one prompt, or one generated token."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ...datasets.loading import no_pattern, number, whole
from ...datasets.near import meant

KINDS = ("train", "prefill", "decode")
PRECISIONS = ("fp32", "bf16", "fp16")
CACHES = ("dynamic", "static")
OPTIMIZERS = ("adamw", "none")
ATTENTIONS = ("sdpa", "fused")
MAX_ZIPF_EXPONENT = 20  # exponent of zipf loads: beyond it all goes to the first experts
LOGITS = ("last", "all")
MAX_QUOTE_CHARS = 200  # characters of a value in a message
LORA_MODULES = "attn|attention"  # what the paper adapts, and MLPerf's benchmark
TOGETHER = {  # Linears that read one input and that frameworks run as one product, by fusion rule
    "qkv": r"\.(q|k|v|query|key|value)(_proj|_lin)?",
    "gate_up": r"\.(gate_proj|up_proj|w1|w3)",
}


class TraceError(ValueError):
    """A workload, model or call that cannot be traced. The message says what is wrong and what to do."""


@dataclass(frozen=True)
class Workload:
    """One step: ``batch`` sequences of ``seq_len`` tokens.

    ``kind``: ``train`` runs forward, loss, backward and optimizer on sequences of ``seq_len``; ``prefill`` runs a
    prompt of ``seq_len`` tokens and fills the cache; ``decode`` generates one token with ``seq_len`` tokens in
    the cache. ``cache`` is transformers' ``dynamic`` cache, which grows by copying, or its preallocated ``static``
    one. ``optimizer`` is ``adamw`` (torch's fused multi-tensor AdamW) or ``none``; ``accumulate`` adds to gradients
    that earlier micro-batches have left.

    ``attention``: ``sdpa`` takes the kernels that torch picks on a CPU, ``fused`` one fused kernel for every call,
    as accelerators have it (the CPU falls back to plain products when keys and values differ in width, or with
    dropout). ``experts`` names transformers' ``experts_implementation``; empty takes its default.
    ``expert_load`` says how routed tokens spread over experts: ``balanced``, ``zipf:1.0`` (the share of the e-th
    expert falls with e to that power), or shares by commas, as measured, one an expert. ``logits`` says which
    positions of a prompt get them: the ``last``, where the model can be told so, or ``all``.

    ``frozen`` is a pattern of names of weights that are not trained. With ``lora_rank`` no weight of the model is, but
    low-rank adapters beside Linears whose path matches ``lora_modules`` (:mod:`.adapters`), with ``lora_dropout`` on
    their input. Of ``lora_groups`` (names of ``TOGETHER``) one adapter stands beside all Linears.
    With ``mtp_layers`` it also learns to predict so many tokens further on (:mod:`.next_tokens`).
    ``images`` of each sequence are part of its tokens (:mod:`.vision`), with ``image_px`` pixels a side (0: usual).
    ``kbit`` is how peft prepares a model whose frozen weights are stored in few bits (:mod:`.kbit`).
    """

    kind: str
    batch: int = 1
    seq_len: int = 1024
    cache: str = "dynamic"
    optimizer: str = "adamw"
    accumulate: bool = False
    attention: str = "sdpa"
    experts: str = ""
    expert_load: str = "balanced"
    logits: str = "last"
    frozen: str = ""
    lora_rank: int = 0
    lora_modules: str = LORA_MODULES
    lora_dropout: float = 0.0
    lora_groups: tuple[str, ...] = ()
    mtp_layers: int = 0
    kbit: bool = False
    images: int = 0
    image_px: int = 0

    def __post_init__(self) -> None:
        choose("workload", self.kind, KINDS)
        choose("cache", self.cache, CACHES)
        choose("optimizer", self.optimizer, OPTIMIZERS)
        choose("attention", self.attention, ATTENTIONS)
        choose("logits", self.logits, LOGITS)
        whole(TraceError, "batch", self.batch, 1)
        whole(TraceError, "seq_len", self.seq_len, 1)
        if self.kind == "train" and self.seq_len < 2:
            raise TraceError("seq_len=1 leaves no next token to train on: take at least 2")
        parse_load(self.expert_load)
        check_trained(self)
        whole(TraceError, "mtp_layers", self.mtp_layers, 0)
        whole(TraceError, "images", self.images, 0)
        whole(TraceError, "image_px", self.image_px, 0)

    @property
    def training(self) -> bool:
        return self.kind == "train"

    @property
    def trains_part(self) -> bool:
        """Whether weights of the model are left as they are."""
        return self.training and bool(self.frozen or self.lora_rank)

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return self.batch * (1 if self.kind == "decode" else self.seq_len)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def check_trained(workload: Any, name: str = "") -> None:
    """TraceError for a rank or dropout that is none, and patterns that cannot be read. ``name`` goes before it."""
    whole(TraceError, f"{name}lora_rank", workload.lora_rank, 0)
    if number(TraceError, f"{name}lora_dropout", workload.lora_dropout) >= 1:
        raise TraceError(f"{name}lora_dropout={workload.lora_dropout:g} leaves nothing of an input: take less than 1")
    if workload.lora_dropout and not workload.lora_rank:
        raise TraceError(f"{name}lora_dropout={workload.lora_dropout:g} is of adapters: say {name}lora_rank, too")
    for setting, pattern in (("frozen", workload.frozen), ("lora_modules", workload.lora_modules)):
        if wrong := no_pattern(pattern):
            raise TraceError(f"{name}{setting}={str(pattern)[:MAX_QUOTE_CHARS]!r} {wrong}")


def choose(what: str, value: str, choices: tuple[str, ...]) -> str:
    """The value itself; TraceError names the known ones, the nearest first."""
    if value in choices:
        return value
    raise TraceError(f"{what}={value!r} is not one of {', '.join(choices)}{meant(value, choices)}")


def load_text(value: Any) -> str:
    """An expert load as its text; a list is shares."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def parse_load(text: str) -> tuple[str, tuple[float, ...]]:
    """``("balanced", ())``, ``("zipf", (exponent,))``, ``("power_law", (exponent,))`` or ``("shares", (…))``.

    TraceError for anything else.
    """
    name, _, value = text.partition(":")
    try:
        if name == "balanced" and not value:
            return "balanced", ()
        if name in ("zipf", "power_law") and 0 <= float(value) <= MAX_ZIPF_EXPONENT:
            return name, (float(value),)
        shares = tuple(float(share) for share in text.split(","))
        if len(shares) > 1 and min(shares) >= 0 and 0 < sum(shares) < float("inf"):
            return "shares", shares
    except ValueError:
        pass
    raise TraceError(
        f"expert_load={text!r} is neither balanced, zipf:EXPONENT (0 to {MAX_ZIPF_EXPONENT}), power_law:EXPONENT "
        "nor shares, one an expert, such as [0.5,0.3,0.2]"
    )


def traced_load(text: str) -> str:
    """The load that a graph is traced with: a power law acts on the fused kernel of experts alone, which has it in its
    own data."""
    return "balanced" if parse_load(text)[0] == "power_law" else text


def skew_of(text: str) -> int:
    """The exponent of a power law of expert loads in hundredths, as fused kernels of experts have it; else 0."""
    name, numbers = parse_load(text or "balanced")
    return round(100 * numbers[0]) if name == "power_law" else 0
