"""Replicas that come and go: started and stopped by an autoscaler, failed and repaired.

A replica is off, starts, takes requests, drains (it ends what it has and takes nothing new), or is down until it is
repaired. What happens at a time stands in the heap of :mod:`.due`, under codes of its own; of each replica the next
failure stands there, whatever it does, as failures know no past (they are exponential, each replica with random numbers
of its own). Requests that no replica takes are held in the order in which they came.

Compiled with the loop (:mod:`.compiled`).
"""

from __future__ import annotations

import math

from .blocks import caches_prefixes, give_back, lose_contents
from .due import push_due
from .lanes import set_end
from .limits import FAILED, WITHIN, limit_of
from .repeating import catch_up
from .rules import ServingSetup, first_rank, ranks_of, rules_of
from .state import NONE, OWN_TIERS, LoopState
from .tiers import clear, has_tiers

OFF, STARTING, READY, DRAINING, DOWN = 0, 1, 2, 3, 4
AGAIN, GO_ON, FAIL = 0, 1, 2  # what becomes of the requests of a replica that fails: places in LOST
FLEET = -(1 << 60)  # codes of what comes due: those below, but for that of a client's credit
TICK = FLEET - 1
VOID = FLEET - 2  # of what does not matter any more
FIRST = FLEET - 3  # two of each replica from here down: it is ready, it fails
PER_REPLICA = 2


def takes(state: LoopState, setup: ServingSetup, slot: int, rank: int) -> bool:
    """Whether a rank takes a request: its replica serves, and the request is not too long for it."""
    request = state.slots[slot]
    open_ = state.ranks[rank].shut == 0
    return open_ and limit_of(rules_of(setup, rank), request.input, request.output) == WITHIN


def taker(state: LoopState, setup: ServingSetup, slot: int, rank: int, last: int) -> int:
    """The first rank from one on, in a circle of ``last``, that takes a request; NONE where none does."""
    for step in range(last):
        candidate = (rank + step) % last
        if takes(state, setup, slot, candidate):
            return candidate
    return NONE


def resume(state: LoopState, setup: ServingSetup) -> int:
    """Open the fleet at the first call, and do what the autoscaler said after it looked; the row to go on with."""
    totals = state.totals[0]
    if totals.begun == 0:
        totals.begun = 1
        for replica in range(setup.replicas):
            if replica < setup.begin_with or replica >= setup.first_decode:
                come_up(state, setup, replica)
            else:
                shut(state, setup, replica, 1)
            if state.fleet[replica].rate > 0.0:
                push_failure(state, replica)
        if setup.tick_us > 0.0:
            push_fleet(state, setup.tick_us, TICK)
    row = totals.row
    if totals.paused:
        totals.paused, totals.row = 0, 0
        resize(state, setup)
    return int(row)


def nothing_left(state: LoopState, came_us: float) -> bool:
    """Whether nothing is to come and nothing runs: what is due are replicas alone."""
    totals = state.totals[0]
    return came_us == math.inf and state.tree[1] == math.inf and totals.held == 0 and totals.due == totals.fleet_due


def fleet_event(state: LoopState, setup: ServingSetup, code: int) -> None:
    """An autoscaler looks, a replica is ready, or one fails."""
    totals = state.totals[0]
    totals.fleet_due -= 1
    if code == TICK:
        totals.paused = 1
        push_fleet(state, totals.now_us + setup.tick_us, TICK)
        return
    if code == VOID:
        return
    replica = (FIRST - code) // PER_REPLICA
    record = state.fleet[replica]
    if (FIRST - code) % PER_REPLICA == 0:
        if record.ready_us == totals.now_us and (record.status == STARTING or record.status == DOWN):
            come_up(state, setup, replica)
        return
    push_failure(state, replica)
    if record.status == READY or record.status == DRAINING:
        fail(state, setup, replica)


def push_fleet(state: LoopState, time_us: float, code: int) -> None:
    """Something of the fleet comes due."""
    state.totals[0].fleet_due += 1
    push_due(state, time_us, code)


def push_failure(state: LoopState, replica: int) -> None:
    """The next failure of a replica: an exponential time from now, by its own random numbers (Lehmer's)."""
    record = state.fleet[replica]
    record.seed = record.seed * 48271 % 2147483647
    wait_us = -math.log(record.seed / 2147483647.0) / record.rate
    push_fleet(state, state.totals[0].now_us + wait_us, FIRST - PER_REPLICA * replica - 1)


def come_up(state: LoopState, setup: ServingSetup, replica: int) -> None:
    """A replica takes requests from now on."""
    record, now_us = state.fleet[replica], state.totals[0].now_us
    if record.status == OFF:
        record.since_us = now_us
    if record.status == DOWN:
        record.down_us += now_us - record.down_since_us
    record.status = READY
    shut(state, setup, replica, 0)


def shut(state: LoopState, setup: ServingSetup, replica: int, closed: int) -> None:
    """The ranks of a replica take requests (0) or none (1)."""
    first = first_rank(setup, replica)
    for rank in range(first, first + ranks_of(setup, replica)):
        state.ranks[rank].shut = closed


def stays(state: LoopState, replica: int) -> bool:
    """Whether a replica is on and to stay: it serves, starts, or is to be repaired."""
    status = state.fleet[replica].status
    return bool(status not in (OFF, DRAINING))


def resize(state: LoopState, setup: ServingSetup) -> None:
    """As many replicas of the first kind as desired. The first that are off start; those that start stop before those
    that serve, of which the one with the fewest requests drains first, of equal ones the last."""
    totals = state.totals[0]
    missing = totals.desired
    for replica in range(setup.first_decode):
        missing -= 1 if stays(state, replica) else 0
    while missing > 0:
        replica = first_off(state, setup)
        if replica == NONE:
            return
        record = state.fleet[replica]
        record.since_us, record.status, record.starts = totals.now_us, STARTING, record.starts + 1
        record.ready_us = totals.now_us + setup.start_us
        push_fleet(state, record.ready_us, FIRST - PER_REPLICA * replica)
        missing -= 1
    while missing < 0:
        replica = first_to_go(state, setup)
        if replica == NONE:
            return
        if state.fleet[replica].status == READY:
            state.fleet[replica].status = DRAINING
            shut(state, setup, replica, 1)
            stop_drained(state, setup, replica)
        else:
            stop(state, replica)
        missing += 1


def first_off(state: LoopState, setup: ServingSetup) -> int:
    """The first replica that is off; NONE where all are on, or drain."""
    for replica in range(setup.first_decode):
        if state.fleet[replica].status == OFF:
            return replica
    return NONE


def first_to_go(state: LoopState, setup: ServingSetup) -> int:
    """The replica that is stopped first."""
    best, least = NONE, 1 << 60
    for replica in range(setup.first_decode - 1, -1, -1):
        if stays(state, replica):
            requests = outstanding(state, setup, replica) if state.fleet[replica].status == READY else -1
            if requests < least:
                best, least = replica, requests
    return best


def outstanding(state: LoopState, setup: ServingSetup, replica: int) -> int:
    """Requests that a replica has not ended."""
    first, requests = first_rank(setup, replica), 0
    for rank in range(first, first + ranks_of(setup, replica)):
        requests += state.ranks[rank].outstanding
    return requests


def stop_drained(state: LoopState, setup: ServingSetup, replica: int) -> None:
    """A replica that drains and has ended all it had is off."""
    if state.fleet[replica].status == DRAINING and outstanding(state, setup, replica) == 0:
        first = first_rank(setup, replica)
        for rank in range(first, first + ranks_of(setup, replica)):
            lose_caches(state, rank)
        stop(state, replica)


def stop(state: LoopState, replica: int) -> None:
    """A replica is off; its GPUs cost nothing more."""
    record, now_us = state.fleet[replica], state.totals[0].now_us
    if record.status == DOWN:
        record.down_us += now_us - record.down_since_us
    record.on_us += now_us - record.since_us
    record.status, record.ready_us = OFF, -1.0


def fail(state: LoopState, setup: ServingSetup, replica: int) -> None:
    """A replica fails: batches in flight and caches are lost, its requests are held, and it is repaired."""
    record, now_us = state.fleet[replica], state.totals[0].now_us
    first, width = first_rank(setup, replica), len(state.lanes) // setup.replicas
    parts = len(state.batches) // len(state.lanes)
    record.failures += 1
    shut(state, setup, replica, 1)
    for local in range(ranks_of(setup, replica)):
        rank, batch = first + local, replica * width * parts + local
        if state.ranks[rank].repeated > 0:
            catch_up(state, rules_of(setup, rank), rank, batch, 1)
        give_up(state, setup, rank)
        lose_caches(state, rank)
    for lane in range(replica * width, (replica + 1) * width):
        state.lanes[lane].busy, state.lanes[lane].stage_us = 0, now_us
        set_end(state.tree, lane, math.inf)
    if record.status == DRAINING:
        stop(state, replica)
        return
    record.status, record.down_since_us = DOWN, now_us
    record.ready_us = now_us + setup.repair_us + setup.start_us
    push_fleet(state, record.ready_us, FIRST - PER_REPLICA * replica)


def give_up(state: LoopState, setup: ServingSetup, rank: int) -> None:
    """Take all requests from a rank, those that ran first, and empty it."""
    scheduler = state.ranks[rank]
    for position in range(scheduler.count):
        lose(state, setup, rank, state.running[rank, position])
    slot = scheduler.head
    while slot != NONE:
        after = state.slots[slot].next
        lose(state, setup, rank, slot)
        slot = after
    state.totals[0].waiting -= scheduler.waiting
    scheduler.head, scheduler.tail, scheduler.waiting, scheduler.count = NONE, NONE, 0, 0
    scheduler.passed = NONE
    scheduler.outstanding, scheduler.work, scheduler.prompt_tokens = 0, 0, 0
    scheduler.clock, scheduler.rows, scheduler.landed, scheduler.back = 0, 0, 0, 0
    scheduler.swapped_out, scheduler.swapped_in, scheduler.held = 0, 0, 0
    scheduler.apart, scheduler.gathered, scheduler.again, scheduler.refused = 0, 0, 0, NONE
    scheduler.repeated, scheduler.left, scheduler.full = 0, 0, 0
    scheduler.ratio, scheduler.extra_us, scheduler.load_us, scheduler.sent_us = -1.0, 0.0, 0.0, 0.0


def lose(state: LoopState, setup: ServingSetup, rank: int, slot: int) -> None:
    """A request loses what was computed of it, and is held. It begins again, or goes on behind the tokens that its
    client has; or it is not tried again."""
    request, totals = state.slots[slot], state.totals[0]
    if request.loading > 0:
        for index in range(totals.due):
            if state.due[index].code == slot:
                state.due[index].code = VOID
                totals.fleet_due += 1
    give_back(state, rules_of(setup, rank), rank, slot)
    totals.lost_requests += 1
    totals.lost_tokens += request.computed
    totals.input_tokens -= request.input
    request.computed, request.waits, request.stalled, request.back, request.landed = 0, 0, 0, 0, 0
    request.tiered, request.below, request.loading, request.kept = 0, 0, 0, 0
    request.rank, request.first_rank = NONE, NONE
    if setup.lost == AGAIN:
        request.made, request.first_us, request.last_us = 0, -1.0, -1.0
        request.prefilled_us, request.admitted_us = -1.0, -1.0
    elif setup.lost == FAIL:
        request.limit = FAILED
    hold(state, slot)


def lose_caches(state: LoopState, rank: int) -> None:
    """What was computed before is no more to be found on a rank, nor in its host memory and on its drives."""
    if caches_prefixes(state):
        lose_contents(state, rank)
    if has_tiers(state):
        for shelf in range(rank * OWN_TIERS, (rank + 1) * OWN_TIERS):
            clear(state, shelf)


# --- requests that no replica takes -----------------------------------------------------------------------------------


def hold(state: LoopState, slot: int) -> None:
    """A request waits behind those that are held, until a replica takes it."""
    totals = state.totals[0]
    state.slots[slot].next = NONE
    if totals.held == 0:
        totals.held_first = slot
    else:
        state.slots[totals.held_last].next = slot
    totals.held_last = slot
    totals.held += 1
    totals.waiting += 1


def let_go(state: LoopState) -> int:
    """The first of those that are held, which is held no more."""
    totals = state.totals[0]
    slot = totals.held_first
    totals.held_first = state.slots[slot].next
    totals.held -= 1
    totals.waiting -= 1
    return int(slot)
