"""KV blocks of a rank: how many a request holds, and which content they have where prefixes are cached.

Without prefix caching blocks are only counted. With it they are those of vLLM's block pool: a full block is known by
its content from the moment it is scheduled; when nobody uses it any more it stays findable, last in the line of blocks
to be taken; a block that is not full goes first. A request that comes back finds what is left of its own: what nobody
else has is made findable when it goes, if it is to come back.

Blocks whose contents follow each other, with the same users, are one *run*: what would be done to each is done to all.
Where only its first blocks are hit a run is split; those who hold more of it come to the rest by ``rest``. Runs that
were freed one after the other are joined again, the higher contents first, as they are taken in this order. Blocks
without content are alike: they are counted.
"""

from __future__ import annotations

from .rules import SchedulerRules
from .state import NONE, LoopState

INDICES = 1 << 20  # of contents that differ in their index alone
# Whether a run can be found: no, as its content is its request's alone, which needs not find it while it has it; yes;
# no, as its content was lost.
OWN, FINDABLE, LOST = 0, 1, 2


def blocks_for(tokens: int, size: int) -> int:
    """Blocks that hold so many tokens."""
    return (tokens + size - 1) // size


def caches_prefixes(state: LoopState) -> bool:
    """Whether prefixes are cached."""
    return len(state.runs) > 0


def ring_end(state: LoopState, rank: int) -> int:
    """The end of a rank's ring, behind its last run."""
    return (rank + 1) * (len(state.runs) // len(state.ranks)) - 1


def missing_blocks(state: LoopState, rules: SchedulerRules, slot: int, tokens: int) -> int:
    """Blocks that a request still needs to hold so many tokens."""
    have = state.slots[slot].blocks
    return 0 if tokens <= have * rules.block_tokens else blocks_for(tokens, rules.block_tokens) - have


def grow(state: LoopState, rules: SchedulerRules, rank: int, slot: int, tokens: int) -> bool:
    """Give a running request blocks for so many tokens; False, and nothing given, where there are too few."""
    need = missing_blocks(state, rules, slot, tokens)
    if need > state.ranks[rank].free:
        return False
    if need > 0:
        take(state, rules, rank, slot, need)
    return True


def take(state: LoopState, rules: SchedulerRules, rank: int, slot: int, count: int) -> None:
    """Give a request ``count`` of the free blocks."""
    request, scheduler = state.slots[slot], state.ranks[rank]
    if caches_prefixes(state):
        clear(state, rank, count)
    request.blocks += count
    scheduler.free -= count
    scheduler.peak = max(scheduler.peak, rules.blocks - scheduler.free)


def clear(state: LoopState, rank: int, count: int) -> None:
    """So many free blocks are no more in line: those without content, then the first ones, whose content is forgotten;
    of a run its last blocks first."""
    scheduler, end = state.ranks[rank], ring_end(state, rank)
    bare = min(scheduler.bare, count)
    scheduler.bare -= bare
    count -= bare
    while count > 0:
        run = state.runs[end].after
        row = state.runs[run]
        if row.count > count:
            row.last -= count
            row.count -= count
            return
        count -= row.count
        unlink(state, run)
        drop(state, rank, run)


def give_back(state: LoopState, rules: SchedulerRules, rank: int, slot: int) -> None:
    """Free all blocks of a request; those with content stay findable until they are taken."""
    request = state.slots[slot]
    if caches_prefixes(state):
        if request.seat != NONE:
            if request.made < request.output:
                remember_own(state, rank, slot)
            let_go(state, rank, slot)
    else:
        state.ranks[rank].free += request.blocks
    request.blocks = 0


def let_go(state: LoopState, rank: int, slot: int) -> None:
    """The last block first: those without content are counted, the others go to the end of the ring."""
    request, scheduler, end = state.slots[slot], state.ranks[rank], ring_end(state, rank)
    bare = request.blocks
    for part in range(request.parts - 1, -1, -1):
        run, held = state.table[rank, request.seat, part, 0], state.table[rank, request.seat, part, 1]
        bare -= held
        behind = state.runs[end].before
        while held > 0:
            row, rest = state.runs[run], state.runs[run].rest
            held -= row.count
            row.users -= 1
            if row.users == 0:
                scheduler.free += row.count
                if row.known == LOST:
                    scheduler.bare += row.count
                    drop(state, rank, run)
                else:  # before the runs of lower contents that were just freed
                    link(state, run, behind)
                    join(state, rank, run, row.after)
            run = rest
        join(state, rank, behind, state.runs[behind].after)
    scheduler.free += bare
    scheduler.bare += bare
    state.seats[rank, scheduler.seats] = request.seat
    scheduler.seats += 1
    request.seat, request.parts = NONE, 0


def content(state: LoopState, rules: SchedulerRules, slot: int, index: int) -> int:
    """What the ``index``-th block of a request has in it, as a number: alike for a prefix that requests share."""
    request = state.slots[slot]
    if (index + 1) * rules.block_tokens <= request.shared:
        if request.keys != NONE:
            span = ((index + 1) * rules.block_tokens - 1) // state.totals[0].key_tokens
            return (state.keys[request.keys + span] * 2 + 1) * INDICES + index
        return (request.prefix * 2 + 1) * INDICES + index
    return request.request * 2 * INDICES + index


def alike(state: LoopState, rules: SchedulerRules, slot: int, index: int, end: int) -> int:
    """How many blocks of a request from ``index`` on, up to ``end``, have contents that follow each other."""
    request, size = state.slots[slot], rules.block_tokens
    shared = request.shared // size
    if index >= shared:
        return end - index
    end = min(end, shared)
    if request.keys != NONE:
        width = state.totals[0].key_tokens
        span = ((index + 1) * size - 1) // width
        key = state.keys[request.keys + span]
        while (span + 1) * width // size < end and state.keys[request.keys + span + 1] == key:
            span += 1
        end = min(end, (span + 1) * width // size)
    return end - index


def hit_tokens(state: LoopState, rules: SchedulerRules, rank: int, slot: int) -> int:
    """Tokens of a request that are in the rank's cache: whole blocks from its first on, its last token left out."""
    if not caches_prefixes(state):
        return 0
    most, index = (state.slots[slot].input + state.slots[slot].made - 1) // rules.block_tokens, 0
    while index < most:
        key, count = content(state, rules, slot, index), alike(state, rules, slot, index, most)
        run, count = find(state, rank, key, count)
        if run == NONE:
            break
        index += count
    return index * rules.block_tokens


def idle_hits(state: LoopState, rules: SchedulerRules, rank: int, slot: int, tokens: int) -> int:
    """Of the cached blocks of so many tokens those on the GPU that nobody uses, which are free until they are hit."""
    idle, index, end = 0, 0, (tokens - state.slots[slot].tiered) // rules.block_tokens
    while index < end:
        key, count = content(state, rules, slot, index), alike(state, rules, slot, index, end)
        run, count = find(state, rank, key, count)
        idle += count if state.runs[run].users == 0 else 0
        index += count
    return idle


def sit(state: LoopState, rules: SchedulerRules, rank: int, slot: int, tokens: int) -> None:
    """Give an admitted request a row of the table, with the cached blocks of so many tokens in it."""
    scheduler, request = state.ranks[rank], state.slots[slot]
    scheduler.seats -= 1
    request.seat, request.parts = state.seats[rank, scheduler.seats], 0
    index, end = 0, tokens // rules.block_tokens
    while index < end:
        key, count = content(state, rules, slot, index), alike(state, rules, slot, index, end)
        run, count = find(state, rank, key, count)
        before = key - (state.runs[run].last - state.runs[run].count + 1)
        if before > 0:
            run = split(state, rank, run, before)
        if count < state.runs[run].count:
            split(state, rank, run, count)
        if state.runs[run].users == 0:
            unlink(state, run)
            scheduler.free -= count
        state.runs[run].users += 1
        hold(state, rank, slot, run, count)
        index += count
    request.blocks = end
    state.totals[0].hit_tokens += tokens


def remember(state: LoopState, rules: SchedulerRules, rank: int, slot: int, before: int, after: int) -> None:
    """Make the blocks findable that become full when tokens ``before`` .. ``after`` are computed."""
    index, end = before // rules.block_tokens, after // rules.block_tokens
    own = state.slots[slot].shared // rules.block_tokens
    while index < end:
        key, count = content(state, rules, slot, index), alike(state, rules, slot, index, end)
        add(state, rank, slot, key, count, FINDABLE if index < own else OWN)
        index += count


def add(state: LoopState, rank: int, slot: int, key: int, count: int, known: int) -> None:
    """So many blocks of a request, behind those that have content, have contents from ``key`` on. Its last run grows
    by them where nobody else uses it or has such contents: of equal ones the first is found."""
    request = state.slots[slot]
    if request.parts > 0:
        run = last_run(state, rank, slot)
        row = state.runs[run]
        goes_on = row.users == 1 and row.known == known and row.last + 1 == key
        if goes_on and (known == OWN or alone(state, rank, key, key + count - 1, run, run)):
            row.last += count
            row.count += count
            state.table[rank, request.seat, request.parts - 1, 1] += count
            return
    run = new_run(state, rank, key + count - 1, count, known)
    state.runs[run].users = 1
    if known == FINDABLE:
        enter(state, rank, run)
    hold(state, rank, slot, run, count)


def remember_own(state: LoopState, rank: int, slot: int) -> None:
    """Make the blocks of a request findable whose content is its own."""
    request = state.slots[slot]
    for part in range(request.parts):
        run = state.table[rank, request.seat, part, 0]
        if state.runs[run].known == OWN:
            state.runs[run].known = FINDABLE
            enter(state, rank, run)


def lose_contents(state: LoopState, rank: int) -> None:
    """What was computed before is no more to be found."""
    scheduler, first = state.ranks[rank], ring_end(state, rank) + 1 - len(state.runs) // len(state.ranks)
    for run in range(first, first + scheduler.runs):
        row = state.runs[run]
        if row.count > 0 and row.users == 0:
            scheduler.bare += row.count
            unlink(state, run)
            drop(state, rank, run)
        elif row.count > 0:
            if row.known == FINDABLE:
                leave(state, rank, run)
            row.known = LOST


def has_rival(state: LoopState, rules: SchedulerRules, rank: int, slot: int, tokens: int) -> bool:
    """Whether a request may come, in its next ``tokens``, to contents that another one comes to at the same time."""
    request, size = state.slots[slot], rules.block_tokens
    index, end = request.computed // size, min((request.computed + tokens) // size, request.shared // size)
    if index >= end:
        return False
    if request.parts == 0:
        return True
    key, run = content(state, rules, slot, index), last_run(state, rank, slot)
    return state.runs[run].last != key - 1 or not alone(state, rank, key - 1, key | INDICES - 1, run, run)


# --- rows of the table, the ring of free runs, and the table from content to run --------------------------------------


def hold(state: LoopState, rank: int, slot: int, run: int, count: int) -> None:
    """A request has ``count`` blocks of a run and of what is its rest, behind those that it has."""
    request = state.slots[slot]
    state.table[rank, request.seat, request.parts, 0] = run
    state.table[rank, request.seat, request.parts, 1] = count
    request.parts += 1


def last_run(state: LoopState, rank: int, slot: int) -> int:
    """The last run of a request that has any."""
    request = state.slots[slot]
    part = request.parts - 1
    run, held = state.table[rank, request.seat, part, 0], state.table[rank, request.seat, part, 1]
    while held > state.runs[run].count:
        held -= state.runs[run].count
        run = state.runs[run].rest
    return run


def new_run(state: LoopState, rank: int, last: int, count: int, known: int) -> int:
    """A run that was left, or the next, up to content ``last``."""
    scheduler, run = state.ranks[rank], state.ranks[rank].spare
    if run != NONE:
        scheduler.spare = state.runs[run].next
    else:
        run = ring_end(state, rank) + 1 - len(state.runs) // len(state.ranks) + scheduler.runs
        scheduler.runs += 1
    row = state.runs[run]
    row.last, row.count, row.known, row.users, row.rest, row.next = last, count, known, 0, NONE, NONE
    return run


def split(state: LoopState, rank: int, run: int, count: int) -> int:
    """Leave a run its first ``count`` blocks; the run of the others, which are taken before them."""
    row = state.runs[run]
    rest = new_run(state, rank, row.last, row.count - count, row.known)
    other = state.runs[rest]
    other.users, other.rest, other.next = row.users, row.rest, row.next
    row.rest, row.next = rest, rest
    row.last -= other.count
    row.count = count
    if row.users == 0:
        link(state, rest, row.before)
    return rest


def join(state: LoopState, rank: int, run: int, after: int) -> None:
    """Make one run of two that follow each other in the ring, where the contents of the first follow those of the
    second, and no other has any of them."""
    end = ring_end(state, rank)
    if run == end or after == end:
        return
    row, other = state.runs[run], state.runs[after]
    if row.known != other.known or row.last - row.count != other.last:
        return
    if row.known == FINDABLE and not alone(state, rank, other.last - other.count + 1, row.last, run, after):
        return
    row.count += other.count
    unlink(state, after)
    drop(state, rank, after)


def unlink(state: LoopState, run: int) -> None:
    """Take a run out of the ring."""
    after, before = state.runs[run].after, state.runs[run].before
    state.runs[before].after = after
    state.runs[after].before = before


def link(state: LoopState, run: int, behind: int) -> None:
    """Put a run behind another of the ring."""
    after = state.runs[behind].after
    state.runs[run].after = after
    state.runs[run].before = behind
    state.runs[after].before = run
    state.runs[behind].after = run


def bucket_of(state: LoopState, key: int) -> int:
    """Where the table has all contents that differ from ``key`` in their index alone."""
    number = key // (2 * INDICES)
    return ((number ^ (number >> 20)) * 40503 + (number >> 11)) & (state.found.shape[1] - 1)


def find(state: LoopState, rank: int, key: int, most: int) -> tuple[int, int]:
    """The run of a content, of several the first, and in how many blocks from it on, up to ``most``, those of the
    contents that follow are the first, too; NONE where there is none. All differ in their index alone."""
    run = state.found[rank, bucket_of(state, key)] - 1
    while run != NONE:
        last = state.runs[run].last
        first = last - state.runs[run].count + 1
        if first <= key <= last:
            return run, min(most, last - key + 1)
        if key < first < key + most:
            most = first - key
        run = state.runs[run].next
    return NONE, most


def alone(state: LoopState, rank: int, first: int, last: int, run: int, other: int) -> bool:
    """Whether no runs but these two have any of the contents ``first`` .. ``last``."""
    each = state.found[rank, bucket_of(state, first)] - 1
    while each != NONE:
        row = state.runs[each]
        if each != run and each != other and row.last >= first and row.last - row.count < last:
            return False
        each = row.next
    return True


def enter(state: LoopState, rank: int, run: int) -> None:
    """Make a run findable, behind those that are."""
    bucket = bucket_of(state, state.runs[run].last)
    before = state.found[rank, bucket] - 1
    state.runs[run].next = NONE
    if before == NONE:
        state.found[rank, bucket] = run + 1
        return
    while state.runs[before].next != NONE:
        before = state.runs[before].next
    state.runs[before].next = run


def leave(state: LoopState, rank: int, run: int) -> None:
    """A run is no more to be found."""
    bucket = bucket_of(state, state.runs[run].last)
    before = state.found[rank, bucket] - 1
    if before == run:
        state.found[rank, bucket] = state.runs[run].next + 1
        return
    while state.runs[before].next != run:
        before = state.runs[before].next
    state.runs[before].next = state.runs[run].next


def drop(state: LoopState, rank: int, run: int) -> None:
    """A run has no blocks any more, and is free."""
    row = state.runs[run]
    if row.known == FINDABLE:
        leave(state, rank, run)
    row.count, row.next = 0, state.ranks[rank].spare
    state.ranks[rank].spare = run
