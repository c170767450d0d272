"""Tiers of the prefix cache below the GPU: host memory and drives of each rank, and a store that all share.

What it follows is vLLM's ``TieringOffloadingManager`` (``v1/kv_offload/tiering/manager.py``, 0.33.0), LMCache and
SGLang's HiCache: blocks are known by their content; what was computed is written to all tiers; each forgets what was
used longest ago; what is found below comes through host memory, and is then kept there, too. Writes go beside the work
of the GPU and are not timed.

A *shelf* is one tier of one rank, or the shared store: a ring in order of use, and a table from content to place.
Compiled with the loop (:mod:`.compiled`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .blocks import caches_prefixes, content, home, remember
from .due import push_due
from .rules import SchedulerRules
from .state import NONE, OWN_TIERS, PLACE, LoopState

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
        if place_of(state.shelves, state.places, shelf_of(state, rank, tier), key) != NONE:
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
        done_us = max(now_us, free_us) + shelf.first_us + tokens * shelf.token_us
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
        put_on(state.shelves, state.places, shelf_of(state, rank, 0), content(state, rules, slot, index))
    if rules.loads == ASYNC:
        request.loading, request.waits = hit + request.tiered, 1
        request.computed = request.input + request.made  # nothing to compute until they are there
        push_due(state, end_us, slot)
        return
    remember(state, rules, rank, slot, hit, hit + request.tiered)
    request.tiered = 0
    if rules.loads == LAYERS:
        scheduler.load_us = max(scheduler.load_us, end_us - now_us)
    else:
        scheduler.extra_us = max(scheduler.extra_us, end_us - now_us)


def end_load(state: LoopState, rules: SchedulerRules, rank: int, slot: int) -> None:
    """What a request loaded is there: the rest of its prompt may be computed."""
    request = state.slots[slot]
    request.computed, request.loading, request.waits = request.loading, 0, 0
    remember(state, rules, rank, slot, request.computed - request.tiered, request.computed)
    request.tiered = 0


def keep(state: LoopState, rules: SchedulerRules, rank: int, slot: int) -> None:
    """Write the full blocks of a request that are not yet written to all tiers of its rank."""
    request = state.slots[slot]
    if not caches_prefixes(state) or request.loading > 0:
        return
    for index in range(request.kept, request.computed // rules.block_tokens):
        key = content(state, rules, slot, index)
        for tier in range(OWN_TIERS + 1):
            put_on(state.shelves, state.places, shelf_of(state, rank, tier), key)
    request.kept = max(request.kept, request.computed // rules.block_tokens)


# --- a shelf, as compiled code calls it: with the two arrays that it needs, not with all of the state ----------------
# A place is three numbers: its content, and the places after and before it in order of use.


def place_of(shelves: Any, places: np.ndarray, shelf: int, key: int) -> int:
    """Where a shelf has a content; NONE where it has not."""
    row = shelves[shelf]
    if row.used == 0:
        return NONE
    bucket = home(key, row.buckets)
    while places[row.bucket + bucket] > 0:
        place = row.first + PLACE * (places[row.bucket + bucket] - 1)
        if places[place] == key:
            return int(place)
        bucket = (bucket + 1) & (row.buckets - 1)
    return NONE


def put_on(shelves: Any, places: np.ndarray, shelf: int, key: int) -> None:
    """A content is on a shelf, as the last that was used; where it is full the one used longest ago goes."""
    row = shelves[shelf]
    if row.blocks == 0:
        return
    end = row.first + PLACE * row.blocks
    place = place_of(shelves, places, shelf, key)
    if place != NONE:
        unchain(places, place)
    else:
        if row.used < row.blocks:
            place = row.first + PLACE * row.used
            row.used += 1
        else:
            place = places[end + 1]
            unchain(places, place)
            forget_on(shelves, places, shelf, place)
            row.evicted += 1
        places[place] = key
        bucket = home(key, row.buckets)
        while places[row.bucket + bucket] > 0:
            bucket = (bucket + 1) & (row.buckets - 1)
        places[row.bucket + bucket] = (place - row.first) // PLACE + 1
    last = places[end + 2]
    places[last + 1], places[place + 2] = place, last
    places[place + 1], places[end + 2] = end, place


def unchain(places: np.ndarray, place: int) -> None:
    """Take a place out of its ring."""
    after, before = places[place + 1], places[place + 2]
    places[before + 1], places[after + 2] = after, before


def forget_on(shelves: Any, places: np.ndarray, shelf: int, place: int) -> None:
    """The content of a place is no more to be found; what was pushed on by it in the table moves back."""
    row = shelves[shelf]
    mask, hole = row.buckets - 1, home(places[place], row.buckets)
    while places[row.bucket + hole] != (place - row.first) // PLACE + 1:
        hole = (hole + 1) & mask
    bucket = (hole + 1) & mask
    while places[row.bucket + bucket] > 0:
        other = row.first + PLACE * (places[row.bucket + bucket] - 1)
        ideal = home(places[other], row.buckets)
        if ((bucket - ideal) & mask) >= ((bucket - hole) & mask):
            places[row.bucket + hole] = places[row.bucket + bucket]
            hole = bucket
        bucket = (bucket + 1) & mask
    places[row.bucket + hole] = 0
