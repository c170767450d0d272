"""KV blocks of a rank: how many a request holds, and which content they have where prefixes are cached.

Without prefix caching blocks are only counted. With it they are those of vLLM's block pool: a full block is known by
its content from the moment it is scheduled; when nobody uses it any more it stays findable, last in the line of blocks
to be taken; a block that is not full goes first. A request that comes back finds what is left of its own: what nobody
else has is made findable when it goes, if it is to come back.
"""

from __future__ import annotations

from .rules import SchedulerRules
from .state import LINE, NONE, LoopState

INDICES = 1 << 20  # of contents that differ in their index alone
OWN = -2  # key of a block whose content is its request's alone, which needs not find it while it has it


def blocks_for(tokens: int, size: int) -> int:
    """Blocks that hold so many tokens."""
    return (tokens + size - 1) // size


def caches_prefixes(state: LoopState) -> bool:
    """Whether prefixes are cached."""
    return len(state.blocks) > 0


def ring_of(state: LoopState, rank: int) -> int:
    """Where the blocks of a rank begin."""
    return rank * (len(state.blocks) // len(state.ranks))


def ring_end(state: LoopState) -> int:
    """The end of a rank's ring, behind its last block."""
    return len(state.blocks) // len(state.ranks) - 1


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
        take_blocks(state, rank, slot, count)
    request.blocks += count
    scheduler.free -= count
    scheduler.peak = max(scheduler.peak, rules.blocks - scheduler.free)


def take_blocks(state: LoopState, rank: int, slot: int, count: int) -> None:
    """The first free blocks of the ring, with their content forgotten, to the end of a request's row of the table."""
    base, end, request = ring_of(state, rank), ring_end(state), state.slots[slot]
    block = state.blocks[base + end].after
    for index in range(request.blocks, request.blocks + count):
        forget(state, rank, block)
        state.blocks[base + block].users = 1
        state.table[rank, request.seat, index] = block
        block = state.blocks[base + block].after
    state.blocks[base + end].after, state.blocks[base + block].before = block, end


def give_back(state: LoopState, rules: SchedulerRules, rank: int, slot: int) -> None:
    """Free all blocks of a request; those with content stay findable until they are taken."""
    request = state.slots[slot]
    if caches_prefixes(state):
        if request.seat != NONE:
            if request.made < request.output:
                remember_own(state, rules, rank, slot)
            give_back_blocks(state, rank, slot)
    else:
        state.ranks[rank].free += request.blocks
    request.blocks = 0


def give_back_blocks(state: LoopState, rank: int, slot: int) -> None:
    """The last block first: those without content to the front of the ring, the others to its end."""
    base, end, request, scheduler = ring_of(state, rank), ring_end(state), state.slots[slot], state.ranks[rank]
    front = end
    for index in range(request.blocks - 1, -1, -1):
        block = state.table[rank, request.seat, index]
        freed = state.blocks[base + block]
        freed.users -= 1
        if freed.users == 0:
            scheduler.free += 1
            if freed.key == NONE:
                link(state, rank, block, front)
                front = block
            else:
                link(state, rank, block, state.blocks[base + end].before)
    state.seats[rank, scheduler.seats] = request.seat
    scheduler.seats += 1
    request.seat = NONE


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
    if request.keys != NONE:
        span = ((index + 1) * size - 1) // state.totals[0].key_tokens
        shared = min(shared, (span + 1) * state.totals[0].key_tokens // size)
    return min(end, shared) - index


def hit_tokens(state: LoopState, rules: SchedulerRules, rank: int, slot: int) -> int:
    """Tokens of a request that are in the rank's cache: whole blocks from its first on, its last token left out."""
    if not caches_prefixes(state):
        return 0
    most = (state.slots[slot].input + state.slots[slot].made - 1) // rules.block_tokens
    index = end = key = 0
    while index < most:
        if index == end:
            key, end = content(state, rules, slot, index), index + alike(state, rules, slot, index, most)
        if find(state, rank, key) == NONE:
            break
        index, key = index + 1, key + 1
    return index * rules.block_tokens


def idle_hits(state: LoopState, rules: SchedulerRules, rank: int, slot: int, tokens: int) -> int:
    """Of the cached blocks of so many tokens those on the GPU that nobody uses, which are free until they are hit."""
    idle, base = 0, ring_of(state, rank)
    for index in range((tokens - state.slots[slot].tiered) // rules.block_tokens):
        if state.blocks[base + find(state, rank, content(state, rules, slot, index))].users == 0:
            idle += 1
    return idle


def sit(state: LoopState, rules: SchedulerRules, rank: int, slot: int, tokens: int) -> None:
    """Give an admitted request a row of the block table, with the cached blocks of so many tokens in it."""
    scheduler, request, base = state.ranks[rank], state.slots[slot], ring_of(state, rank)
    scheduler.seats -= 1
    request.seat = state.seats[rank, scheduler.seats]
    for index in range(tokens // rules.block_tokens):
        block = find(state, rank, content(state, rules, slot, index))
        if state.blocks[base + block].users == 0:
            unlink(state, rank, block)
            scheduler.free -= 1
        state.blocks[base + block].users += 1
        state.table[rank, request.seat, index] = block
    request.blocks = tokens // rules.block_tokens
    state.totals[0].hit_tokens += tokens


def remember(state: LoopState, rules: SchedulerRules, rank: int, slot: int, before: int, after: int) -> None:
    """Make the blocks findable that become full when tokens ``before`` .. ``after`` are computed."""
    base, request, size = ring_of(state, rank), state.slots[slot], rules.block_tokens
    for index in range(before // size, after // size):
        block = state.table[rank, request.seat, index]
        if (index + 1) * size > request.shared:
            state.blocks[base + block].key = OWN
        else:
            state.blocks[base + block].key = content(state, rules, slot, index)
            insert(state, rank, block)


def remember_own(state: LoopState, rules: SchedulerRules, rank: int, slot: int) -> None:
    """Make the blocks of a request findable whose content is its own."""
    base, request = ring_of(state, rank), state.slots[slot]
    for index in range(request.shared // rules.block_tokens, request.blocks):
        block = state.table[rank, request.seat, index]
        if state.blocks[base + block].key == OWN:
            state.blocks[base + block].key = content(state, rules, slot, index)
            insert(state, rank, block)


# --- the ring of free blocks, and the table from content to block ---------------------------------------------------


def unlink(state: LoopState, rank: int, block: int) -> None:
    """Take a block out of the ring."""
    base = ring_of(state, rank)
    after, before = state.blocks[base + block].after, state.blocks[base + block].before
    state.blocks[base + before].after = after
    state.blocks[base + after].before = before


def link(state: LoopState, rank: int, block: int, behind: int) -> None:
    """Put a block behind another of the ring."""
    base = ring_of(state, rank)
    after = state.blocks[base + behind].after
    state.blocks[base + block].after = after
    state.blocks[base + block].before = behind
    state.blocks[base + after].before = block
    state.blocks[base + behind].after = block


def home(key: int, size: int) -> int:
    """Where the search for a key begins. Contents that follow each other lie side by side, :data:`LINE` of them."""
    line = key // LINE
    mixed = ((line ^ (line >> 31)) & 0xFFFFFFFFFF) * 8388593 >> 20
    return (mixed & (size // LINE - 1)) * LINE + ((key ^ (mixed >> 20)) & (LINE - 1))


def next_bucket(bucket: int, size: int) -> int:
    """Where the search goes on: at the same place of the next line, and behind the last line at the next place."""
    after = bucket + LINE
    return after if after < size else (bucket + 1) & (LINE - 1)


def step_of(bucket: int, size: int) -> int:
    """The number of a bucket in the order of searches."""
    return (bucket & (LINE - 1)) * (size // LINE) + bucket // LINE


def find(state: LoopState, rank: int, key: int) -> int:
    """A block of this content, of several the first; NONE where there is none."""
    base, size = ring_of(state, rank), state.found.shape[1]
    bucket = home(key, size)
    while state.found[rank, bucket] > 0:
        block = state.found[rank, bucket] - 1
        if state.blocks[base + block].key == key:
            return block
        bucket = next_bucket(bucket, size)
    return NONE


def insert(state: LoopState, rank: int, block: int) -> None:
    """Make a block findable by its key."""
    size = state.found.shape[1]
    bucket = home(state.blocks[ring_of(state, rank) + block].key, size)
    while state.found[rank, bucket] > 0:
        bucket = next_bucket(bucket, size)
    state.found[rank, bucket] = block + 1


def forget(state: LoopState, rank: int, block: int) -> None:
    """A block's content is no more to be found; what was pushed on by it in the table moves back."""
    base, size = ring_of(state, rank), state.found.shape[1]
    key = state.blocks[base + block].key
    state.blocks[base + block].key = NONE
    if key in (NONE, OWN):
        return
    hole = home(key, size)
    while state.found[rank, hole] != block + 1:
        hole = next_bucket(hole, size)
    bucket = next_bucket(hole, size)
    while state.found[rank, bucket] > 0:
        ideal = step_of(home(state.blocks[base + state.found[rank, bucket] - 1].key, size), size)
        here = step_of(bucket, size)
        if ((here - ideal) & (size - 1)) >= ((here - step_of(hole, size)) & (size - 1)):
            state.found[rank, hole] = state.found[rank, bucket]
            hole = bucket
        bucket = next_bucket(bucket, size)
    state.found[rank, hole] = 0
