"""Which tokens are in the next iteration: one function per engine's scheduler.

Each looks at what runs and what waits on a rank and puts entries into the batch; it may preempt. SGLang's has a module
of its own. A policy of a user's own has the same form: ``form(state, rules, rank, batch, now_us)``. What they follow
stands in docs/serving.md#policies, engine by engine.
"""

from __future__ import annotations

from .blocks import blocks_for
from .queues import (
    admit,
    cached,
    decode_all,
    decoding,
    first_waiting,
    fits,
    length,
    make_room,
    put,
    rest,
)
from .rules import (
    FASTER_TRANSFORMER,
    LIGHTLLM,
    ORCA,
    SARATHI,
    SGLANG,
    SPLITWISE,
    TRTLLM,
    TRTLLM_MAX,
    VLLM,
    VLLM_V0,
    SchedulerRules,
)
from .sglang import sglang
from .state import NONE, LoopState


def form_batch(state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float) -> None:
    """The next batch of a rank by the policy of its rules."""
    if rules.policy == VLLM:
        vllm(state, rules, rank, batch, now_us)
    elif rules.policy == VLLM_V0 or rules.policy == SPLITWISE:
        vllm_v0(state, rules, rank, batch, now_us)
    elif rules.policy == SARATHI:
        sarathi(state, rules, rank, batch, now_us)
    elif rules.policy == ORCA:
        orca(state, rules, rank, batch, now_us)
    elif rules.policy == FASTER_TRANSFORMER:
        faster_transformer(state, rules, rank, batch, now_us)
    elif rules.policy == LIGHTLLM:
        lightllm(state, rules, rank, batch, now_us)
    elif rules.policy == SGLANG:
        sglang(state, rules, rank, batch, now_us)
    elif rules.policy == TRTLLM or rules.policy == TRTLLM_MAX:
        trtllm(state, rules, rank, batch, now_us)


def vllm(state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float) -> None:
    """vLLM v1: running requests in order of admission, decodes and chunks alike, then new ones, within one budget."""
    slots, ranks = state.slots, state.ranks
    budget, gone, place = rules.max_tokens, 0, 0
    longest = rules.long_prefill if ranks[rank].count + ranks[rank].waiting > 1 else 0
    while place < ranks[rank].count and budget > 0:
        slot = state.running[rank, place]
        tokens = min(rest(state, slot), budget)
        if longest > 0:
            tokens = min(tokens, longest)
        if tokens > 0:
            freed = make_room(state, rules, rank, place, slots[slot].computed + tokens, 0)
            if freed == NONE:
                gone += 1
                break
            gone += freed
            put(state, rules, rank, batch, slot, tokens)
            budget -= tokens
        place += 1
    while gone == 0 and budget > 0 and ranks[rank].count < rules.max_seqs:
        slot = first_waiting(state, rank)
        if slot == NONE:
            break
        hit = cached(state, rules, rank, slot)
        tokens = rest(state, slot) - hit
        if longest > 0:
            tokens = min(tokens, longest)
        if tokens > budget and not rules.chunked and budget < rules.max_tokens:
            break
        tokens = min(tokens, budget)
        have = slots[slot].computed + hit + tokens
        spare = rules.watermark if ranks[rank].count > 0 else 0
        if not fits(state, rules, rank, slot, hit, length(state, slot) if rules.whole_prompt else have, spare):
            break
        admit(state, rules, rank, slot, hit, have, now_us)
        put(state, rules, rank, batch, slot, tokens)
        budget -= tokens


def vllm_v0(state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float) -> None:
    """vLLM v0: a batch of whole prompts where any fits, else all decodes; Splitwise's pools have the same batches."""
    ranks = state.ranks
    entries, total, longest = 0, 0, 0
    while ranks[rank].count < rules.max_seqs:
        slot = first_waiting(state, rank)
        if slot == NONE:
            break
        hit = cached(state, rules, rank, slot)
        tokens = rest(state, slot) - hit
        back = state.slots[slot].computed > 0  # its cache comes from elsewhere: it decodes with the others
        most = (entries + 1) * max(longest, tokens) if rules.padded else total + tokens
        if not fits(state, rules, rank, slot, hit, length(state, slot), rules.watermark):
            break
        if entries > 0 and most > rules.max_tokens and not back:
            break
        admit(state, rules, rank, slot, hit, length(state, slot), now_us)
        if back:
            continue
        put(state, rules, rank, batch, slot, tokens)
        entries, total, longest = entries + 1, total + tokens, max(longest, tokens)
    if entries == 0:
        decode_all(state, rules, rank, batch, 1)


def sarathi(state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float) -> None:
    """Sarathi: all decodes, then prompts that have begun, then new ones, whose blocks are taken whole; prompt tokens
    fill what decodes leave of the chunk."""
    slots, ranks = state.slots, state.ranks
    decode_all(state, rules, rank, batch, 1)
    left = rules.chunk - state.batches[batch].size
    for place in range(ranks[rank].count):
        slot = state.running[rank, place]
        tokens = min(rest(state, slot), left)
        if tokens > 0 and not decoding(state, slot):
            put(state, rules, rank, batch, slot, tokens)
            left -= tokens
    while left > 0 and ranks[rank].count < rules.max_seqs:
        slot = first_waiting(state, rank)
        if slot == NONE:
            break
        hit = cached(state, rules, rank, slot)
        if not fits(state, rules, rank, slot, hit, length(state, slot), rules.watermark):
            break
        admit(state, rules, rank, slot, hit, length(state, slot), now_us)
        tokens = min(slots[slot].input + slots[slot].made - slots[slot].computed, left)
        put(state, rules, rank, batch, slot, tokens)
        left -= tokens


def orca(state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float) -> None:
    """Orca: all that run, and new prompts whole beside them; blocks for prompt and output are taken at the start."""
    ranks = state.ranks
    for place in range(ranks[rank].count):
        slot = state.running[rank, place]
        if rest(state, slot) > 0:
            put(state, rules, rank, batch, slot, rest(state, slot))
    while ranks[rank].count < rules.max_seqs:
        slot = first_waiting(state, rank)
        if slot == NONE or not start_whole(state, rules, rank, batch, slot, now_us):
            break


def start_whole(state: LoopState, rules: SchedulerRules, rank: int, batch: int, slot: int, now_us: float) -> bool:
    """Admit a request with blocks for prompt and output and schedule all of its prompt; False where they do not fit."""
    need = state.slots[slot].input + state.slots[slot].output
    hit = cached(state, rules, rank, slot)
    if not fits(state, rules, rank, slot, hit, need, 0):
        return False
    admit(state, rules, rank, slot, hit, need, now_us)
    put(state, rules, rank, batch, slot, rest(state, slot))
    return True


def faster_transformer(state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float) -> None:
    """FasterTransformer: a batch is taken, padded to its longest, and runs until its longest output ends."""
    ranks, sums = state.ranks, state.batches[batch]
    if ranks[rank].count > 0:
        for place in range(ranks[rank].count):
            if rest(state, state.running[rank, place]) > 0:
                put(state, rules, rank, batch, state.running[rank, place], 1)
        if rules.padded and sums.decodes > 0:
            sums.decode_context *= ranks[rank].rows / sums.decodes
            sums.decodes = ranks[rank].rows
        return
    longest = 0
    while ranks[rank].count < rules.max_seqs:
        slot = first_waiting(state, rank)
        if slot == NONE or not start_whole(state, rules, rank, batch, slot, now_us):
            break
        longest = max(longest, state.slots[slot].input)
    ranks[rank].rows = ranks[rank].count
    if rules.padded and sums.prefill_tokens > 0:
        sums.prefill_tokens = ranks[rank].rows * longest
        sums.prefill_pairs = sums.prefill_tokens * 0.5 * (longest + 1)


def lightllm(state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float) -> None:
    """LightLLM: every few decodes it tries a batch of prompts only, of those that will fit until their ends."""
    own = state.ranks[rank]
    if own.count == 0 or own.clock >= rules.prefill_every:
        own.clock = 0
        total = 0
        for place in range(own.count):
            insert_by_rest(state, rank, place, state.running[rank, place])
        while own.count < rules.max_seqs:
            slot = first_waiting(state, rank)
            if slot == NONE:
                break
            hit = cached(state, rules, rank, slot)
            tokens = rest(state, slot) - hit
            if total > 0 and total + tokens > rules.max_tokens:
                break
            insert_by_rest(state, rank, own.count, slot)
            if own.count > 0 and most_tokens(state, rank, own.count + 1) > rules.blocks * rules.block_tokens:
                break
            if not fits(state, rules, rank, slot, hit, length(state, slot), 0):
                break
            admit(state, rules, rank, slot, hit, length(state, slot), now_us)
            put(state, rules, rank, batch, slot, tokens)
            total += tokens
        if total > 0:
            return
    own.clock += 1
    decode_all(state, rules, rank, batch, 0)


def insert_by_rest(state: LoopState, rank: int, count: int, slot: int) -> None:
    """Put a request among ``count`` others of the rank's list, which is in order of the output still to come."""
    left, place = state.slots[slot].output - state.slots[slot].made, count
    while place > 0:
        other = state.slots[state.order[rank, place - 1]]
        if other.output - other.made >= left:
            break
        state.order[rank, place] = state.order[rank, place - 1]
        place -= 1
    state.order[rank, place] = slot


def most_tokens(state: LoopState, rank: int, count: int) -> int:
    """The most tokens that the first requests of the list will ever hold together, each until its output's end.

    When the i-th to end does so, i of them have grown by what is left to it.
    """
    total, most = 0, 0
    for place in range(count):
        each = state.slots[state.order[rank, place]]
        total += each.input + each.made
        most = max(most, total + (place + 1) * (each.output - each.made))
    return most


def trtllm(state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float) -> None:
    """TensorRT-LLM: decodes, then prompts up to the first that does not fit the budget; a request starts when blocks
    for prompt and output are free, or (max utilisation) for its prompt, and then the newest is paused for lack."""
    slots, ranks = state.slots, state.ranks
    gone = ranks[rank].count
    decode_all(state, rules, rank, batch, 0)
    gone -= ranks[rank].count
    budget = rules.max_tokens - state.batches[batch].size
    for place in range(ranks[rank].count):
        slot = state.running[rank, place]
        tokens = min(rest(state, slot), budget)
        if tokens > 0 and not decoding(state, slot):
            put(state, rules, rank, batch, slot, tokens)
            budget -= tokens
    if ranks[rank].held or (rules.wait_iterations > 0 and held_back(state, rules, rank, batch, budget)):
        return
    while gone == 0 and budget > 0 and ranks[rank].count < rules.max_seqs:
        slot = first_waiting(state, rank)
        if slot == NONE:
            break
        hit = cached(state, rules, rank, slot)
        tokens = rest(state, slot) - hit
        if tokens > budget and not rules.chunked and budget < rules.max_tokens:
            break
        tokens = min(tokens, budget)
        need = slots[slot].input + slots[slot].output if rules.policy == TRTLLM else length(state, slot) + 1
        if not fits(state, rules, rank, slot, hit, need, 0):
            break
        admit(state, rules, rank, slot, hit, need, now_us)
        put(state, rules, rank, batch, slot, tokens)
        budget -= tokens


def wait_for_ranks(state: LoopState, rules: SchedulerRules, first: int, count: int) -> bool:
    """Whether prompts of ranks in lockstep wait beside decodes until each rank has one that can start
    (``_balance_adp_requests`` of TensorRT-LLM's ``py_executor.py``)."""
    own, prompts, decodes = state.ranks[first], 0, 0
    for rank in range(first, first + count):
        slot = first_waiting(state, rank)
        if slot != NONE and state.ranks[rank].count < rules.max_seqs:
            need = state.slots[slot].input + state.slots[slot].output
            prompts += 1 if fits(state, rules, rank, slot, cached(state, rules, rank, slot), need, 0) else 0
        decodes += 1 if state.ranks[rank].count > 0 else 0
    if prompts == count:
        own.apart = 0
        waits = decodes == count and own.gathered < rules.gather_iterations
        own.gathered = own.gathered + 1 if waits else 0
        return waits
    own.apart += 1
    if own.apart < rules.balance_iterations and decodes == count:
        return True
    own.apart = 0
    return False


def held_back(state: LoopState, rules: SchedulerRules, rank: int, batch: int, budget: float) -> bool:
    """Whether prompts that could start wait for more of them, beside decodes: for some iterations, or until the batch
    has enough tokens (``_waiting_requests`` of TensorRT-LLM's ``py_executor.py``)."""
    own, slot = state.ranks[rank], first_waiting(state, rank)
    if slot == NONE or state.batches[batch].decodes == 0 or own.count >= rules.max_seqs:
        return False
    left, seats = budget, rules.max_seqs - own.count
    blocks = own.free
    while slot != NONE and seats > 0 and state.slots[slot].arrival_us <= own.visible_us:
        tokens = rest(state, slot)
        blocks -= blocks_for(state.slots[slot].input + state.slots[slot].output, rules.block_tokens)
        if tokens > left or blocks < 0:
            break
        left -= tokens
        seats -= 1
        slot = state.slots[slot].next
    if left == budget:
        return False
    if own.clock >= rules.wait_iterations or state.batches[batch].size + budget - left >= rules.wait_tokens:
        own.clock = 0
        return False
    own.clock += 1
    return True
