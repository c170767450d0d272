"""Who may come in: limits of a gateway over all replicas, and of the server of one.

- ``max_requests`` and ``max_prompt_tokens`` are vLLM's ``check_admission`` (``v1/engine/async_llm.py``, 0.33.0): a
  replica's requests that have not ended, and the whole prompts of those that have no first token yet.
- ``max_queue`` is SGLang's ``_abort_on_queued_limit`` (``scheduler.py``): where requests have priorities, one that
  waits and goes last is rejected in place of one that goes before it.
- ``rate`` and ``burst`` are a token bucket, as gateways have.

Compiled with the loop (:mod:`.compiled`).
"""

from __future__ import annotations

from .limits import PROMPTS, QUEUE, REQUESTS, WITHIN
from .order import goes_before
from .rules import ServingSetup, first_rank, ranks_of, replica_of
from .state import NONE, LoopState


def lets_in(state: LoopState, setup: ServingSetup) -> bool:
    """Whether the gateway lets a request in now."""
    totals = state.totals[0]
    filled = totals.bucket + (totals.now_us - totals.bucket_us) * setup.bucket_rate
    totals.bucket, totals.bucket_us = min(filled, setup.bucket_size), totals.now_us
    if totals.bucket < 1.0:
        return False
    totals.bucket -= 1.0
    return True


def server_limit(state: LoopState, setup: ServingSetup, rank: int) -> int:
    """The limit that keeps a request out of the replica of a rank; :data:`~.limits.WITHIN` where none does."""
    replica = replica_of(setup, rank)
    first = first_rank(setup, replica)
    requests, tokens = 0, 0
    for rank_at in range(first, first + ranks_of(setup, replica)):
        requests += state.ranks[rank_at].outstanding
        tokens += state.ranks[rank_at].prompt_tokens
    if 0 <= setup.most_requests <= requests:
        return REQUESTS
    if 0 <= setup.most_prompt_tokens <= tokens:
        return PROMPTS
    if 0 <= setup.most_queue <= state.ranks[rank].waiting:
        return QUEUE
    return WITHIN


def makes_room(state: LoopState, rank: int, slot: int) -> int:
    """The request that waits on a rank and is rejected in place of a new one: the last, where it never ran and has a
    lower priority; NONE where there is none."""
    last = state.ranks[rank].tail
    if not state.totals[0].ordered or last == NONE or state.slots[last].admitted_us >= 0.0:
        return NONE
    alike = state.slots[last].priority == state.slots[slot].priority
    return NONE if alike or not goes_before(state, slot, last) else int(last)
