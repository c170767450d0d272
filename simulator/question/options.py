"""Settings of passes that few need, ``options={name: value}``: the one table of what there is and what each may be.

docs/passes.md says what each means.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from ...datasets.dtypes import BITS
from ...datasets.loading import no_pattern
from ...datasets.near import meant

EP_MODES = ("normal", "low_latency", "alltoall", "replicated")
KV_FORMATS = ("fp8", "int8")
ATTENTION_FORMATS = ("fp8",)
ALLOCATORS = ("native", "expandable")
WHOLE, LIGER = "whole", "liger"  # ways to compute a loss
LONGEST_QUOTE = 200  # characters of a value in a message


def _number(value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return "" if number and value >= 0 else "must be a number of at least 0"


def _share(value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "" if number and 0 < value <= 1 else "must be a share of the tokens, above 0 and at most 1"


def _lengths(value: Any) -> str:
    whole = isinstance(value, (list, tuple)) and all(type(each) is int and each > 0 for each in value)
    return "" if whole else "must be a list of tokens, such as [8192,4096,4096]"


def _flag(value: Any) -> str:
    return "" if isinstance(value, bool) else "must be true or false"


def _one_of(*known: str) -> Callable[[Any], str]:
    return lambda value: (
        "" if value == "" or value in known else f"is not one of {', '.join(known)}{meant(value, known)}"
    )


def loss_wrong(value: Any) -> str:
    """What is wrong with a way to compute the loss (:mod:`..passes.chunked_loss`), empty if nothing is."""
    chunks = re.fullmatch(r"chunks:([1-9]\d{0,4})", value) if isinstance(value, str) else None
    return "" if chunks or value in ("", WHOLE, LIGER) else f"is none of {WHOLE}, {LIGER}, chunks:8 (or another number)"


def _load(value: Any) -> str:
    from ..trace.workload import load_text, parse_load

    if value != "":
        parse_load(load_text(value))
    return ""


CHECKS: dict[str, Callable[[Any], str]] = {
    "allocator": _one_of(*ALLOCATORS),
    "attention_dtype": _one_of(*ATTENTION_FORMATS),
    "capacity": _number,
    "cuda_graph": _flag,
    "dispatch_dtype": _one_of(*BITS),
    "ep_mode": _one_of(*EP_MODES),
    "ep_overlap": _flag,
    "expert_load": _load,
    "flat_parameters": _flag,
    "fp8_scaling": _one_of("delayed", "current", "rowwise"),
    "gather_dtype": _one_of(*BITS),
    "kv_dtype": _one_of("same", *KV_FORMATS),
    "loss": loss_wrong,
    "quantize_skip": no_pattern,
    "real_tokens": _share,
    "recompute_early_stop": _flag,
    "reduce_every_micro_batch": _flag,
    "reshard_after_forward": _flag,
    "sampling": _one_of("top_p"),
    "sequence_lengths": _lengths,
    "token_drop": _flag,
    "zigzag": _flag,
}

OF_TRAINING = frozenset(
    {
        *("attention_dtype", "ep_overlap", "flat_parameters", "fp8_scaling", "gather_dtype", "loss"),
        *("recompute_early_stop", "reduce_every_micro_batch", "reshard_after_forward"),
    }
)
OF_INFERENCE = frozenset({"kv_dtype", "real_tokens", "sampling"})


def complaint(name: str, value: Any) -> str:
    """What is wrong with the value of an option, empty if nothing is. Null is as if it were not given."""
    wrong = "" if value is None or name not in CHECKS else CHECKS[name](value)
    return f"options.{name}={shortened(value)} {wrong}" if wrong else ""


def shortened(value: Any) -> str:
    """A value as a message quotes it."""
    text = repr(value)
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"
