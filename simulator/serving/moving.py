"""Caches on their way from a pool that prefills to one that decodes.

A cache goes where the router says as soon as its prompt is computed, if that rank has blocks for it; else it waits, in
order, holding its blocks where it is; requests that were preempted there go before it. It moves over the link out of
its rank and the link into the other, each of which takes one cache after the other. Layers that are done go while
later ones are computed.
"""

from __future__ import annotations

from .blocks import blocks_for, caches_prefixes, give_back
from .due import push_due
from .queues import length, push_back, push_front
from .routing import route
from .rules import SchedulerRules, ServingSetup, first_decode_rank, rules_of
from .state import NONE, LoopState


def move(state: LoopState, setup: ServingSetup, slot: int, rank: int, took_us: float) -> None:
    """A prompt is computed: choose where it decodes, and send its cache there or let it wait for room."""
    to = route(state, setup, slot, first_decode_rank(setup), len(state.ranks))
    request, there = state.slots[slot], state.ranks[to]
    request.rank, request.to, request.next = -2 - rank, to, NONE
    there.outstanding += 1
    there.work += request.output - 1
    if there.moves == NONE and start_move(state, setup, slot, took_us * (1.0 - setup.move_exposed)):
        return
    if there.moves == NONE:
        there.moves = slot
    else:
        state.slots[there.last_move].next = slot
    there.last_move = slot


def start_moves(state: LoopState, setup: ServingSetup, rank: int) -> None:
    """Send the caches that wait for blocks of a rank, as far as there are any now."""
    scheduler = state.ranks[rank]
    while scheduler.moves != NONE:
        slot = scheduler.moves
        after = state.slots[slot].next
        if not start_move(state, setup, slot, 0.0):
            return
        scheduler.moves = after


def start_move(state: LoopState, setup: ServingSetup, slot: int, early_us: float) -> bool:
    """Send a cache, its first layers ``early_us`` ago; False, and nothing done, where there is no room for it."""
    request, now_us = state.slots[slot], state.totals[0].now_us
    here, there = state.ranks[-2 - request.rank], state.ranks[request.to]
    rules = rules_of(setup, request.to)
    need = 0 if caches_prefixes(state) else blocks_for(landing_tokens(state, rules, slot), rules.block_tokens)
    if need > 0 and (there.back > 0 or need + rules.watermark > there.free):
        return False
    there.free -= need
    there.peak = max(there.peak, rules.blocks - there.free)
    request.landing = need
    whole_us = setup.move_us + setup.move_token_us * request.computed
    begin_us = max(max(now_us - early_us, here.link_us), there.in_us)
    end_us = max(begin_us + whole_us, now_us + whole_us * setup.move_exposed)
    here.link_us, there.in_us = end_us, end_us
    state.totals[0].moved_tokens += request.computed
    request.moved_us = end_us - request.prefilled_us
    push_due(state, end_us, slot)
    return True


def landing_tokens(state: LoopState, rules: SchedulerRules, slot: int) -> int:
    """Tokens that a request must have blocks for where it decodes: as many as its scheduler admits it with."""
    request = state.slots[slot]
    if rules.reserves:
        return request.input + request.output
    return min(length(state, slot) + 1, request.input + request.output)


def land(state: LoopState, setup: ServingSetup, slot: int) -> int:
    """A cache has arrived: its blocks are free where it came from, and it waits where it is. Returns where it was."""
    request = state.slots[slot]
    rank = -2 - request.rank
    give_back(state, rules_of(setup, rank), rank, slot)
    state.ranks[rank].outstanding -= 1
    request.blocks, request.landing, request.rank = request.landing, 0, request.to
    if request.blocks > 0:
        request.landed = 1
        state.ranks[request.to].landed += 1
    if request.blocks > 0 and state.ranks[request.to].back > 0:
        push_front(state, request.to, slot)
    else:
        push_back(state, request.to, slot)
    return rank
