"""SGLang's scheduler: prompts before decodes, admitted by an estimate of what answers will still need.

What it follows is ``scheduler.py`` and ``schedule_policy.py`` of SGLang; tests play both side by side.
"""

from __future__ import annotations

from ..blocks import blocks_for, caches_prefixes, idle_hits, missing_blocks
from ..queues import (
    admit,
    cached_tokens,
    decode_all,
    first_waiting,
    fits,
    is_decoding,
    make_room,
    newest,
    nobody_new,
    preempt,
    put,
    tokens_to_compute,
)
from ..rules import SchedulerRules
from ..state import NONE, LoopState
from .policy import Policy

CLIPPED_OUTPUT = 4096  # tokens of output that are reserved at most
FIRST_RATIO, LAST_RATIO, RATIO_STEPS, RETRACT_STEPS = 0.7, 0.14, 600, 20  # of the estimate


def sglang(state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float) -> None:
    """SGLang: prompts first, in chunks, while an estimate of all outputs says that they fit; else all decodes.

    Once a prompt does not fit, no other is tried until a request leaves (``batch_is_full`` of its ``scheduler.py``).
    """
    scheduler = state.ranks[rank]
    poll(state, rules, rank)
    if scheduler.ratio < 0 or (scheduler.count == 0 and first_waiting(state, rank) == NONE):
        scheduler.ratio = min(FIRST_RATIO * rules.conservativeness, 1.0)
    if scheduler.count < scheduler.rows or scheduler.count == 0:
        scheduler.full = 0
    admit_landed(state, rules, rank, now_us)
    decodes, prompts, cut = sglang_prompts(state, rules, rank, batch, now_us)
    scheduler.clock = rules.wait_iterations if prompts > 0 else scheduler.clock + 1
    if prompts == 0:
        sglang_decodes(state, rules, rank, batch)
    elif rules.mixed and decodes > 0 and decode_blocks(state, rules, rank) <= scheduler.free:
        decode_all(state, rules, rank, batch, 0)
        scheduler.full = 0
    if cut or (prompts > 0 and decodes == 0):
        scheduler.full = 0
    scheduler.rows = scheduler.count


def admit_landed(state: LoopState, rules: SchedulerRules, rank: int, now_us: float) -> None:
    """Requests whose cache has come from a pool of prompts join the decodes of this iteration.

    No prompt is run for them (``get_new_prebuilt_batch`` of SGLang's ``disaggregation/decode.py``).
    """
    while state.ranks[rank].count < rules.max_seqs:
        slot = first_waiting(state, rank)
        if slot == NONE or not is_decoding(state, slot):
            break
        tokens = state.slots[slot].computed + 1
        if not fits(state, rules, rank, slot, 0, tokens, 0):
            break
        admit(state, rules, rank, slot, 0, tokens, now_us)


def sglang_prompts(
    state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float
) -> tuple[int, int, bool]:
    """The prompt that was cut, then new ones (``PrefillAdder`` of SGLang's ``schedule_policy.py``).

    Returns how many requests decode, how many prompts are in the batch, and whether one of them was cut.
    """
    slots, scheduler, page, fixed = state.slots, state.ranks[rank], rules.block_tokens, rules.ignore_eos > 0
    begun, decodes, promised = promised_tokens(state, rank, 1.0 if fixed else scheduler.ratio)
    prompts, cut = 0, False
    beside = decodes if rules.mixed else 0
    chunk, budget = rules.chunk - beside, rules.max_tokens - beside
    now = scheduler.free * page - beside
    room = now - promised
    if begun != NONE:
        slot = state.running[rank, begun]
        tokens = min(tokens_to_compute(state, slot), min(chunk, int(room)) if int(room) > 0 else chunk)
        cut = tokens < tokens_to_compute(state, slot)
        if make_room(state, rules, rank, begun, slots[slot].computed + tokens, 0) != NONE:
            put(state, rules, rank, batch, slot, tokens)
            prompts = 1
        paged = blocks_for(tokens, page) * page
        chunk, budget, now = chunk - paged, budget - paged, now - paged - page
        room -= paged + page + (0 if cut else min(slots[slot].output, CLIPPED_OUTPUT))
    ends = 0  # requests whose ends are in the rank's list
    while not scheduler.full:
        slot = first_waiting(state, rank)
        if slot == NONE or (room > 0 and min(chunk, budget) <= 0):
            break
        if scheduler.count >= rules.max_seqs:
            scheduler.full = 1
            break
        hit = cached_tokens(state, rules, rank, slot)
        room -= idle_hits(state, rules, rank, slot, hit) * page if hit > 0 else 0
        tokens = tokens_to_compute(state, slot) - hit
        output = min(slots[slot].output - slots[slot].made, CLIPPED_OUTPUT)
        if fixed and not caches_prefixes(state):
            refused = not ends_fit(state, rules, rank, slot, ends, tokens, min(now, room), now)
            ends = scheduler.count + 1
        else:
            refused = tokens + output + page >= room
        if scheduler.count > 0 and refused:
            scheduler.full = 1
            break
        before = slots[slot].computed + hit
        if blocks_for(tokens, page) * page > chunk:
            tokens = (before + chunk // page * page) // page * page - before
            cut = True
        if tokens <= 0 or not fits(state, rules, rank, slot, hit, before + tokens, 0):
            break
        admit(state, rules, rank, slot, hit, before + tokens, now_us)
        put(state, rules, rank, batch, slot, tokens)
        prompts += 1
        paged = blocks_for(tokens, page) * page
        chunk, budget, now = chunk - paged, budget - paged, now - paged - page
        room -= paged + page + (0 if cut else min(slots[slot].output, CLIPPED_OUTPUT))
        if room <= 0:
            scheduler.full = 1
    return decodes, prompts, cut


def promised_tokens(state: LoopState, rank: int, ratio: float) -> tuple[int, int, float]:
    """The place of the prompt that was cut among those that run (NONE where none was), how many decode, and the tokens
    that are kept for them: a ``ratio`` of what is left of their answers."""
    begun, decodes, promised = NONE, 0, 0.0
    for position in range(state.ranks[rank].count):
        slot = state.running[rank, position]
        if tokens_to_compute(state, slot) > 0 and not is_decoding(state, slot):
            begun = position
        else:
            decodes += 1
            promised += min(state.slots[slot].output - state.slots[slot].made, CLIPPED_OUTPUT) * ratio
    return begun, decodes, promised


def ends_fit(
    state: LoopState, rules: SchedulerRules, rank: int, slot: int, ends: int, tokens: int, most: float, now: float
) -> bool:
    """Whether all that run and one more find room until each has its last token, where answers are as long as asked
    (``add_one_req_ignore_eos`` of SGLang's ``schedule_policy.py``).

    ``tokens`` of its prompt are to be computed, for which ``most`` tokens must be free; ``now`` are before it. ``ends``
    of the requests are in the rank's list already, in the order in which they end.
    """
    paged = blocks_for(tokens, rules.block_tokens) * rules.block_tokens + rules.block_tokens
    if paged > most:
        return False
    count = state.ranks[rank].count
    if ends == 0:
        for position in range(count):
            insert_by_end(state, rank, position, position, state.running[rank, position])
    insert_by_end(state, rank, count, count if ends == 0 else count - 1, slot)
    free = now - paged
    for position in range(count + 1):
        request = state.slots[state.order[rank, position]]
        together = count + 1 - position
        if free - (request.output - request.made) * together <= together:
            return False
        free += request.input + request.made
    return True


def insert_by_end(state: LoopState, rank: int, count: int, most: int, slot: int) -> None:
    """Put a request among ``count`` others of the rank's list before the first that ends no sooner, at the place
    ``most`` at last: SGLang puts a later one never behind all."""
    remaining, position = state.slots[slot].output - state.slots[slot].made, 0
    while position < most:
        other = state.slots[state.order[rank, position]]
        if remaining <= other.output - other.made:
            break
        position += 1
    for behind in range(count, position, -1):
        state.order[rank, behind] = state.order[rank, behind - 1]
    state.order[rank, position] = slot


def poll(state: LoopState, rules: SchedulerRules, rank: int) -> None:
    """SGLang looks for new requests after prompts, when nothing runs, and else every so many decodes alone
    (``scheduler_recv_skipper.py``): who comes in between is not seen yet."""
    scheduler = state.ranks[rank]
    if scheduler.count == 0 or scheduler.clock >= rules.wait_iterations:
        scheduler.polled_us, scheduler.clock = scheduler.visible_us, 0
    scheduler.visible_us = scheduler.polled_us


def ease_ratio(rules: SchedulerRules, ratio: float) -> float:
    """SGLang's estimate of outputs after decodes for which there was room."""
    first = min(FIRST_RATIO * rules.conservativeness, 1.0)
    step = first * (1 - LAST_RATIO) / RATIO_STEPS
    return max(ratio - step, first * LAST_RATIO)


def decode_blocks(state: LoopState, rules: SchedulerRules, rank: int) -> int:
    """Blocks that the next token of every decoding request needs."""
    need = 0
    for position in range(state.ranks[rank].count):
        slot = state.running[rank, position]
        request = state.slots[slot]
        if is_decoding(state, slot) and tokens_to_compute(state, slot) == 1:
            need += missing_blocks(
                state, rules, slot, min(request.computed + 1 + rules.drafts, request.input + request.output)
            )
    return need


def sglang_decodes(state: LoopState, rules: SchedulerRules, rank: int, batch: int) -> None:
    """All decodes; for lack of blocks those with the least output go back, and the estimate follows what is left."""
    slots, ranks = state.slots, state.ranks
    retracted = False
    while decode_blocks(state, rules, rank) > ranks[rank].free and ranks[rank].count > 1:
        least = newest(state, rank, 0)
        if least == NONE:
            break
        for position in range(ranks[rank].count):
            slot, other = state.running[rank, position], state.running[rank, least]
            shorter = slots[slot].made < slots[other].made
            alike = slots[slot].made == slots[other].made
            longer = slots[slot].input > slots[other].input
            later = slots[slot].input == slots[other].input and position > least
            if not slots[slot].waits and (shorter or (alike and (longer or later))):
                least = position
        preempt(state, rules, rank, least, True)
        retracted = True
    if retracted:
        output_tokens, most = RETRACT_STEPS * ranks[rank].count, 1
        for position in range(ranks[rank].count):
            output_tokens += slots[state.running[rank, position]].made
            most += slots[state.running[rank, position]].output
        ranks[rank].ratio = min(1.0, output_tokens / most)
        ranks[rank].full = 0
    elif ranks[rank].count > 0:
        ranks[rank].ratio = ease_ratio(rules, ranks[rank].ratio)
    decode_all(state, rules, rank, batch, 0)


def repeats_after_poll(state: LoopState, rules: SchedulerRules, rank: int) -> bool:
    """Whether nobody new is seen; the estimate follows the decodes."""
    scheduler = state.ranks[rank]
    poll(state, rules, rank)
    if not nobody_new(state, rules, rank):
        return False
    scheduler.clock += 1
    scheduler.ratio = ease_ratio(rules, scheduler.ratio)
    return True


POLICY = Policy(
    "sglang",
    sglang,
    repeats_after_poll,
    engine="sglang",
    max_seqs=1024,
    max_tokens=16_384,
    lag=True,
    mixed=False,
    counts_ends=True,
)
