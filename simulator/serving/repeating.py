"""Batches that repeat: while the same requests decode and nobody else can start, each iteration is the one before with
one more token in each cache.

Such iterations are counted without a look at their requests: their blocks are known by iteration, their tokens and
times are brought up to date when something else happens (:func:`catch_up`). All sums, blocks and times are the same, to
the last bit, as those of iterations that are formed one by one.
"""

from __future__ import annotations

from .blocks import blocks_for, caching, remember, take_blocks
from .queues import first_waiting
from .rules import (
    FASTER_TRANSFORMER,
    KV_AWARE,
    LIGHTLLM,
    OWN,
    OWN_ROUTER,
    SGLANG,
    TRTLLM,
    TRTLLM_MAX,
    SchedulerRules,
    ServingSetup,
    spare_blocks,
)
from .sglang import eased, poll
from .state import NONE, LoopState

FEWEST = 3  # iterations to come for which it pays


def can_repeat(state: LoopState, setup: ServingSetup, rules: SchedulerRules) -> bool:
    """Whether batches of a rank may be repeated at all: one is in flight at a time, its requests get one token each,
    and nobody but opcast's own functions looks at them. With cached prefixes no router may look at their blocks."""
    known = rules.policy != FASTER_TRANSFORMER and rules.policy != OWN and setup.router != OWN_ROUTER
    single = setup.stages == 1 and setup.decode_stages == 1 and rules.drafts == 0
    return known and single and not (caching(state) and setup.router == KV_AWARE)


def look_ahead(state: LoopState, rules: SchedulerRules, rank: int, batch: int, preempted: bool) -> None:
    """Note whether a batch that was just formed may come again: all that run decode, and who waits first, if anybody,
    was refused for a reason that lasts while the batch does."""
    own, sums = state.ranks[rank], state.batches[batch]
    own.again, own.refused = 0, first_waiting(state, rank)
    alone = sums.prefill_tokens == 0 and 0 < sums.size == own.count and sums.samples == sums.size
    if alone and not preempted and (own.refused == NONE or stays_refused(rules, own.count)):
        own.again = 1


def stays_refused(rules: SchedulerRules, count: int) -> bool:
    """Whether a request that found no place beside ``count`` others finds none until one of them ends: blocks only
    become fewer, and SGLang tries nobody until then. TensorRT-LLM's prompts may wait for each other alone."""
    if count >= rules.max_seqs or rules.policy == LIGHTLLM:
        return True
    together = rules.wait_iterations > 0 or rules.balance_iterations > 0
    trtllm = rules.policy == TRTLLM or rules.policy == TRTLLM_MAX
    return not (trtllm and together)


def repeat(state: LoopState, rules: SchedulerRules, rank: int, batch: int) -> bool:
    """Form the batch of a rank again, which has ended; False, with all requests up to date, where it must be formed
    anew."""
    own, sums = state.ranks[rank], state.batches[batch]
    if own.again == 0:
        return False
    if own.repeated == 0 and not begin(state, rules, rank, batch):
        return False
    need = int(state.growing[rank, own.repeated % rules.block_tokens])
    if own.left == 0 or own.free < need + spare_blocks(rules) or not undisturbed(state, rules, rank):
        catch_up(state, rules, rank, batch, 0)
        return False
    if rules.policy == LIGHTLLM:
        own.clock += 1
    elif rules.policy == SGLANG:
        own.clock += 1
        own.ratio = eased(rules, own.ratio)
    own.repeated += 1
    own.left -= 1
    own.free -= need
    own.peak = max(own.peak, rules.blocks - own.free)
    own.work -= sums.size
    sums.decode_context += sums.size
    state.totals[0].computed_tokens += sums.size
    return True


def undisturbed(state: LoopState, rules: SchedulerRules, rank: int) -> bool:
    """Whether the policy would admit nobody now."""
    own = state.ranks[rank]
    if rules.policy == LIGHTLLM:
        return own.clock < rules.prefill_every
    if rules.policy == SGLANG:
        poll(state, rules, rank)
    first = first_waiting(state, rank)
    return first == NONE or first == own.refused


def begin(state: LoopState, rules: SchedulerRules, rank: int, batch: int) -> bool:
    """Count how often a batch can come again before a request ends, and how many take a block in which iteration;
    False where that is too seldom."""
    own, size = state.ranks[rank], rules.block_tokens
    left = 1 << 60
    for entry in range(state.batches[batch].size):
        request = state.slots[state.entries[batch, entry]]
        left = min(left, request.output - request.made)
        room = request.blocks * size - request.computed
        if room >= size:  # blocks taken ahead: until they are full
            left = min(left, room)
    if left < FEWEST:
        own.again = 0
        return False
    state.growing[rank, :size] = 0
    for entry in range(state.batches[batch].size):
        request = state.slots[state.entries[batch, entry]]
        room = request.blocks * size - request.computed
        if room < size:
            state.growing[rank, room] += 1
    own.left, own.given_us = left, state.totals[0].now_us
    return True


def fill_blocks(state: LoopState, rules: SchedulerRules, rank: int, batch: int, formed: int) -> None:
    """Take and remember the blocks of a batch that was repeated ``formed`` times, in the order in which iterations
    formed one by one would."""
    size = rules.block_tokens
    for before in range(formed):
        for entry in range(state.batches[batch].size):
            slot = state.entries[batch, entry]
            request = state.slots[slot]
            tokens = request.computed + before
            if tokens == request.blocks * size:
                take_blocks(state, rank, slot, 1)
                request.blocks += 1
            if (tokens + 1) % size == 0:
                remember(state, rules, rank, slot, tokens, tokens + 1)


def catch_up(state: LoopState, rules: SchedulerRules, rank: int, batch: int, waits: int) -> None:
    """Bring the requests of a repeated batch up to date, whose last tokens are on their way (``waits`` 1) or given."""
    own = state.ranks[rank]
    formed = own.repeated
    if caching(state):
        fill_blocks(state, rules, rank, batch, formed)
    for entry in range(state.batches[batch].size):
        request = state.slots[state.entries[batch, entry]]
        request.computed += formed
        request.made += formed - waits
        request.waits = waits
        request.last_us = own.given_us
        request.blocks = max(request.blocks, blocks_for(request.computed, rules.block_tokens))
    own.again, own.repeated = 0, 0
