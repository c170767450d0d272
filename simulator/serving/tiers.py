"""Tiers of the prefix cache below the GPU: host memory and drives of each rank, and a store that all share.

What it follows is vLLM's ``TieringOffloadingManager`` (``v1/kv_offload/tiering/manager.py``, 0.33.0), LMCache and
SGLang's HiCache: blocks are known by their content; what was computed is written to all tiers; each forgets what was
used longest ago; what is found below comes through host memory, and is then kept there, too. Writes go beside the work
of the GPU and are not timed.

A *shelf* is one tier of one rank, or the shared store: a ring in order of use, and a table from content to place.
Blocks that a request wrote together and shares with nobody have one place while nobody can look for them: until it is
preempted (:func:`split`). They leave one by one, the first first, as if each had its own. Compiled with the loop
(:mod:`.compiled`).
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
    """Tokens behind the ``hit`` ones of the GPU that are found below it: whole blocks without a gap. Those that are not
    in host memory are counted (``below``), and of them those in the shared store alone (``far``)."""
    request, host = state.slots[slot], shelf_of(state, rank, 0)
    most, index, near = (request.input + request.made - 1) // rules.block_tokens, hit // rules.block_tokens, NONE
    request.below, request.far = 0, 0
    while index < most:
        key = content(state, rules, slot, index)
        near = place_of(state.shelves, state.places, host, key, near)
        if near == NONE:
            tier = tier_below(state, rank, key)
            if tier == NONE:
                break
            request.below += rules.block_tokens
            request.far += rules.block_tokens if tier == OWN_TIERS else 0
        index += 1
    return index * rules.block_tokens - hit


def tier_below(state: LoopState, rank: int, key: int) -> int:
    """The highest tier below host memory that has a content; NONE where none has."""
    for tier in range(1, OWN_TIERS + 1):
        if place_of(state.shelves, state.places, shelf_of(state, rank, tier), key, NONE) != NONE:
            return tier
    return NONE


def load(state: LoopState, rules: SchedulerRules, rank: int, slot: int, hit: int, now_us: float) -> None:
    """Load the blocks that a request finds below the GPU, behind ``hit`` tokens that it found on it. Each link takes
    one load after the other; what comes from below host memory goes through both links at a time."""
    request, scheduler = state.slots[slot], state.ranks[rank]
    size, end_us, near = rules.block_tokens, now_us, NONE
    for tier in range(OWN_TIERS, -1, -1):
        own = request.far if tier == OWN_TIERS else request.below - request.far if tier > 0 else request.tiered
        if own == 0:
            continue
        shelf = state.shelves[shelf_of(state, rank, tier)]
        free_us = shelf.link_us if tier < OWN_TIERS else scheduler.remote_us
        done_us = max(now_us, free_us) + shelf.first_us + own * shelf.token_us
        if tier < OWN_TIERS:
            shelf.link_us = done_us
        else:
            scheduler.remote_us = done_us
        own -= request.below if tier == 0 else 0
        shelf.tokens += own
        shelf.loads += 1 if own > 0 else 0
        end_us = max(end_us, done_us)
    state.totals[0].load_us += end_us - now_us
    state.totals[0].loads += 1
    for index in range(hit // size, (hit + request.tiered) // size):
        key = content(state, rules, slot, index)
        near = put_on(state.shelves, state.places, shelf_of(state, rank, 0), key, near)
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
    first, end = request.kept, request.computed // rules.block_tokens
    own = min(max(first, request.shared // rules.block_tokens), end)  # from here on nobody else has its blocks
    for tier in range(OWN_TIERS + 1):
        shelf, near = shelf_of(state, rank, tier), NONE
        if state.shelves[shelf].blocks == 0:
            continue
        for index in range(first, own):
            near = put_on(state.shelves, state.places, shelf, content(state, rules, slot, index), near)
        if own < end:
            put_together(state.shelves, state.places, shelf, content(state, rules, slot, end - 1), end - own)
    request.kept = max(first, end)


def split(state: LoopState, rules: SchedulerRules, rank: int, slot: int) -> None:
    """Give each block that a request wrote a place of its own: it was preempted and will look for them."""
    request = state.slots[slot]
    if not caches_prefixes(state):
        return
    for tier in range(OWN_TIERS + 1):
        shelf, index = shelf_of(state, rank, tier), request.kept - 1
        while (index + 1) * rules.block_tokens > request.shared:
            count = split_on(state.shelves, state.places, shelf, content(state, rules, slot, index))
            if count == 0:
                break
            index -= count


# --- a shelf, as compiled code calls it: with the two arrays that it needs, not with all of the state ----------------
# A place is four numbers: its content (of several blocks that of the last), the places after and before it in order of
# use, and how many blocks it has. Contents of blocks that share a place are consecutive.


def place_of(shelves: Any, places: np.ndarray, shelf: int, key: int, near: int) -> int:
    """Where a shelf has a content; NONE where it has not. It is looked for behind the place ``near`` first, where what
    was written together mostly is."""
    row = shelves[shelf]
    if row.used == 0:
        return NONE
    if near != NONE and near + PLACE < row.first + PLACE * row.taken and places[near + PLACE] == key:
        return near + PLACE
    bucket = home(key, row.buckets)
    while places[row.bucket + bucket] > 0:
        place = row.first + PLACE * (places[row.bucket + bucket] - 1)
        if places[place] == key:
            return int(place)
        bucket = (bucket + 1) & (row.buckets - 1)
    return NONE


def put_on(shelves: Any, places: np.ndarray, shelf: int, key: int, near: int) -> int:
    """A content is on a shelf, as the last that was used; where it is full the one used longest ago goes. Its place."""
    row = shelves[shelf]
    if row.blocks == 0:
        return NONE
    place = place_of(shelves, places, shelf, key, near)
    if place == NONE:
        return put_together(shelves, places, shelf, key, 1)
    unchain(places, place)
    chain_last(places, row.first + PLACE * row.blocks, place)
    return place


def put_together(shelves: Any, places: np.ndarray, shelf: int, key: int, count: int) -> int:
    """So many new contents are on a shelf, in one place, the last of them ``key``; where it is full, those used longest
    ago go. The place."""
    row = shelves[shelf]
    end, over = row.first + PLACE * row.blocks, row.used + count - row.blocks
    if over > 0:
        row.evicted += over
    while over > 0 and row.used > 0:
        over -= evict(shelves, places, shelf, over)
    count = min(count, row.blocks)
    place = new_place(shelves, places, shelf)
    places[place], places[place + 3] = key, count
    row.used += count
    insert_on(shelves, places, shelf, place)
    chain_last(places, end, place)
    return place


def evict(shelves: Any, places: np.ndarray, shelf: int, most: int) -> int:
    """Up to ``most`` blocks of the place that was used longest ago go; how many."""
    row = shelves[shelf]
    place = places[row.first + PLACE * row.blocks + 1]
    count = min(places[place + 3], most)
    places[place + 3] -= count
    row.used -= count
    if places[place + 3] == 0:
        unchain(places, place)
        forget_on(shelves, places, shelf, place)
        places[place], places[place + 1] = NONE, row.spare
        row.spare = place
    return int(count)


def split_on(shelves: Any, places: np.ndarray, shelf: int, key: int) -> int:
    """The blocks of the place whose last content is ``key`` have one each; how many they are, 0 where nothing is."""
    place = place_of(shelves, places, shelf, key, NONE)
    if place == NONE:
        return 0
    count, before = places[place + 3], places[place + 2]
    places[place + 3] = 1
    for back in range(count - 1, 0, -1):
        other = new_place(shelves, places, shelf)
        places[other], places[other + 3] = key - back, 1
        insert_on(shelves, places, shelf, other)
        chain_between(places, before, other, place)
        before = other
    return int(count)


def new_place(shelves: Any, places: np.ndarray, shelf: int) -> int:
    """A place that is free: one that was left, or the next."""
    row = shelves[shelf]
    place = row.spare
    if place != NONE:
        row.spare = places[place + 1]
        return int(place)
    row.taken += 1
    return int(row.first + PLACE * (row.taken - 1))


def chain_last(places: np.ndarray, end: int, place: int) -> None:
    """Put a place at the end of its ring."""
    chain_between(places, places[end + 2], place, end)


def chain_between(places: np.ndarray, before: int, place: int, after: int) -> None:
    """Put a place between two others of its ring."""
    places[before + 1], places[place + 2] = place, before
    places[place + 1], places[after + 2] = after, place


def unchain(places: np.ndarray, place: int) -> None:
    """Take a place out of its ring."""
    after, before = places[place + 1], places[place + 2]
    places[before + 1], places[after + 2] = after, before


def insert_on(shelves: Any, places: np.ndarray, shelf: int, place: int) -> None:
    """Make a place findable by its content."""
    row = shelves[shelf]
    bucket = home(places[place], row.buckets)
    while places[row.bucket + bucket] > 0:
        bucket = (bucket + 1) & (row.buckets - 1)
    places[row.bucket + bucket] = (place - row.first) // PLACE + 1


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
