"""Low-rank adapters in the event loop: which are on a GPU, who waits for a place, what is loaded.

What it follows is vLLM 0.33.0: a request waits, and others pass it, while ``max_loras`` other adapters run
(``v1/core/sched/scheduler.py``); before a step the worker copies what its batch lacks from host memory into places
taken at the start, and reads from disk what is not there, each time in place of what was used longest ago
(``LRUCacheWorkerLoRAManager`` of ``lora/worker_manager.py``). The step waits for both. SGLang's limits are alike
(``max_loras_per_batch``); what it loads beside a step is not simulated.

Compiled with the loop (:mod:`.compiled`).
"""

from __future__ import annotations

from .iteration import at_points
from .rules import IterationTiming, SchedulerRules
from .state import NONE, LoopState

RUNS, USED, ON_GPU, IN_HOST = 0, 1, 2, 3  # of an adapter: when it last ran and was in a batch, and its places plus one


def has_adapters(state: LoopState) -> bool:
    """Whether requests may have adapters."""
    return len(state.adapters) > 0


def count_running(state: LoopState, rank: int) -> None:
    """A batch is about to be formed: note the adapters of all that run."""
    scheduler = state.ranks[rank]
    before, passed = scheduler.adapters, scheduler.passed
    scheduler.formed += 1
    scheduler.adapters, more = 0, 0
    for position in range(scheduler.count):
        more += hold(state, rank, state.slots[state.running[rank, position]].adapter, scheduler.formed - 1)
    same = more == 0 and scheduler.adapters == before
    scheduler.passed = passed if same else NONE  # who waited for a place still does


def hold(state: LoopState, rank: int, adapter: int, before: int) -> int:
    """An adapter is one of those that run; 1 where it was not when batch ``before`` was formed."""
    scheduler = state.ranks[rank]
    if adapter == NONE or state.adapters[rank, adapter, RUNS] == scheduler.formed:
        return 0
    new = 1 if state.adapters[rank, adapter, RUNS] != before else 0
    state.adapters[rank, adapter, RUNS] = scheduler.formed
    scheduler.adapters += 1
    scheduler.passed = NONE
    return new


def first_with_place(state: LoopState, rank: int, slot: int) -> int:
    """The first from ``slot`` on that waits, was seen, and has no adapter beyond those that may run; NONE if none.

    Those from the head of the queue on that have such adapters are passed once, as long as the same ones run.
    """
    scheduler = state.ranks[rank]
    if scheduler.adapters < state.totals[0].most_adapters:
        return slot
    passes = slot == scheduler.head
    if passes and scheduler.passed != NONE:
        slot = state.slots[scheduler.passed].next
    while slot != NONE:
        request = state.slots[slot]
        runs = request.adapter == NONE or state.adapters[rank, request.adapter, RUNS] == scheduler.formed
        if runs and request.arrival_us <= scheduler.visible_us:
            return slot
        if not runs and request.refused == 0:
            request.refused = 1
            state.totals[0].adapter_waits += 1
        passes = passes and not runs
        if passes:
            scheduler.passed = slot
        slot = request.next
    return NONE


def use_adapters(state: LoopState, rules: SchedulerRules, timing: IterationTiming, rank: int, batch: int) -> None:
    """Count the adapters of a batch, what they add to its time, and load those that the GPU lacks: the batch takes as
    much longer."""
    scheduler, sums = state.ranks[rank], state.batches[batch]
    sums.adapters, sums.adapter_us, tokens, missing = 0.0, 0.0, 0.0, 0
    for entry in range(sums.size):
        slot = state.entries[batch, entry]
        request = state.slots[slot if slot >= 0 else -1 - slot]
        if request.adapter == NONE:
            continue
        tokens += request.scheduled * (1 + (rules.drafts if request.scheduled == 1 else 0))
        if state.adapters[rank, request.adapter, USED] != scheduler.formed:
            state.adapters[rank, request.adapter, USED] = scheduler.formed
            sums.adapters += 1
            missing += 1 if state.adapters[rank, request.adapter, ON_GPU] == 0 else 0
    if sums.adapters > 0:
        sums.adapter_us = at_points(
            timing.adapter_counts, timing.adapter_tokens, timing.adapter_us, sums.adapters, tokens
        )
    for entry in range(sums.size if missing > 0 else 0):
        slot = state.entries[batch, entry]
        adapter = state.slots[slot if slot >= 0 else -1 - slot].adapter
        if adapter != NONE and state.adapters[rank, adapter, ON_GPU] == 0:
            load_us = timing.adapter_load_us
            if state.adapters[rank, adapter, IN_HOST] == 0:
                put_in_place(
                    state, rank, adapter, IN_HOST, state.totals[0].most_adapters, state.adapter_places.shape[1]
                )
                load_us += timing.adapter_read_us
                state.totals[0].adapter_reads += 1
            put_in_place(state, rank, adapter, ON_GPU, 0, state.totals[0].most_adapters)
            scheduler.extra_us += load_us
            state.totals[0].adapter_loads += 1
            state.totals[0].adapter_load_us += load_us


def put_in_place(state: LoopState, rank: int, adapter: int, where: int, first: int, end: int) -> None:
    """An adapter takes the first free place from ``first`` to ``end``, or that of the one used longest ago. What leaves
    host memory leaves the GPU, too."""
    best, oldest = first, -1
    for position in range(first, end):
        other = state.adapter_places[rank, position] - 1
        if other == NONE:
            best = position
            break
        if oldest == -1 or state.adapters[rank, other, USED] < oldest:
            best, oldest = position, state.adapters[rank, other, USED]
    victim = state.adapter_places[rank, best] - 1
    if victim != NONE:
        state.adapters[rank, victim, where] = 0
        if where == IN_HOST and state.adapters[rank, victim, ON_GPU] > 0:
            state.adapter_places[rank, state.adapters[rank, victim, ON_GPU] - 1] = 0
            state.adapters[rank, victim, ON_GPU] = 0
    state.adapter_places[rank, best] = adapter + 1
    state.adapters[rank, adapter, where] = best + 1
