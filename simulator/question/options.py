"""Settings of passes that few need, ``options={name: value}``: each with its default, what it may be and what it means.

docs/passes.md has them as a table (:func:`table`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ...datasets.dtypes import BITS
from ...datasets.loading import no_pattern
from ...datasets.near import meant

ALL_TO_ALL = "all_to_all"
ADAPTER_EXCHANGES = ("gather", ALL_TO_ALL)
EP_MODES = ("normal", "low_latency", "alltoall", "replicated", "gathered")
KV_FORMATS = ("fp8", "int8")
ATTENTION_FORMATS = ("fp8",)
ALLOCATORS = ("native", "expandable")
# What changes a kernel's time (:mod:`..timing.modifiers`), as `options.without` names it.
TIME_MODIFIERS = (
    *("cold_caches", "host_issue", "older_products", "power_limit", "older_attention", "ring_steps", "older_rings"),
    *("draw", "calibration", "shard_copies", "collective_checks", "prompt_issue"),
)
WHOLE, LIGER = "whole", "liger"  # ways to compute a loss
LONGEST_QUOTE = 200  # characters of a value in a message


def _number(value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return "" if number and value >= 0 else "must be a number of at least 0"


def _share(value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "" if number and 0 < value <= 1 else "must be a share of the tokens, above 0 and at most 1"


def _lengths(value: Any) -> str:
    valid = isinstance(value, (list, tuple)) and all(type(length) is int and length > 0 for length in value)
    return "" if valid else "must be a list of tokens, such as [8192,4096,4096]"


def _flag(value: Any) -> str:
    return "" if isinstance(value, bool) else "must be true or false"


def _one_of(*choices: str) -> Callable[[Any], str]:
    return lambda value: (
        "" if value == "" or value in choices else f"is not one of {', '.join(choices)}{meant(value, choices)}"
    )


def _modifiers(value: Any) -> str:
    names = isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)
    unknown = [name for name in value if name not in TIME_MODIFIERS] if names else []
    if unknown:
        return f"has {unknown[0]}, which is none of {', '.join(TIME_MODIFIERS)}{meant(unknown[0], TIME_MODIFIERS)}"
    return "" if names else "must be a list of names, such as [power_limit]"


def loss_wrong(value: Any) -> str:
    """What is wrong with a way to compute the loss (:mod:`..passes.chunked_loss`), empty if nothing is."""
    chunks = re.fullmatch(r"chunks:([1-9]\d{0,4})", value) if isinstance(value, str) else None
    return "" if chunks or value in ("", WHOLE, LIGER) else f"is none of {WHOLE}, {LIGER}, chunks:8 (or another number)"


def _load(value: Any) -> str:
    from ..trace.workload import load_text, parse_load

    if value != "":
        parse_load(load_text(value))
    return ""


def option(default: Any, check: Callable[[Any], str], means: str, of: str = "") -> Any:
    """A field of :class:`PlanOptions`: what says what is wrong with a value, its help, the only work that has it."""
    return field(default=default, metadata={"check": check, "help": means, "of": of})


@dataclass(frozen=True)
class PlanOptions:
    """Every option with what it is when nobody gives it. None leaves it to the framework or the layout."""

    allocator: str = option(
        "",
        _one_of(*ALLOCATORS),
        "`native` or `expandable`: memory is replayed through torch's caching allocator, in place of the "
        "stack's usual slack",
    )
    attention_dtype: str = option(
        "",
        _one_of(*ATTENTION_FORMATS),
        "training: `fp8`, attention over queries, keys and values that are rounded for it (Transformer "
        "Engine's `fp8_dpa`)",
        of="training",
    )
    capacity: float = option(
        0.0,
        _number,
        "every expert takes so many times the mean number of tokens, no more and no less",
    )
    cuda_graph: bool | None = option(
        None,
        _flag,
        "true: no kernel waits for the host; false: each does. In place of the stack's own `cuda_graph`",
    )
    dispatch_dtype: str = option(
        "",
        _one_of(*BITS),
        "what tokens are sent to experts in, such as `fp8`",
    )
    ep_mode: str = option(
        "",
        _one_of(*EP_MODES),
        "how experts' tokens are exchanged: `normal`, `low_latency`, `alltoall`, `replicated` (tensor ranks"
        " hold the same tokens: no exchange, one all-reduce), `gathered` (all ranks gather all tokens, and"
        " reduce-scatter what experts say)",
    )
    ep_overlap: bool = option(
        False,
        _flag,
        "training: exchanges between experts run beside another micro-batch's computing",
        of="training",
    )
    expert_load: str | Sequence[float] = option(
        "",
        _load,
        "in place of `workload.expert_load`, for the passes alone",
    )
    flat_parameters: bool = option(
        False,
        _flag,
        "training with ZeRO 3: FSDP1's flat parameters, used where they were gathered, without FSDP2's copies",
        of="training",
    )
    fp8_params: bool = option(
        False,
        _flag,
        "training: frozen weights lie in memory in the 8 bits that products read, not in 16 (Transformer Engine's "
        "`fp8_model_init`, LoRA recipes' `fp8_params`). Hopper and AMD turn each weight for the gradient of its input, "
        "once a micro-batch",
        of="training",
    )
    fp8_scaling: str = option(
        "",
        _one_of("delayed", "current", "rowwise"),
        "`delayed` (the usual), `current`: the maximum is found first, in a pass of its own, or `rowwise`: "
        "a scale a row, found as the row is rounded; tensor ranks then gather 16 bits and round what they "
        "have gathered",
        of="training",
    )
    gather_dtype: str = option(
        "",
        _one_of(*BITS),
        "training: what ZeRO 3 gathers weights in, and ZeRO 1 and 2 those that products read in few bits",
        of="training",
    )
    kv_dtype: str = option(
        "",
        _one_of("same", *KV_FORMATS),
        "inference: `same`, `fp8` or `int8` keys and values, as [`precision.kv_dtype`](clusters.md#keys-and-values)",
        of="inference",
    )
    loss: str = option(
        "",
        loss_wrong,
        "training: `whole`, `liger` or `chunks:8` (any number): [how much of the logits lives at a "
        "time](#the-loss-in-chunks). In place of the stack's own",
        of="training",
    )
    quantize_skip: str = option(
        "",
        no_pattern,
        "a regular expression of modules, and layers, that stay in 16 bits",
    )
    real_tokens: float = option(
        1.0,
        _share,
        "inference: share of the batch that is no padding, which packed kernels leave out",
        of="inference",
    )
    recompute_early_stop: bool | None = option(
        None,
        _flag,
        "training: whether full recomputation ends with the last tensor that is read (torch's), or runs "
        "whole layers again (Megatron's). In place of the stack's own",
        of="training",
    )
    reduce_every_micro_batch: bool | None = option(
        None,
        _flag,
        "training with ZeRO 2 or 3: gradients are reduced after each micro-batch",
        of="training",
    )
    reshard_after_forward: bool | None = option(
        None,
        _flag,
        "training with ZeRO 3: gathered weights are let go of between forward and backward",
        of="training",
    )
    sampling: str = option(
        "",
        _one_of("top_p", "log_probs"),
        "inference: `top_p`, the next token is drawn from a sorted vocabulary, as FasterTransformer did; `log_probs`: "
        "by temperature alone with its log-prob, as trainers ask vLLM to",
        of="inference",
    )
    sequence_lengths: Sequence[int] = option(
        (),
        _lengths,
        "training and prompts: lengths of the sequences that a micro-batch is packed of, with "
        "`parallel.cp_style` `ring` or `dynamic`",
    )
    token_drop: bool = option(
        False,
        _flag,
        "tokens beyond a capacity of 1 are dropped",
    )
    without: Sequence[str] = option(
        (),
        _modifiers,
        "a list of what is left out of the [times of kernels](how-it-works.md#what-changes-a-kernels-time),"
        " such as `[power_limit,cold_caches]`",
    )
    zigzag: bool = option(
        True,
        _flag,
        "false: context ranks hold tokens in a row, and the last one has the most to do",
    )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> PlanOptions:
        """Those of a mapping that was checked; null is not given, and what a pass of one's own reads is left out."""
        return cls(**{name: value for name, value in settings.items() if name in CHECKS and value is not None})


CHECKS: dict[str, Callable[[Any], str]] = {each.name: each.metadata["check"] for each in fields(PlanOptions)}
OF_TRAINING, OF_INFERENCE = (
    frozenset(each.name for each in fields(PlanOptions) if each.metadata["of"] == work)
    for work in ("training", "inference")
)


def table() -> str:
    """The options as the table of docs/passes.md."""
    return "\n".join(
        [
            "| option | means |",
            "| --- | --- |",
            *(f"| `{e.name}` | {e.metadata['help']} |" for e in fields(PlanOptions)),
        ]
    )


def complaint(name: str, value: Any) -> str:
    """What is wrong with the value of an option, empty if nothing is. Null is as if it were not given."""
    wrong = "" if value is None or name not in CHECKS else CHECKS[name](value)
    return f"options.{name}={shortened(value)} {wrong}" if wrong else ""


def shortened(value: Any) -> str:
    """A value as a message quotes it."""
    text = repr(value)
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"
