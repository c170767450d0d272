"""What an engine does at its start about sequences that do not fit: it stops, or serves shorter ones.

- vLLM stops where one sequence of ``max_model_len`` does not fit into its KV memory (``_check_enough_kv_cache_memory``
  of ``v1/core/kv_cache_utils.py``), unless that is ``auto``, and where an iteration has fewer tokens than a sequence
  without chunked prefill, or than there are sequences (``SchedulerConfig.verify_max_model_len``).
- Sequences longer than the model's own they refuse, too, unless told otherwise.
- SGLang starts, and a request has at most what fits (``max_req_len`` of ``TpModelWorker``); TensorRT-LLM shortens
  ``max_seq_len``.
"""

from __future__ import annotations

from ..question.serving import AUTO, Scheduler
from ..trace.context import NO_LIMIT
from .engines import ServingEngine
from .kv import KvBudget, KvError


def longest_served(engine: ServingEngine, scheduler: Scheduler, kv: KvBudget, model_len: int) -> tuple[int, str]:
    """The most tokens of a sequence once an engine has started, and what to say where that is less than was asked for.

    ``model_len`` is the model's context. KvError, with the largest length that starts, where the engine would not.
    """
    stated = scheduler.max_model_len
    length = stated if isinstance(stated, int) else model_len
    check_iteration(engine, scheduler, length)
    if length <= kv.longest or length == NO_LIMIT:
        return length, beyond_model(engine, length, model_len)
    if engine.too_long.stops and stated != AUTO:
        raise KvError(
            f"{engine.id} would not start: a sequence of max_model_len={length:,} does not fit into its KV memory of "
            f"{kv.longest:,} tokens; the largest that starts is {engine.too_long.argument} {kv.longest}, or take more "
            "GPUs, fewer bits or a larger fraction"
        )
    if engine.too_long.stops:
        way = f"start {engine.id} with {engine.too_long.argument} {kv.longest} at most, or it stops"
    else:
        way = f"{engine.id} serves none that is longer"
    whose = f"of max_model_len={length:,}" if isinstance(stated, int) else f"of the model's {length:,} tokens"
    return kv.longest, f"a sequence {whose} does not fit into the KV memory of {kv.longest:,} tokens: {way}"


def beyond_model(engine: ServingEngine, length: int, model_len: int) -> str:
    """What to say of sequences longer than the model's own."""
    if length <= model_len or not engine.too_long.beyond_model:
        return ""
    return (
        f"max_model_len={length:,} is more than the model's {model_len:,} tokens: {engine.id} starts so with positions "
        f"stretched by its configuration, or with {engine.too_long.beyond_model}"
    )


def check_iteration(engine: ServingEngine, scheduler: Scheduler, longest: int) -> None:
    """KvError where an engine that stops finds less room in an iteration than it must have."""
    tokens = scheduler.max_tokens
    if not engine.too_long.stops or tokens is None:
        return
    if scheduler.chunked_prefill is False and tokens < longest and scheduler.max_model_len != AUTO:
        raise KvError(
            f"{engine.id} would not start: without chunked prefill an iteration of max_tokens={tokens:,} is shorter "
            f"than max_model_len={longest:,}; the largest that starts is {engine.too_long.argument} {tokens}, or take "
            "more tokens"
        )
    if scheduler.max_seqs is not None and tokens < scheduler.max_seqs:
        raise KvError(
            f"{engine.id} would not start: max_tokens={tokens:,} of an iteration is less than "
            f"max_seqs={scheduler.max_seqs:,}; take max_seqs={tokens} at most, or more tokens"
        )
