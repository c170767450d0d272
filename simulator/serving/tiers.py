"""Tiers of the prefix cache below the GPU: host memory and drives of each rank, and a store that all share.

What it follows is vLLM's ``TieringOffloadingManager`` (``v1/kv_offload/tiering/manager.py``, 0.33.0), LMCache and
SGLang's HiCache: blocks are known by their content; what was computed is written to all tiers; each forgets what was
used longest ago; what is found below comes through host memory, and is then kept there, too. Writes go beside the work
of the GPU and are not timed.

A *shelf* is one tier of one rank, or the shared store: a ring in order of use. Blocks of consecutive contents that were
last used one after the other have one *place* in it: they leave one by one, the first first, as if each had its own,
and a place is cut where only a part of it is used again. One table says where contents are, on all shelves; it is as
large as there is need for, since memory that is touched for the first time takes long. Compiled with the loop
(:mod:`.compiled`).
"""

from __future__ import annotations

from .blocks import INDICES, alike, caches_prefixes, content, remember
from .due import push_due
from .rules import SchedulerRules
from .state import NONE, OWN_TIERS, LoopState

ASYNC, LAYERS, BLOCKING = 0, 1, 2  # how caches are loaded: places in LOADS
# Of a place: its last content and how many blocks it has, its shelf, the places after and before it in order of use,
# and the next of its bucket. Ends of rings are places, too: the first ones, shelf by shelf.
LAST, COUNT, SHELF, AFTER, BEFORE, NEXT = 0, 1, 2, 3, 4, 5


def has_tiers(state: LoopState) -> bool:
    """Whether there is any tier."""
    return len(state.shelves) > 0


def shelf_of(state: LoopState, rank: int, tier: int) -> int:
    """The shelf of a tier that a rank uses."""
    return rank * OWN_TIERS + tier if tier < OWN_TIERS else len(state.ranks) * OWN_TIERS


def tier_tokens(state: LoopState, rules: SchedulerRules, rank: int, slot: int, hit: int) -> int:
    """Tokens behind the ``hit`` ones of the GPU that are found below it: whole blocks without a gap. Those that are not
    in host memory are counted (``below``), and of them those in the shared store alone (``far``)."""
    request, size = state.slots[slot], rules.block_tokens
    most, index = (request.input + request.made - 1) // size, hit // size
    request.below, request.far = 0, 0
    if request.kept == 0:
        most = min(most, request.shared // size)  # nothing of its own was ever written
    while index < most:
        key, count = content(state, rules, slot, index), alike(state, rules, slot, index, most)
        spot, count = look(state, shelf_of(state, rank, 0), key, count)
        if spot == NONE:
            spot, count = look(state, shelf_of(state, rank, 1), key, count)
            far = spot == NONE
            if far:
                spot, count = look(state, shelf_of(state, rank, OWN_TIERS), key, count)
            if spot == NONE:
                break
            request.below += count * size
            request.far += count * size if far else 0
        index += count
    return max(index * size - hit, 0)


def load(state: LoopState, rules: SchedulerRules, rank: int, slot: int, hit: int, now_us: float) -> None:
    """Load the blocks that a request finds below the GPU, behind ``hit`` tokens that it found on it. Each link takes
    one load after the other; what comes from below host memory goes through both links at a time."""
    request, scheduler = state.slots[slot], state.ranks[rank]
    size, end_us = rules.block_tokens, now_us
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
    write(state, rules, rank, slot, hit // size, (hit + request.tiered) // size, 0)
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
    end = max(request.kept, request.computed // rules.block_tokens)
    write(state, rules, rank, slot, request.kept, end, OWN_TIERS)
    request.kept = end


def write(state: LoopState, rules: SchedulerRules, rank: int, slot: int, first: int, end: int, lowest: int) -> None:
    """Put blocks ``first`` .. ``end`` - 1 of a request on the shelves of its rank, down to the ``lowest`` tier."""
    index = first
    while index < end:
        key, count = content(state, rules, slot, index), alike(state, rules, slot, index, end)
        for tier in range(lowest + 1):
            put_on(state, shelf_of(state, rank, tier), key, count)
        index += count


# --- shelves and their places ---------------------------------------------------------------------------------------


def bucket_of(state: LoopState, shelf: int, key: int) -> int:
    """Where the table has all contents of a shelf that differ from ``key`` in their index alone. Requests' own contents
    lie as requests follow each other: those that come in, and those that go, are side by side in memory."""
    number, last = key // INDICES, len(state.shelves) - 1
    if number % 2 == 0:
        place = number * 2 + (OWN_TIERS if shelf == last else shelf % OWN_TIERS)
    else:
        number = number * (last + 1) + shelf
        place = (number ^ (number >> 20)) * 40503 + (number >> 11)
    return place & (state.totals[0].buckets - 1)


def look(state: LoopState, shelf: int, key: int, most: int) -> tuple[int, int]:
    """The place of a content on a shelf, and how many contents from it on are there; NONE where it is not, and how many
    from it on are not. They are looked for up to ``most`` of them, which differ in their index alone."""
    if state.shelves[shelf].used == 0:
        return NONE, most
    places = state.places
    spot = state.shelved[bucket_of(state, shelf, key)] - 1
    while spot != NONE:
        if places[spot, SHELF] == shelf:
            last = places[spot, LAST]
            first = last - places[spot, COUNT] + 1
            if first <= key <= last:
                return spot, min(most, last - key + 1)
            if key < first < key + most:
                most = first - key
        spot = places[spot, NEXT]
    return NONE, most


def put_on(state: LoopState, shelf: int, key: int, count: int) -> None:
    """So many contents from ``key`` on are on a shelf, as the last that were used, one after the other; where it is
    full, those used longest ago go."""
    places = state.places
    if state.shelves[shelf].blocks == 0:
        return
    while count > 0:
        spot, size = look(state, shelf, key, count)
        if spot != NONE and places[spot, COUNT] == size:
            if goes_on(state, shelf, key):
                drop(state, spot)
                add(state, shelf, key, size)
            elif places[spot, AFTER] != shelf:
                unchain(state, spot)
                chain_between(state, places[shelf, BEFORE], spot, shelf)
        elif spot != NONE:
            cut(state, spot, key, size)
            add(state, shelf, key, size)
        else:
            make_space(state, shelf, size)
            more = min(size, state.shelves[shelf].blocks)
            state.shelves[shelf].used += more
            add(state, shelf, key + size - more, more)
        key, count = key + size, count - size


def make_space(state: LoopState, shelf: int, count: int) -> None:
    """Those used longest ago go, so that so many blocks more fit on a shelf, or it is empty."""
    row, places = state.shelves[shelf], state.places
    over = row.used + count - row.blocks
    row.evicted += max(over, 0)
    while over > 0 and row.used > 0:
        spot = places[shelf, AFTER]
        gone = min(places[spot, COUNT], over)
        places[spot, COUNT] -= gone
        row.used -= gone
        over -= gone
        if places[spot, COUNT] == 0:
            drop(state, spot)


def cut(state: LoopState, spot: int, key: int, count: int) -> None:
    """Contents ``key`` and after it, ``count`` of them, but not all, are no more in a place."""
    places = state.places
    first, behind = places[spot, LAST] - places[spot, COUNT] + 1, places[spot, LAST] - key - count + 1
    if behind == 0:
        places[spot, LAST] = key - 1
    elif key > first:
        front = new_place(state, places[spot, SHELF], key - 1, key - first)
        chain_between(state, places[spot, BEFORE], front, spot)
    places[spot, COUNT] = behind if behind > 0 else key - first


def goes_on(state: LoopState, shelf: int, key: int) -> bool:
    """Whether a content follows the last that a shelf has."""
    last = state.places[shelf, BEFORE]
    return last != shelf and state.places[last, LAST] == key - 1


def add(state: LoopState, shelf: int, key: int, count: int) -> None:
    """So many contents that a shelf lacks are its last: in the place of those before them, where they go on from it."""
    places = state.places
    if goes_on(state, shelf, key):
        last = places[shelf, BEFORE]
        places[last, LAST] += count
        places[last, COUNT] += count
        return
    spot = new_place(state, shelf, key + count - 1, count)
    chain_between(state, places[shelf, BEFORE], spot, shelf)


def new_place(state: LoopState, shelf: int, last: int, count: int) -> int:
    """A place that is free, one that was left or the next, to be found by its contents."""
    totals, places, spot = state.totals[0], state.places, state.totals[0].spare
    if spot != NONE:
        totals.spare = places[spot, NEXT]
    else:
        while 2 * totals.places >= totals.buckets:
            widen(state)
        spot = totals.places
        totals.places += 1
    places[spot, LAST], places[spot, COUNT], places[spot, SHELF] = last, count, shelf
    enter(state, spot)
    return spot


def drop(state: LoopState, spot: int) -> None:
    """A place has no contents any more, and is free."""
    places = state.places
    unchain(state, spot)
    bucket = bucket_of(state, places[spot, SHELF], places[spot, LAST])
    other = state.shelved[bucket] - 1
    if other == spot:
        state.shelved[bucket] = places[spot, NEXT] + 1
    else:
        while places[other, NEXT] != spot:
            other = places[other, NEXT]
        places[other, NEXT] = places[spot, NEXT]
    places[spot, NEXT] = state.totals[0].spare
    state.totals[0].spare = spot


def clear(state: LoopState, shelf: int) -> None:
    """A shelf loses all that it has."""
    spot = state.places[shelf, AFTER]
    while spot != shelf:
        state.places[spot, COUNT] = 0
        drop(state, spot)
        spot = state.places[shelf, AFTER]
    state.shelves[shelf].used = 0


def enter(state: LoopState, spot: int) -> None:
    """Make a place findable by its contents."""
    bucket = bucket_of(state, state.places[spot, SHELF], state.places[spot, LAST])
    state.places[spot, NEXT] = state.shelved[bucket] - 1
    state.shelved[bucket] = spot + 1


def widen(state: LoopState) -> None:
    """Four times as many buckets; every place that has contents is entered anew."""
    totals = state.totals[0]
    state.shelved[: totals.buckets] = 0
    totals.buckets *= 4
    for spot in range(len(state.shelves), totals.places):
        if state.places[spot, COUNT] > 0:
            enter(state, spot)


def chain_between(state: LoopState, before: int, spot: int, after: int) -> None:
    """Put a place between two others of its ring."""
    places = state.places
    places[before, AFTER], places[spot, BEFORE] = spot, before
    places[spot, AFTER], places[after, BEFORE] = after, spot


def unchain(state: LoopState, spot: int) -> None:
    """Take a place out of its ring."""
    places = state.places
    after, before = places[spot, AFTER], places[spot, BEFORE]
    places[before, AFTER], places[after, BEFORE] = after, before
