"""Tiers of the prefix cache below the GPU: host memory and drives of each rank, and a store that all share.

What it follows is vLLM's ``TieringOffloadingManager`` (``v1/kv_offload/tiering/manager.py``, 0.33.0), LMCache and
SGLang's HiCache: blocks are known by their content; what was computed is written to all tiers; each forgets what was
used longest ago; what is found below comes through host memory, and is then kept there, too. Writes go beside the work
of the GPU and are not timed.

A *shelf* is one tier of one rank, or the shared store: a ring in order of use, and a table from content to place.
Compiled with the loop (:mod:`.compiled`).
"""

from __future__ import annotations

from .blocks import caches_prefixes, content, home, remember
from .due import push_due
from .rules import SchedulerRules
from .state import NONE, OWN_TIERS, LoopState

ASYNC, LAYERS, BLOCKING = 0, 1, 2  # how caches are loaded: places in LOADS


def has_tiers(state: LoopState) -> bool:
    """Whether there is any tier."""
    return len(state.shelves) > 0


def shelf_of(state: LoopState, rank: int, tier: int) -> int:
    """The shelf of a tier that a rank uses."""
    return rank * OWN_TIERS + tier if tier < OWN_TIERS else len(state.ranks) * OWN_TIERS


def tier_tokens(state: LoopState, rules: SchedulerRules, rank: int, slot: int, hit: int) -> int:
    """Tokens behind the ``hit`` ones of the GPU that are found below it: whole blocks without a gap."""
    request = state.slots[slot]
    most, index = (request.input + request.made - 1) // rules.block_tokens, hit // rules.block_tokens
    while index < most and tier_of(state, rank, content(state, rules, slot, index)) != NONE:
        index += 1
    return index * rules.block_tokens - hit


def tier_of(state: LoopState, rank: int, key: int) -> int:
    """The highest tier that has a content; NONE where none has."""
    for tier in range(OWN_TIERS + 1):
        if place_of(state, shelf_of(state, rank, tier), key) != NONE:
            return tier
    return NONE


def load(state: LoopState, rules: SchedulerRules, rank: int, slot: int, hit: int, now_us: float) -> None:
    """Load the blocks that a request finds below the GPU, behind ``hit`` tokens that it found on it. Each link takes
    one load after the other; what comes from below host memory goes through both links at a time."""
    request, scheduler = state.slots[slot], state.ranks[rank]
    size, end_us = rules.block_tokens, now_us
    for tier in range(OWN_TIERS, -1, -1):
        tokens = 0
        for index in range(hit // size, (hit + request.tiered) // size):
            if tier == 0 or tier_of(state, rank, content(state, rules, slot, index)) == tier:
                tokens += size
        if tokens == 0:
            continue
        shelf = state.shelves[shelf_of(state, rank, tier)]
        free_us = shelf.link_us if tier < OWN_TIERS else scheduler.remote_us
        done_us = max(now_us, free_us) + rules.tier_us[tier] + tokens * rules.tier_token_us[tier]
        if tier < OWN_TIERS:
            shelf.link_us = done_us
        else:
            scheduler.remote_us = done_us
        if tier == 0:
            tokens -= request.below
        else:
            request.below += tokens
        shelf.tokens += tokens
        shelf.loads += 1 if tokens > 0 else 0
        end_us = max(end_us, done_us)
    request.below = 0
    state.totals[0].load_us += end_us - now_us
    state.totals[0].loads += 1
    for index in range(hit // size, (hit + request.tiered) // size):
        put_on(state, shelf_of(state, rank, 0), content(state, rules, slot, index))
    if rules.loads == ASYNC:
        request.loading, request.waits = hit + request.tiered, 1
        request.computed = request.input + request.made  # nothing to compute until they are there
        push_due(state, end_us, slot)
        return
    remember(state, rules, rank, slot, hit, hit + request.tiered)
    if rules.loads == LAYERS:
        scheduler.load_us = max(scheduler.load_us, end_us - now_us)
    else:
        scheduler.extra_us = max(scheduler.extra_us, end_us - now_us)


def end_load(state: LoopState, rules: SchedulerRules, rank: int, slot: int) -> None:
    """What a request loaded is there: the rest of its prompt may be computed."""
    request = state.slots[slot]
    request.computed, request.loading, request.waits = request.loading, 0, 0
    remember(state, rules, rank, slot, request.computed - request.tiered, request.computed)


def keep(state: LoopState, rules: SchedulerRules, rank: int, slot: int) -> None:
    """Write the full blocks of a request that are not yet written to all tiers of its rank."""
    request = state.slots[slot]
    if not caches_prefixes(state) or request.loading > 0:
        return
    for index in range(request.kept, request.computed // rules.block_tokens):
        key = content(state, rules, slot, index)
        for tier in range(OWN_TIERS + 1):
            put_on(state, shelf_of(state, rank, tier), key)
    request.kept = max(request.kept, request.computed // rules.block_tokens)


# --- a shelf --------------------------------------------------------------------------------------------------------


def place_of(state: LoopState, shelf: int, key: int) -> int:
    """Where a shelf has a content; NONE where it has not."""
    own = state.shelves[shelf]
    if own.used == 0:
        return NONE
    bucket = home(key, own.buckets)
    while state.tier_found[own.bucket + bucket] > 0:
        place = own.first + state.tier_found[own.bucket + bucket] - 1
        if state.tier_keys[place] == key:
            return int(place)
        bucket = (bucket + 1) & (own.buckets - 1)
    return NONE


def put_on(state: LoopState, shelf: int, key: int) -> None:
    """A content is on a shelf, as the last that was used; where it is full the one used longest ago goes."""
    own = state.shelves[shelf]
    if own.blocks == 0:
        return
    end = own.first + own.blocks
    place = place_of(state, shelf, key)
    if place != NONE:
        unchain(state, place)
    else:
        if own.used < own.blocks:
            place = own.first + own.used
            own.used += 1
        else:
            place = state.tier_after[end]
            unchain(state, place)
            forget_on(state, shelf, place)
            own.evicted += 1
        state.tier_keys[place] = key
        bucket = home(key, own.buckets)
        while state.tier_found[own.bucket + bucket] > 0:
            bucket = (bucket + 1) & (own.buckets - 1)
        state.tier_found[own.bucket + bucket] = place - own.first + 1
    last = state.tier_before[end]
    state.tier_after[last], state.tier_before[place] = place, last
    state.tier_after[place], state.tier_before[end] = end, place


def unchain(state: LoopState, place: int) -> None:
    """Take a place out of its ring."""
    after, before = state.tier_after[place], state.tier_before[place]
    state.tier_after[before], state.tier_before[after] = after, before


def forget_on(state: LoopState, shelf: int, place: int) -> None:
    """The content of a place is no more to be found; what was pushed on by it in the table moves back."""
    own = state.shelves[shelf]
    mask, hole = own.buckets - 1, home(state.tier_keys[place], own.buckets)
    while state.tier_found[own.bucket + hole] != place - own.first + 1:
        hole = (hole + 1) & mask
    bucket = (hole + 1) & mask
    while state.tier_found[own.bucket + bucket] > 0:
        other = own.first + state.tier_found[own.bucket + bucket] - 1
        ideal = home(state.tier_keys[other], own.buckets)
        if ((bucket - ideal) & mask) >= ((bucket - hole) & mask):
            state.tier_found[own.bucket + hole] = state.tier_found[own.bucket + bucket]
            hole = bucket
        bucket = (bucket + 1) & mask
    state.tier_found[own.bucket + hole] = 0
