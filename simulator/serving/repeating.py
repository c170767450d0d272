"""Batches that repeat: while the same requests decode and nobody else can start, each iteration is the one before with
one more token in each cache.

Such iterations are counted without a look at their requests: their blocks are known by iteration, their tokens and
times are brought up to date when something else happens (:func:`catch_up`). All sums, blocks and times are the same, to
the last bit, as those of iterations that are formed one by one.
"""

from __future__ import annotations

from .blocks import blocks_for, caches_prefixes, clear, has_rival, remember
from .policies import same_again
from .queues import first_waiting, nobody_new
from .rules import SchedulerRules
from .state import NONE, LoopState

FEWEST = 3  # iterations to come for which it pays


def look_ahead(state: LoopState, rules: SchedulerRules, rank: int, batch: int, preempted: bool) -> None:
    """Note whether a batch that was just formed may come again: all that run decode, and who waits first, if anybody,
    was refused for a reason that lasts while the batch does. Blocks only become fewer, and SGLang tries nobody until
    one of them ends; TensorRT-LLM's prompts may wait for each other alone."""
    scheduler, sums = state.ranks[rank], state.batches[batch]
    scheduler.again, scheduler.refused = 0, first_waiting(state, rank)
    alone = sums.prefill_tokens == 0 and 0 < sums.size == scheduler.count and sums.samples == sums.size
    if alone and not preempted and (scheduler.refused == NONE or rules.lasting or scheduler.count >= rules.max_seqs):
        scheduler.again = 1


def repeat(state: LoopState, rules: SchedulerRules, rank: int, batch: int) -> bool:
    """Form the batch of a rank again, which has ended; False, with all requests up to date, where it must be formed
    anew."""
    scheduler, sums = state.ranks[rank], state.batches[batch]
    if scheduler.again == 0:
        return False
    if scheduler.repeated == 0 and not begin(state, rules, rank, batch):
        return False
    need = int(state.growing[rank, scheduler.repeated % rules.block_tokens])
    again = scheduler.left > 0 and scheduler.free >= need + rules.spare
    if again:
        again = same_again(state, rules, rank) if rules.asks else nobody_new(state, rules, rank)
    if not again:
        catch_up(state, rules, rank, batch, 0)
        return False
    scheduler.repeated += 1
    scheduler.left -= 1
    scheduler.free -= need
    scheduler.peak = max(scheduler.peak, rules.blocks - scheduler.free)
    scheduler.work -= sums.size
    sums.decode_context += sums.size
    state.totals[0].computed_tokens += sums.size
    return True


def begin(state: LoopState, rules: SchedulerRules, rank: int, batch: int) -> bool:
    """Count how often a batch can come again before a request ends, and how many take a block in which iteration;
    False where that is too seldom."""
    scheduler, size = state.ranks[rank], rules.block_tokens
    iterations = 1 << 60
    for entry in range(state.batches[batch].size):
        request = state.slots[state.entries[batch, entry]]
        iterations = min(iterations, request.output - request.made)
        room = request.blocks * size - request.computed
        if room >= size:  # blocks taken ahead: until they are full
            iterations = min(iterations, room)
    if iterations < FEWEST:
        scheduler.again = 0
        return False
    state.growing[rank, :size] = 0
    for entry in range(state.batches[batch].size):
        request = state.slots[state.entries[batch, entry]]
        room = request.blocks * size - request.computed
        if room < size:
            state.growing[rank, room] += 1
    scheduler.left, scheduler.given_us = iterations, state.batches[batch].given_us
    return True


def fill_blocks(state: LoopState, rules: SchedulerRules, rank: int, batch: int, formed: int) -> None:
    """Take and remember the blocks of a batch that was repeated ``formed`` times: what iterations formed one by one
    would leave."""
    size, rivals = rules.block_tokens, False
    for entry in range(state.batches[batch].size):
        rivals = rivals or has_rival(state, rules, rank, state.entries[batch, entry], formed)
    step = 1 if rivals else formed  # who has the same contents as another has them later or earlier
    for before in range(0, formed, step):
        for entry in range(state.batches[batch].size):
            slot = state.entries[batch, entry]
            request = state.slots[slot]
            tokens = request.computed + before
            need = blocks_for(tokens + step, size) - request.blocks
            if need > 0:
                clear(state, rank, need)
                request.blocks += need
            remember(state, rules, rank, slot, tokens, tokens + step)


def catch_up(state: LoopState, rules: SchedulerRules, rank: int, batch: int, waits: int) -> None:
    """Bring the requests of a repeated batch up to date, whose last tokens are on their way (``waits`` 1) or given."""
    scheduler = state.ranks[rank]
    formed = scheduler.repeated
    if caches_prefixes(state) and formed > 0:
        fill_blocks(state, rules, rank, batch, formed)
    for entry in range(state.batches[batch].size):
        request = state.slots[state.entries[batch, entry]]
        request.computed += formed
        request.made += formed - waits
        request.waits = waits
        request.last_us = scheduler.given_us
        request.blocks = max(request.blocks, blocks_for(request.computed, rules.block_tokens))
    scheduler.again, scheduler.repeated = 0, 0
