"""Who gives way where blocks are short and requests have priorities, as vLLM's scheduler chooses
(``--scheduling-policy priority``, ``v1/core/sched/scheduler.py``): of all that run the one of the lowest priority, of
equal ones the last that came, even where it is in the batch already.

Compiled with the loop (:mod:`.compiled`).
"""

from __future__ import annotations

from .blocks import grow
from .order import goes_before
from .queues import is_decoding, preempt, put, tokens_to_compute
from .rules import SchedulerRules
from .state import NONE, LoopState


def continue_by_priority(state: LoopState, rules: SchedulerRules, rank: int, batch: int, longest: int) -> int:
    """Tokens of all that run, in order of admission. Returns what is left of the budget for new ones: nothing where
    anybody was preempted."""
    budget, position, someone_gone = rules.max_tokens, 0, False
    while position < state.ranks[rank].count and budget > 0:
        slot = state.running[rank, position]
        tokens = min(tokens_to_compute(state, slot), budget)
        if longest > 0:
            tokens = min(tokens, longest)
        if tokens <= 0:
            position += 1
            continue
        stays = True
        while stays and not grow(state, rules, rank, slot, tokens_held(state, rules, slot, tokens)):
            victim = last_in_order(state, rank, batch)
            if victim == NONE:
                return 0
            other = state.running[rank, victim]
            budget += withdraw(state, rank, batch, other)
            preempt(state, rules, rank, victim, False)
            someone_gone, stays = True, other != slot
            if victim < position:
                position -= 1
        if stays:
            put(state, rules, rank, batch, slot, tokens)
            budget -= tokens
            position += 1
    return 0 if someone_gone else budget


def tokens_held(state: LoopState, rules: SchedulerRules, slot: int, tokens: int) -> int:
    """Tokens that a request has blocks for once so many more are computed, those guessed ahead included."""
    request = state.slots[slot]
    held = request.computed + tokens
    if rules.drafts > 0 and is_decoding(state, slot):
        return int(min(held + rules.drafts, request.input + request.output))
    return int(held)


def last_in_order(state: LoopState, rank: int, batch: int) -> int:
    """The place of the running request that goes last; NONE where all of them have tokens on their way."""
    last = NONE
    for position in range(state.ranks[rank].count):
        slot = state.running[rank, position]
        if state.slots[slot].waits and entry_of(state, batch, slot) == NONE:
            continue
        if last == NONE or goes_before(state, state.running[rank, last], slot):
            last = position
    return last


def entry_of(state: LoopState, batch: int, slot: int) -> int:
    """Where a request stands in a batch; NONE where it does not."""
    for entry in range(state.batches[batch].size):
        if state.entries[batch, entry] in (slot, -1 - slot):
            return entry
    return NONE


def withdraw(state: LoopState, rank: int, batch: int, slot: int) -> int:
    """Take a request out of a batch that is being formed; how many tokens it had there."""
    entry = entry_of(state, batch, slot)
    if entry == NONE:
        return 0
    request, sums = state.slots[slot], state.batches[batch]
    tokens = request.scheduled
    before = request.computed - tokens
    if tokens == 1 and before > 0 and request.made > 0:
        sums.decodes -= 1
        sums.decode_context -= before
    else:
        sums.prefill_tokens -= tokens
        sums.prefill_pairs -= tokens * (before + 0.5 * (tokens + 1))
        sums.prefill_context -= before
    if state.entries[batch, entry] >= 0:
        sums.samples -= 1
    sums.size -= 1
    for place in range(entry, sums.size):
        state.entries[batch, place] = state.entries[batch, place + 1]
    request.computed, request.waits = before, 0
    state.ranks[rank].work += tokens
    state.totals[0].computed_tokens -= tokens
    return int(tokens)
