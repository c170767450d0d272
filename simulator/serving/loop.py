"""The event loop: requests come in, batches are formed, end and yield tokens, until all is done.

Two kinds of events there are: something comes in (a request, a cache from another replica), or a batch ends. The loop
takes the earlier one; of equal times what comes in goes first. It is plain Python over the arrays of :mod:`.state`;
:mod:`.compiled` makes machine code of the same functions where numba is installed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .adapters import count_running, has_adapters, use_adapters
from .admission import lets_in, makes_room, server_limit
from .batch_time import batch_us
from .blocks import caches_prefixes, give_back, remember
from .counted import tell
from .counting import count_size, note, note_gap
from .due import pop_due, push_due
from .fleet import FLEET, fleet_event, hold, let_go, nothing_left, resume, stop_drained, taker
from .iteration import experts_us
from .lanes import next_end, set_end
from .limits import FAILED, QUEUE, RATE, WITHIN, limit_of
from .moving import land, move, start_moves
from .order import take_out
from .policies import form_batch
from .policies.trtllm import wait_for_ranks
from .queues import close_ranks, push_back
from .repeating import catch_up, look_ahead, repeat
from .routing import draw, route
from .rules import (
    COUNTED,
    MOST_BEHIND_US,
    IterationTiming,
    ServingSetup,
    first_decode_rank,
    first_rank,
    prompt_ranks,
    ranks_of,
    replica_of,
    rules_of,
)
from .state import NONE, LoopState
from .tiers import end_load, has_tiers, keep
from .uneven import imbalance_us, mean_tokens, tokens_of

CHANCES = 1 << 20  # steps in which a chance is drawn
CREDIT = -(1 << 62)  # what comes due: a client that may send again
WAKES = 2  # of a lane that is idle and will look for work


class RequestChunk(NamedTuple):
    """Requests in order of arrival. A row that ``comes_after`` (1) another has no time of its own: it comes
    ``think_us`` after the row ends whose ``follower`` it is."""

    arrival_us: np.ndarray
    input: np.ndarray
    output: np.ndarray
    prefix: np.ndarray
    shared: np.ndarray
    comes_after: np.ndarray
    follower: np.ndarray  # a row, or NONE
    think_us: np.ndarray
    kind: np.ndarray  # the class of a row
    keys: np.ndarray  # where a row's contents of blocks begin in ``LoopState.keys``; empty without any
    adapter: np.ndarray  # or NONE; empty without any
    before_us: np.ndarray  # that its images took before it arrived,
    encoder_us: np.ndarray  # and what they add to its first iteration; empty without any


def run(state: LoopState, setup: ServingSetup, chunk: RequestChunk, more: bool) -> None:
    """Serve the requests of a chunk; until the last of them came in where ``more`` follow, else until all have ended.

    Without ``more`` it ends, whatever the load is: the chunk has an end.
    """
    totals, tree = state.totals[0], state.tree
    row, rows = resume(state, setup) if setup.changing > 0 else 0, len(chunk.arrival_us)
    while True:
        while row < rows and chunk.comes_after[row]:
            row += 1
        came_us = next_arrival(state, setup, chunk, row)
        if row == rows and more and (setup.concurrency == 0 or totals.credits > 0):
            return
        due_us = state.due[0].time_us if totals.due > 0 else np.inf
        if min(came_us, due_us, tree[1]) == np.inf:
            totals.now_us = max(totals.now_us, totals.gone_us)
            return
        if due_us <= came_us and due_us <= tree[1]:
            if setup.changing > 0 and nothing_left(state, came_us):
                totals.due, totals.fleet_due = 0, 0
                continue
            totals.now_us = due_us
            comes_due(state, setup, chunk, pop_due(state))
            if totals.paused:
                totals.row = row
                return
        elif came_us <= tree[1]:
            totals.now_us = came_us
            if setup.concurrency > 0:
                totals.credits -= 1
            arrive(state, setup, chunk, row)
            row += 1
        else:
            totals.now_us = tree[1]
            finish(state, setup, chunk, next_end(tree))


def next_arrival(state: LoopState, setup: ServingSetup, chunk: RequestChunk, row: int) -> float:
    """When the next request of the chunk comes in: at its time, or when a client is free; infinity if never."""
    totals = state.totals[0]
    if row == len(chunk.arrival_us) or (setup.concurrency > 0 and totals.credits == 0):
        return np.inf
    if setup.concurrency > 0:
        return max(chunk.arrival_us[row], totals.now_us)
    return chunk.arrival_us[row]


def arrive(state: LoopState, setup: ServingSetup, chunk: RequestChunk, row: int) -> None:
    """A request comes in: it gets a slot and goes to a rank, or is rejected because it can never run."""
    totals = state.totals[0]
    totals.free_slots -= 1
    slot = state.slots[totals.free_slots].free
    request = state.slots[slot]
    request.request, request.row = totals.arrived, row
    totals.arrived += 1
    request.arrival_us, request.admitted_us = totals.now_us, -1.0
    request.prefilled_us, request.first_us, request.last_us, request.moved_us = -1.0, -1.0, -1.0, 0.0
    request.input, request.output = chunk.input[row], chunk.output[row]
    request.prefix, request.shared = chunk.prefix[row], chunk.shared[row]
    request.keys = chunk.keys[row] if len(chunk.keys) > 0 else NONE
    request.computed, request.made, request.blocks, request.hit = 0, 0, 0, 0
    request.waits, request.preempted, request.stalled = 0, 0, 0
    request.rank, request.first_rank, request.seat, request.landing, request.to = NONE, NONE, NONE, 0, NONE
    request.parts = 0
    request.landed, request.back = 0, 0
    request.tiered, request.loading, request.kept = 0, 0, 0
    request.adapter, request.refused = chunk.adapter[row] if len(chunk.adapter) > 0 else NONE, 0
    request.before_us = chunk.before_us[row] if len(chunk.before_us) > 0 else 0.0
    request.encoder_us = chunk.encoder_us[row] if len(chunk.encoder_us) > 0 else 0.0
    request.kind = chunk.kind[row]
    request.priority = state.classes[request.kind, 0]
    request.limit = limit_of(setup.rules, request.input, request.output)
    if (request.limit == WITHIN) == (setup.mixed == 0):  # both pools, or one of two kinds of replicas
        request.limit = limit_of(setup.decode_rules, request.input, request.output)
    if request.limit == WITHIN and setup.bucket_rate > 0.0 and not lets_in(state, setup):
        request.limit = RATE
    if request.limit != WITHIN:
        reject(state, setup, chunk, slot)
        return
    send(state, setup, chunk, slot)


def reject(state: LoopState, setup: ServingSetup, chunk: RequestChunk, slot: int) -> None:
    """A request leaves because of its limit."""
    request = state.slots[slot]
    if request.limit == FAILED:
        state.totals[0].failed += 1
    else:
        state.totals[0].rejected += 1
    state.classes[request.kind, request.limit] += 1
    leave(state, setup, chunk, slot)


def throw_out(state: LoopState, setup: ServingSetup, chunk: RequestChunk, slot: int) -> None:
    """A request that waits and never ran makes room in the queue for another."""
    request = state.slots[slot]
    scheduler = state.ranks[request.rank]
    take_out(state, request.rank, slot)
    scheduler.outstanding -= 1
    scheduler.work -= request.work
    scheduler.prompt_tokens -= request.input
    state.totals[0].input_tokens -= request.input
    request.rank, request.first_rank, request.limit = NONE, NONE, QUEUE
    reject(state, setup, chunk, slot)


def send(state: LoopState, setup: ServingSetup, chunk: RequestChunk, slot: int) -> None:
    """A request goes to one of the ranks that take prompts and waits there, unless its server rejects it."""
    request, first, last = state.slots[slot], 0, prompt_ranks(setup)
    rank = route(state, setup, slot, first, last)
    if setup.choosy > 0:
        rank = taker(state, setup, slot, rank, last)
        if rank == NONE:
            hold(state, slot)
            return
    if setup.limited:
        request.limit = server_limit(state, setup, rank)
    if request.limit == QUEUE:
        other = makes_room(state, rank, slot)
        if other != NONE:
            throw_out(state, setup, chunk, other)
            request.limit = WITHIN
    if request.limit != WITHIN:
        reject(state, setup, chunk, slot)
        return
    request.rank = rank
    state.totals[0].input_tokens += request.input
    if request.made == 0:
        state.ranks[rank].prompt_tokens += request.input
    if request.first_rank == NONE:
        request.first_rank = rank
    scheduler = state.ranks[rank]
    scheduler.outstanding += 1
    scheduler.fresh += 1
    only_prompt = last < len(state.ranks)
    request.work = request.input if only_prompt else request.input + request.output - 1
    scheduler.work += request.work
    push_back(state, rank, slot)
    wake(state, setup, replica_of(setup, rank))


def go_on(state: LoopState, setup: ServingSetup, chunk: RequestChunk, slot: int) -> None:
    """A request that was held goes to a rank that takes it, or leaves where it is not tried again."""
    if state.slots[slot].limit == FAILED:
        reject(state, setup, chunk, slot)
    else:
        send(state, setup, chunk, slot)


def wake(state: LoopState, setup: ServingSetup, replica: int) -> None:
    """An idle lane of a replica looks for work as soon as all has come in that comes in now."""
    width = len(state.lanes) // setup.replicas
    stages = setup.decode_stages if replica >= setup.first_decode else setup.stages
    for lane in range(replica * width, replica * width + stages):
        if not state.lanes[lane].busy:
            state.lanes[lane].busy = WAKES
            set_end(state.tree, lane, state.totals[0].now_us)
            return


def kick(state: LoopState, setup: ServingSetup, replica: int, seen_us: float) -> None:
    """Start batches on the idle lanes of a replica, as long as there is anything to do.

    Requests count that came in by ``seen_us``; where there is nothing else to do, all. Where the last that ran was
    preempted, others may begin.
    """
    now_us, before = state.totals[0].now_us, state.totals[0].preemptions
    stages = setup.decode_stages if replica >= setup.first_decode else setup.stages
    width = len(state.lanes) // setup.replicas
    for lane in range(replica * width, replica * width + stages):
        if state.lanes[lane].busy:
            continue
        entries = form_batches(state, setup, replica, lane, seen_us)
        if entries == 0 and (seen_us < now_us or state.totals[0].preemptions > before):
            entries = form_batches(state, setup, replica, lane, now_us)
        if entries == 0:
            return
        start(state, setup, replica, lane)


def form_batches(state: LoopState, setup: ServingSetup, replica: int, lane: int, seen_us: float) -> int:
    """The next batch of each rank of a replica; returns how many entries they have."""
    first, parts, entries, per = first_rank(setup, replica), parts_of(state), 0, ranks_of(setup, replica)
    for local in range(per):
        state.ranks[first + local].visible_us = seen_us
    prompts = replica < setup.first_decode or setup.mixed > 0
    balanced = per > 1 and prompts and setup.rules.balance_iterations > 0
    holds_prompts = 1 if balanced and wait_for_ranks(state, setup.rules, first, per) else 0
    for local in range(per):
        rank, batch = first + local, lane * parts + local
        state.ranks[rank].held = holds_prompts
        rules = rules_of(setup, rank)
        if not repeat(state, rules, rank, batch):
            form(state, setup, rank, batch)
        entries += state.batches[batch].size
    return entries


def form(state: LoopState, setup: ServingSetup, rank: int, batch: int) -> None:
    """The next batch of a rank, by its policy."""
    rules = rules_of(setup, rank)
    sums, before = state.batches[batch], state.totals[0].preemptions
    sums.size, sums.decodes, sums.decode_context, sums.samples = 0, 0.0, 0.0, 0.0
    sums.prefill_tokens, sums.prefill_pairs, sums.prefill_context = 0.0, 0.0, 0.0
    if has_adapters(state):
        count_running(state, rank)
    form_batch(state, rules, rank, batch, state.totals[0].now_us)
    if has_adapters(state):
        timing = setup.decode_timing if rank >= first_decode_rank(setup) else setup.timing
        use_adapters(state, rules, timing, rank, batch)
    if rules.repeats:
        look_ahead(state, rules, rank, batch, state.totals[0].preemptions > before)


def parts_of(state: LoopState) -> int:
    """Batches of ranks that a lane has room for."""
    return len(state.batches) // len(state.lanes)


def start(state: LoopState, setup: ServingSetup, replica: int, lane: int) -> None:
    """A batch begins; it ends after all stages, each of which takes one batch at a time. Ranks wait for the slowest."""
    per, first = ranks_of(setup, replica), first_rank(setup, replica)
    batch, now_us = lane * parts_of(state), state.totals[0].now_us
    decode = replica >= setup.first_decode
    timing = setup.decode_timing if decode else setup.timing
    stages = setup.decode_stages if decode else setup.stages
    took_us = 0.0
    for local in range(per):
        scheduler = state.ranks[first + local]
        own_us = batch_us(timing, state.batches[batch + local]) + scheduler.extra_us
        if per > 1:
            own_us -= experts_us(timing.tables, tokens_of(timing, state.batches[batch + local]))
        scheduler.extra_us, scheduler.fresh = 0.0, 0
        if has_adapters(state):
            state.totals[0].adapters_used += state.batches[batch + local].adapters
        if scheduler.load_us > 0.0:  # one layer is loaded before the first is computed, and one computed after the last
            share = rules_of(setup, first + local).layer_share
            own_us = max(own_us + share * scheduler.load_us, scheduler.load_us + share * own_us)
            scheduler.load_us = 0.0
        took_us = max(took_us, own_us)
    if per > 1:
        took_us += experts_us(timing.tables, mean_tokens(state, timing, batch, per))
    if len(timing.imbalance) > 0:
        took_us += imbalance_us(state, timing, first, mean_tokens(state, timing, batch, per))
    width = len(state.lanes) // setup.replicas
    end_us = now_us
    for stage in range(replica * width, replica * width + stages):
        end_us = max(end_us, state.lanes[stage].stage_us) + took_us / stages
        state.lanes[stage].stage_us = end_us
    end_us = send_tokens(state, timing, first, batch, per, end_us)
    state.lanes[lane].start_us = now_us
    state.lanes[lane].busy = 1
    set_end(state.tree, lane, end_us)
    state.totals[0].iterations += 1
    for local in range(per):
        state.ranks[first + local].busy_us += took_us / stages
        count_size(state, decode, state.batches[batch + local], took_us / stages)
        note(state, setup, first + local, lane, batch + local, end_us)


def send_tokens(state: LoopState, timing: IterationTiming, first: int, batch: int, per: int, end_us: float) -> float:
    """When an iteration ends that would end at ``end_us``: each rank's server sends tokens to clients behind those that
    it has not sent yet, and never has more of them than it sends in :data:`MOST_BEHIND_US`. Clients have the tokens of
    the iteration when those before them are sent (``given_us`` of its batch)."""
    for local in range(per):
        end_us = max(end_us, state.ranks[first + local].sent_us - MOST_BEHIND_US)
    for local in range(per):
        scheduler, sums = state.ranks[first + local], state.batches[batch + local]
        sums.given_us = max(scheduler.sent_us, end_us)
        scheduler.sent_us = sums.given_us + timing.host_stream_us * sums.samples
    return end_us


def finish(state: LoopState, setup: ServingSetup, chunk: RequestChunk, lane: int) -> None:
    """A batch ends: requests get their tokens, those with their last leave, and the next batch begins."""
    replica, start_us = lane // (len(state.lanes) // setup.replicas), state.lanes[lane].start_us
    first, batch = first_rank(setup, replica), lane * parts_of(state)
    woken = state.lanes[lane].busy == WAKES
    state.lanes[lane].busy = 0
    set_end(state.tree, lane, np.inf)
    if woken:
        kick(state, setup, replica, state.totals[0].now_us)
        return
    for local in range(ranks_of(setup, replica)):
        rank = first + local
        if give_tokens(state, setup, chunk, rank, batch + local, start_us):
            close_ranks(state, rank)
            if setup.changing > 0:
                stop_drained(state, setup, replica)
        if replica >= setup.first_decode:
            start_moves(state, setup, rank)
    if setup.router == COUNTED:
        tell(state, first, ranks_of(setup, replica))
    kick(state, setup, replica, start_us if rules_of(setup, first).lag else state.totals[0].now_us)


def give_tokens(
    state: LoopState, setup: ServingSetup, chunk: RequestChunk, rank: int, batch: int, start_us: float
) -> bool:
    """One token for each entry of a batch that ends a prompt or decodes; whether any request left the rank."""
    now_us, given_us = state.totals[0].now_us, state.batches[batch].given_us
    someone_left, same_us, same = False, -1.0, 0
    scheduler = state.ranks[rank]
    if scheduler.repeated > 0 and scheduler.left > 0:
        note_gap(state, given_us - scheduler.given_us, state.batches[batch].size)
        scheduler.given_us = given_us
        return False
    if scheduler.repeated > 0:
        catch_up(state, rules_of(setup, rank), rank, batch, 1)
    only_prompts = rank < first_decode_rank(setup) and prompt_ranks(setup) < len(state.ranks)
    for entry in range(state.batches[batch].size):
        slot = state.entries[batch, entry]
        if slot < 0:
            continue
        request = state.slots[slot]
        request.waits = 0
        request.made += 1
        if request.made == 1:
            request.prefilled_us, request.first_us = now_us, given_us
            scheduler.prompt_tokens -= request.input
            if has_tiers(state):
                keep(state, rules_of(setup, rank), rank, slot)
        else:
            if request.last_us != same_us:
                note_gap(state, given_us - same_us, same)
                same_us, same = request.last_us, 0
            same += 1
            if len(setup.accept) > 0:
                note_gap(state, 0.0, guess(state, setup, rank, slot))
        request.last_us = given_us
        if request.made == request.output:
            someone_left, scheduler.again = True, 0
            if has_tiers(state):
                keep(state, rules_of(setup, rank), rank, slot)
            give_back(state, rules_of(setup, rank), rank, slot)
            end(state, setup, chunk, slot, rank)
        elif only_prompts:
            someone_left = True
            move(state, setup, slot, rank, now_us - start_us)
    note_gap(state, given_us - same_us, same)
    return someone_left


def guess(state: LoopState, setup: ServingSetup, rank: int, slot: int) -> int:
    """How many of the tokens guessed ahead are right: the request has them too, up to its last."""
    request, right = state.slots[slot], 0
    while right < len(setup.accept) and draw(state, CHANCES) < setup.accept[right] * CHANCES:
        right += 1
    state.totals[0].guesses += 1
    state.totals[0].guessed += right
    more = min(right, request.output - request.made)
    if more > 0:
        if caches_prefixes(state):
            remember(state, rules_of(setup, rank), rank, slot, request.computed, request.computed + more)
        request.made += more
        request.computed += more
        state.ranks[rank].work -= more
        state.totals[0].computed_tokens += more
    return more


def end(state: LoopState, setup: ServingSetup, chunk: RequestChunk, slot: int, rank: int) -> None:
    """A request has its last token."""
    totals = state.totals[0]
    totals.completed += 1
    totals.output_tokens += state.slots[slot].output
    state.ranks[rank].outstanding -= 1
    leave(state, setup, chunk, slot)
    state.slots[slot].rank = NONE


def leave(state: LoopState, setup: ServingSetup, chunk: RequestChunk, slot: int) -> None:
    """Write a request down that ended or was rejected, free its slot, and let its client go on."""
    totals, request = state.totals[0], state.slots[slot]
    row = state.left[totals.left]
    totals.left += 1
    row.request, row.rank = request.request, request.rank
    row.preemptions, row.hit_tokens = request.preempted, request.hit
    row.prefill_rank, row.limit, row.kind = request.first_rank, request.limit, request.kind
    row.adapter = request.adapter
    row.input_tokens, row.output_tokens = request.input, request.output
    row.arrival_us, row.admitted_us = request.arrival_us - request.before_us, request.admitted_us
    row.prefilled_us = request.prefilled_us
    row.first_token_us, row.finish_us, row.moved_us = request.first_us, request.last_us, request.moved_us
    gone_us = max(totals.now_us, request.last_us)
    totals.gone_us = max(totals.gone_us, gone_us)
    if setup.concurrency > 0 and gone_us > totals.now_us:
        push_due(state, gone_us, CREDIT)
    elif setup.concurrency > 0:
        totals.credits += 1
    follower = chunk.follower[request.row] if len(chunk.follower) > 0 else NONE
    if follower != NONE:
        push_due(state, gone_us + chunk.think_us[follower], -1 - follower)
    state.slots[totals.free_slots].free = slot
    totals.free_slots += 1


def comes_due(state: LoopState, setup: ServingSetup, chunk: RequestChunk, code: int) -> None:
    """The next turn of a session comes in, a client has its last token, a cache has been loaded from below, or one has
    arrived from another rank: its blocks are free where it came from."""
    if code == CREDIT:
        state.totals[0].credits += 1
        return
    if code <= FLEET:
        fleet_event(state, setup, code)
        for _ in range(state.totals[0].held):
            go_on(state, setup, chunk, let_go(state))
        return
    if code < 0:
        arrive(state, setup, chunk, -1 - code)
        return
    if state.slots[code].loading > 0:
        loaded = state.slots[code].rank
        end_load(state, rules_of(setup, loaded), loaded, code)
        wake(state, setup, replica_of(setup, loaded))
        return
    rank = land(state, setup, code)
    wake(state, setup, replica_of(setup, state.slots[code].to))
    wake(state, setup, replica_of(setup, rank))
