"""The order of a rank's queue: as requests come, or by priority, as vLLM's ``PriorityRequestQueue`` has it
(``v1/core/sched/request_queue.py``): the lower priority first, of equal ones who came first.

Compiled with the loop (:mod:`.compiled`).
"""

from __future__ import annotations

from .state import NONE, LoopState


def goes_before(state: LoopState, slot: int, other: int) -> bool:
    """Whether a request goes before another; one whose cache has landed here goes before all that have none."""
    request, second = state.slots[slot], state.slots[other]
    if request.landed != second.landed:
        return request.landed > second.landed
    if request.priority != second.priority:
        return request.priority < second.priority
    return request.request < second.request


def put_in_order(state: LoopState, rank: int, slot: int) -> None:
    """A request waits before the first that it goes before."""
    scheduler = state.ranks[rank]
    scheduler.passed = NONE
    before, after = NONE, scheduler.head
    if scheduler.tail != NONE and goes_before(state, scheduler.tail, slot):
        before, after = scheduler.tail, NONE
    while after != NONE and goes_before(state, after, slot):
        before, after = after, state.slots[after].next
    state.slots[slot].next = after
    if before == NONE:
        scheduler.head = slot
    else:
        state.slots[before].next = slot
    if after == NONE:
        scheduler.tail = slot


def take_out(state: LoopState, rank: int, slot: int) -> None:
    """A request waits no more, wherever in the queue it was."""
    scheduler = state.ranks[rank]
    before, at = NONE, scheduler.head
    while at != slot:
        before, at = at, state.slots[at].next
    after = state.slots[slot].next
    if before == NONE:
        scheduler.head = after
    else:
        state.slots[before].next = after
    if after == NONE:
        scheduler.tail = before
    if scheduler.passed == slot:
        scheduler.passed = before
    scheduler.waiting -= 1
    state.totals[0].waiting -= 1
