"""What all policies do with a rank's queue, its running requests and its batch."""

from __future__ import annotations

from typing import NamedTuple

from .adapters import first_with_place, has_adapters, hold
from .blocks import blocks_for, caches_prefixes, give_back, grow, hit_tokens, idle_hits, remember, sit, take
from .order import put_in_order, take_out
from .rules import SchedulerRules
from .state import NONE, LoopState
from .tiers import has_tiers, keep, load, tier_tokens


def tokens_to_compute(state: LoopState, slot: int) -> int:
    """Tokens of a request that can be computed now: its prompt, what was generated before a preemption, or one.

    0 while a batch in flight will give it its next token.
    """
    return state.slots[slot].input + state.slots[slot].made - state.slots[slot].computed


def length(state: LoopState, slot: int) -> int:
    """Tokens of a request so far, prompt and output."""
    return state.slots[slot].input + state.slots[slot].made


def is_decoding(state: LoopState, slot: int) -> bool:
    """Whether only its last token is not computed yet."""
    return state.slots[slot].made > 0 and tokens_to_compute(state, slot) <= 1


def push_back(state: LoopState, rank: int, slot: int) -> None:
    """A request waits behind all others, or where its priority says."""
    ranks = state.ranks
    ranks[rank].waiting += 1
    state.totals[0].waiting += 1
    if state.totals[0].ordered:
        put_in_order(state, rank, slot)
        return
    state.slots[slot].next = NONE
    if ranks[rank].head == NONE:
        ranks[rank].head = slot
    else:
        state.slots[ranks[rank].tail].next = slot
    ranks[rank].tail = slot


def push_front(state: LoopState, rank: int, slot: int) -> None:
    """A request waits before all others, or where its priority says."""
    ranks = state.ranks
    ranks[rank].waiting += 1
    state.totals[0].waiting += 1
    if state.totals[0].ordered:
        put_in_order(state, rank, slot)
        return
    state.slots[slot].next = ranks[rank].head
    ranks[rank].head, ranks[rank].passed = slot, NONE
    if ranks[rank].tail == NONE:
        ranks[rank].tail = slot


def first_waiting(state: LoopState, rank: int) -> int:
    """The first that waits, as far as the scheduler has seen it; NONE where there is none."""
    slot = state.ranks[rank].head
    while slot != NONE and state.slots[slot].arrival_us > state.ranks[rank].visible_us:
        slot = state.slots[slot].next if state.totals[0].ordered else NONE
    if has_adapters(state):
        return first_with_place(state, rank, slot)
    return slot


def put(state: LoopState, rules: SchedulerRules, rank: int, batch: int, slot: int, tokens: int) -> None:
    """Schedule ``tokens`` of a running request, whose blocks it has, in a batch; none while it loads others."""
    request, sums = state.slots[slot], state.batches[batch]
    if request.loading > 0:
        return
    before = request.computed
    if tokens == 1 and before > 0 and request.made > 0:
        sums.decodes += 1
        sums.decode_context += before
    else:
        sums.prefill_tokens += tokens
        sums.prefill_pairs += tokens * (before + 0.5 * (tokens + 1))
        sums.prefill_context += before
    request.computed, request.scheduled = before + tokens, tokens
    if request.computed == request.input + request.made:
        sums.samples += 1
        request.waits = 1
        state.entries[batch, sums.size] = slot
    else:
        state.entries[batch, sums.size] = -1 - slot
    sums.size += 1
    state.ranks[rank].work -= tokens
    state.totals[0].computed_tokens += tokens
    if caches_prefixes(state):
        remember(state, rules, rank, slot, before, before + tokens)


def fits(state: LoopState, rules: SchedulerRules, rank: int, slot: int, hit: int, tokens: int, spare: int) -> bool:
    """Whether a request that waits finds blocks for so many tokens, with ``spare`` left, its hits counted once."""
    if caches_prefixes(state) and state.ranks[rank].seats == 0:
        return False
    blocks = state.slots[slot].blocks  # of a cache that came from another rank
    hits = (hit - state.slots[slot].tiered) // rules.block_tokens
    need = blocks_for(tokens, rules.block_tokens) - hits - blocks
    if need + hits + spare <= state.ranks[rank].free:
        return True  # even if nobody uses what it hits
    if hit > 0:
        need += idle_hits(state, rules, rank, slot, hit)
    return need + spare <= state.ranks[rank].free or (blocks > 0 and need <= 0)


def admit(state: LoopState, rules: SchedulerRules, rank: int, slot: int, hit: int, tokens: int, now_us: float) -> None:
    """A request that waits, mostly the first, runs from now on: ``hit`` cached tokens, blocks for ``tokens``."""
    slots, ranks = state.slots, state.ranks
    take_out(state, rank, slot)
    if caches_prefixes(state):
        sit(state, rules, rank, slot, hit - slots[slot].tiered)
    if hit > 0:
        slots[slot].computed = hit
        ranks[rank].work -= hit
        if slots[slot].admitted_us < 0:
            slots[slot].hit = hit
    ranks[rank].landed -= slots[slot].landed
    ranks[rank].back -= slots[slot].back
    slots[slot].landed, slots[slot].back = 0, 0
    need = blocks_for(tokens, rules.block_tokens) - slots[slot].blocks
    if need > 0:
        take(state, rules, rank, slot, need)
    if slots[slot].tiered > 0:
        load(state, rules, rank, slot, hit - slots[slot].tiered, now_us)
    if slots[slot].stalled:
        slots[slot].stalled = 0
        ranks[rank].swapped_in += slots[slot].computed
        ranks[rank].extra_us += slots[slot].computed * rules.swap_us_per_token
    if slots[slot].admitted_us < 0:
        slots[slot].admitted_us = now_us
        ranks[rank].extra_us += slots[slot].encoder_us
    if rules.answers and slots[slot].made == 1 and slots[slot].preempted == 0:
        slots[slot].first_us, slots[slot].last_us = now_us, now_us
    if has_adapters(state):
        hold(state, rank, slots[slot].adapter, ranks[rank].formed)
    state.running[rank, ranks[rank].count] = slot
    ranks[rank].count += 1


def cached_tokens(state: LoopState, rules: SchedulerRules, rank: int, slot: int) -> int:
    """Tokens that a request which waits would find in the cache and below it; none where it brings its own."""
    if state.slots[slot].computed > 0 or not caches_prefixes(state):
        return 0
    hit = hit_tokens(state, rules, rank, slot)
    if has_tiers(state):
        state.slots[slot].tiered = tier_tokens(state, rules, rank, slot, hit)
        hit += state.slots[slot].tiered
    return hit


def close_ranks(state: LoopState, rank: int) -> None:
    """Those that run close up where others left."""
    scheduler, count = state.ranks[rank], 0
    for position in range(scheduler.count):
        slot = state.running[rank, position]
        if state.slots[slot].rank == rank:
            state.running[rank, count] = slot
            count += 1
    scheduler.count = count


def remove(state: LoopState, rank: int, position: int) -> None:
    """Take a request out of those that run."""
    ranks = state.ranks
    for index in range(position, ranks[rank].count - 1):
        state.running[rank, index] = state.running[rank, index + 1]
    ranks[rank].count -= 1


def preempt(state: LoopState, rules: SchedulerRules, rank: int, position: int, last: bool) -> None:
    """Stop the ``position``-th running request and free its blocks: it waits before all others, or (``last``) behind.

    It loses what was computed, or takes it to host memory where the rules have a price for that.
    """
    slots = state.slots
    slot = state.running[rank, position]
    remove(state, rank, position)
    if has_tiers(state):
        keep(state, rules, rank, slot)
    give_back(state, rules, rank, slot)
    if rules.swap_us_per_token >= 0:
        slots[slot].stalled = 1
        state.ranks[rank].swapped_out += slots[slot].computed
        state.ranks[rank].extra_us += slots[slot].computed * rules.swap_us_per_token
        state.totals[0].swaps += 1
    else:
        state.ranks[rank].work += slots[slot].computed
        slots[slot].computed = 0
    slots[slot].preempted += 1
    state.totals[0].preemptions += 1
    slots[slot].back = 1
    state.ranks[rank].back += 1
    if last or state.ranks[rank].landed > 0:  # those that wait with blocks go first, or nobody would
        push_back(state, rank, slot)
    else:
        push_front(state, rank, slot)


def newest(state: LoopState, rank: int, least: int) -> int:
    """The place of the running request that is preempted first: the last with no token on its way; NONE if none."""
    position = state.ranks[rank].count - 1
    while position >= least and state.slots[state.running[rank, position]].waits:
        position -= 1
    return position if position >= least else NONE


def make_room(state: LoopState, rules: SchedulerRules, rank: int, position: int, tokens: int, spare: int) -> int:
    """Blocks for ``tokens`` of the ``position``-th running request; the newest ones are preempted for them.

    ``spare`` blocks must be free even where none is needed. Returns how many were preempted; NONE where it was one of
    them itself or nobody is left to preempt.
    """
    gone = 0
    slot = state.running[rank, position]
    if rules.drafts > 0 and is_decoding(state, slot):
        tokens = min(tokens + rules.drafts, state.slots[slot].input + state.slots[slot].output)
    while state.ranks[rank].free < spare or not grow(state, rules, rank, slot, tokens):
        victim = newest(state, rank, position)
        if victim == NONE:
            return NONE
        preempt(state, rules, rank, victim, False)
        gone += 1
        if victim == position:
            return NONE
    return gone


def decode_all(state: LoopState, rules: SchedulerRules, rank: int, batch: int, spare: int) -> None:
    """One token for every running request whose prompt is computed; the newest are preempted for lack of blocks."""
    position = 0
    while position < state.ranks[rank].count:
        slot = state.running[rank, position]
        if tokens_to_compute(state, slot) == 1 and is_decoding(state, slot):
            if make_room(state, rules, rank, position, state.slots[slot].computed + 1, spare) == NONE:
                break
            put(state, rules, rank, batch, slot, 1)
        position += 1


def continue_prompts(state: LoopState, rules: SchedulerRules, rank: int, batch: int, budget: int) -> int:
    """Tokens of prompts that have begun, in order of admission; what is left of the budget."""
    for seat in range(state.ranks[rank].count):
        slot = state.running[rank, seat]
        tokens = min(tokens_to_compute(state, slot), budget)
        if tokens > 0 and not is_decoding(state, slot):
            put(state, rules, rank, batch, slot, tokens)
            budget -= tokens
    return budget


class PromptLimits(NamedTuple):
    """What new prompts of an iteration must keep to."""

    longest: int  # tokens of one prompt at most; 0: no limit
    full: int  # budget with which a prompt that is longer starts even where prompts are not cut; 0: with any
    alone: int  # blocks that the first request of a rank leaves free,
    beside: int  # and that others do
    ahead: int  # tokens beyond a prompt that it has blocks for at its start; NONE: it has those of its first chunk


def start_prompts(
    state: LoopState, rules: SchedulerRules, rank: int, batch: int, budget: int, limits: PromptLimits, now_us: float
) -> None:
    """Admit those that wait, up to the first that does not fit, and schedule what a budget of tokens has of them."""
    ranks, slots = state.ranks, state.slots
    while budget > 0 and ranks[rank].count < rules.max_seqs:
        slot = first_waiting(state, rank)
        if slot == NONE:
            break
        hit = cached_tokens(state, rules, rank, slot)
        tokens = tokens_to_compute(state, slot) - hit
        if limits.longest > 0:
            tokens = min(tokens, limits.longest)
        if tokens > budget and not rules.chunked and budget < limits.full:
            break
        tokens = min(tokens, budget)
        need = slots[slot].computed + hit + tokens if limits.ahead == NONE else length(state, slot) + limits.ahead
        if rules.reserves:
            need = slots[slot].input + slots[slot].output
        most = max(need, length(state, slot)) if rules.whole_prompt else need
        if not fits(state, rules, rank, slot, hit, most, limits.beside if ranks[rank].count > 0 else limits.alone):
            break
        admit(state, rules, rank, slot, hit, need, now_us)
        if slots[slot].loading == 0:
            put(state, rules, rank, batch, slot, tokens)
            budget -= tokens


def start_whole(state: LoopState, rules: SchedulerRules, rank: int, batch: int, slot: int, now_us: float) -> bool:
    """Admit a request with blocks for prompt and output and schedule all of its prompt; False where they do not fit."""
    need = state.slots[slot].input + state.slots[slot].output
    hit = cached_tokens(state, rules, rank, slot)
    if not fits(state, rules, rank, slot, hit, need, 0):
        return False
    admit(state, rules, rank, slot, hit, need, now_us)
    put(state, rules, rank, batch, slot, tokens_to_compute(state, slot))
    return True


def nobody_new(state: LoopState, rules: SchedulerRules, rank: int) -> bool:
    """Whether nobody waits but who was refused before."""
    first = first_waiting(state, rank)
    return first == NONE or first == state.ranks[rank].refused
