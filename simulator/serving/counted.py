"""vLLM's balance between its data-parallel ranks, whose counts of requests are old when they are read.

Each engine tells a coordinator how many requests run and wait on it once a step has ended, without those that came in
while it ran (``DPEngineCoreProc.run_busy_loop``, ``v1/engine/core.py``). The coordinator passes on what changed every
100 ms at most, and waits 50 ms for other engines' counts of that step (``v1/engine/coordinator.py``). In between the
API server adds each request that it sends to those that wait, until the next counts replace its own. A request goes to
the rank where 4 times those that wait plus those that run are fewest, of equal ones to the first
(``DPLBAsyncMPClient.get_core_engine_for_request``, ``v1/engine/core_client.py``, before pull requests 41626 and 47420).
So a rank that is full gets more requests while others have room. There is one API server.

Compiled with the loop (:mod:`.compiled`).
"""

from __future__ import annotations

from .fleet import takes
from .rules import ServingSetup
from .state import LoopState

EVERY_US, GATHER_US = 100e3, 50e3
OF_WAITING = 4  # requests that run weigh as much as one that waits


def by_counts(state: LoopState, setup: ServingSetup, slot: int, first: int, last: int) -> int:
    """The least of 4 for each request that waits and 1 for each that runs, by counts that are 0.1 s old (vLLM's own
    balance between data-parallel ranks)."""
    pass_on(state)
    best, least = first, 1 << 60
    for rank in range(first, last):
        score = OF_WAITING * state.ranks[rank].known_waiting + state.ranks[rank].known_running
        if score < least and (setup.choosy == 0 or takes(state, setup, slot, rank)):
            best, least = rank, score
    state.ranks[best].known_waiting += 1
    return best


def tell(state: LoopState, first: int, count: int) -> None:
    """The ranks of a replica, whose iteration has ended, tell how many requests run and wait on them."""
    pass_on(state)
    totals = state.totals[0]
    for rank in range(first, first + count):
        scheduler = state.ranks[rank]
        waiting, running = max(scheduler.waiting - scheduler.fresh, 0), scheduler.count
        if waiting != scheduler.told_waiting or running != scheduler.told_running:
            scheduler.told_waiting, scheduler.told_running = waiting, running
            if totals.told == 0:
                totals.told, totals.told_us = 1, max(totals.told_us + EVERY_US, totals.now_us + GATHER_US)


def pass_on(state: LoopState) -> None:
    """Counts that were told come to the API server, where it is time."""
    totals = state.totals[0]
    if totals.told == 0 or totals.now_us < totals.told_us:
        return
    totals.told = 0
    for rank in range(len(state.ranks)):
        scheduler = state.ranks[rank]
        scheduler.known_waiting, scheduler.known_running = scheduler.told_waiting, scheduler.told_running
