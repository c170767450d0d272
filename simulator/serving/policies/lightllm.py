"""LightLLM: every tenth iteration prompts alone, of requests that will fit until their ends."""

from __future__ import annotations

from ..queues import admit, cached_tokens, decode_all, first_waiting, fits, length, put, tokens_to_compute
from ..rules import SchedulerRules
from ..state import NONE, LoopState
from .policy import Policy


def lightllm(state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float) -> None:
    """LightLLM: every few decodes it tries a batch of prompts only, of those that will fit until their ends."""
    scheduler = state.ranks[rank]
    if scheduler.count == 0 or scheduler.clock >= rules.prefill_every:
        scheduler.clock = 0
        total = 0
        for position in range(scheduler.count):
            insert_by_rest(state, rank, position, state.running[rank, position])
        while scheduler.count < rules.max_seqs:
            slot = first_waiting(state, rank)
            if slot == NONE:
                break
            hit = cached_tokens(state, rules, rank, slot)
            tokens = tokens_to_compute(state, slot) - hit
            if total > 0 and total + tokens > rules.max_tokens:
                break
            insert_by_rest(state, rank, scheduler.count, slot)
            if (
                scheduler.count > 0
                and most_tokens(state, rank, scheduler.count + 1) > rules.blocks * rules.block_tokens
            ):
                break
            if not fits(state, rules, rank, slot, hit, length(state, slot), 0):
                break
            admit(state, rules, rank, slot, hit, length(state, slot), now_us)
            put(state, rules, rank, batch, slot, tokens)
            total += tokens
        if total > 0:
            return
    scheduler.clock += 1
    decode_all(state, rules, rank, batch, 0)


def waits_for_turn(state: LoopState, rules: SchedulerRules, rank: int) -> bool:
    """Whether it is not yet time to try prompts, whoever waits."""
    scheduler = state.ranks[rank]
    if scheduler.clock >= rules.prefill_every:
        return False
    scheduler.clock += 1
    return True


def insert_by_rest(state: LoopState, rank: int, count: int, slot: int) -> None:
    """Put a request among ``count`` others of the rank's list, which is in order of the output still to come."""
    remaining, position = state.slots[slot].output - state.slots[slot].made, count
    while position > 0:
        other = state.slots[state.order[rank, position - 1]]
        if other.output - other.made >= remaining:
            break
        state.order[rank, position] = state.order[rank, position - 1]
        position -= 1
    state.order[rank, position] = slot


def most_tokens(state: LoopState, rank: int, count: int) -> int:
    """The most tokens that the first requests of the list will ever hold together, each until its output's end.

    When the i-th to end does so, i of them have grown by what is left to it.
    """
    total, most = 0, 0
    for position in range(count):
        request = state.slots[state.order[rank, position]]
        total += request.input + request.made
        most = max(most, total + (position + 1) * (request.output - request.made))
    return most


POLICY = Policy("lightllm", lightllm, waits_for_turn, max_tokens=16_384, mixed=False)
