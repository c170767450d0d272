"""What opcast's scheduler does with requests that come in before given iterations, to compare with an engine's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from opcast.simulator.question.serving import POLICIES
from opcast.simulator.serving import loop, policies, queues
from opcast.simulator.serving import priorities as priorities_
from opcast.simulator.serving.histogram import BINS
from opcast.simulator.serving.iteration import linear_tables
from opcast.simulator.serving.rules import IterationTiming, SchedulerRules, ServingSetup
from opcast.simulator.serving.state import StateSizes, as_objects, empty_state
from opcast.simulator.serving.streams import chunk as stream

PLAIN = SchedulerRules(
    policy=0,
    max_tokens=8192,
    max_seqs=256,
    chunk=512,
    max_model_len=4096,
    blocks=0,
    block_tokens=16,
    watermark=0,
    spare=0,
    long_prefill=0,
    whole_prompt=0,
    chunked=1,
    uncut=0,
    padded=0,
    mixed=0,
    reserves=0,
    lag=0,
    swap_us_per_token=-1.0,
    conservativeness=1.0,
    ignore_eos=0,
    prefill_every=10,
    drafts=0,
    wait_iterations=0,
    balance_iterations=0,
    gather_iterations=0,
    wait_tokens=0.0,
    answers=0,
    lasting=1,
    asks=1,
    repeats=1,
    loads=0,
    layer_share=1.0,
)


def played(
    requests: list[list[int]], caching: bool, policy: str, priorities: list[int] | None = None, **given: Any
) -> dict[str, Any]:
    """The tokens of each request in each iteration, preemptions and hits, under rules that are ``given``.

    ``requests`` are rows of (iteration, prompt, output, prefix, tokens of the prefix). Each iteration takes a
    microsecond, so that its number is its time.
    """
    rules = PLAIN._replace(policy=POLICIES.index(policy), **given)
    timing = IterationTiming(linear_tables(1.0), np.zeros(0, np.int64), 0.0, 0.0, 0.0, 0, 0.0)
    one = (0, 1, 1, 1, 1, 1, 1, 0, np.zeros(0), 0.0, 0.0, 1.0)
    levels = sorted(set(priorities or [0]))
    made = ServingSetup(rules, timing, rules, timing, *one, 0, -1, -1, -1, 0.0, 1.0)
    shape = StateSizes(
        *(1, 1, 1, rules.max_seqs, rules.blocks, caching, rules.blocks + 1),
        bins=BINS,
        block_tokens=rules.block_tokens,
        classes=len(levels),
    )
    state = as_objects(empty_state(shape, len(requests)))
    state.totals[0].ordered = int(priorities is not None)
    columns = np.array(requests)
    state.classes[:, 0] = levels
    kind = np.searchsorted(levels, priorities or [0] * len(requests))
    arriving = stream(
        columns[:, 0].astype(float), columns[:, 1], columns[:, 2], columns[:, 3], columns[:, 4], kind=kind
    )
    schedule = watch(state, made, arriving)
    left = sorted(state.left[: state.totals[0].left], key=lambda row: row.request)
    return {
        "schedule": schedule,
        "preemptions": [row.preemptions for row in left],
        "hits": [row.hit_tokens for row in left],
    }


def watch(state: Any, made: ServingSetup, requests: Any) -> list[dict[str, int]]:
    """Run, and write down how many tokens of each request are scheduled in each iteration; one of each where a batch
    repeats."""
    schedule: dict[float, dict[str, int]] = {}
    real, real_repeat, real_withdraw = queues.put, loop.repeat, priorities_.withdraw
    users = [module for module in (queues, priorities_, *policies.MODULES) if hasattr(module, "put")]

    def put(state: Any, rules: Any, rank: int, batch: int, slot: int, tokens: int) -> None:
        scheduled = schedule.setdefault(state.totals[0].now_us, {})
        scheduled[str(state.slots[slot].request)] = int(tokens)
        real(state, rules, rank, batch, slot, tokens)

    def withdraw(state: Any, rank: int, batch: int, slot: int) -> int:
        schedule.get(state.totals[0].now_us, {}).pop(str(state.slots[slot].request), None)
        return real_withdraw(state, rank, batch, slot)

    def repeat(state: Any, rules: Any, rank: int, batch: int) -> bool:
        again = real_repeat(state, rules, rank, batch)
        if again:
            slots = state.entries[batch, : state.batches[batch].size]
            schedule[state.totals[0].now_us] = {str(state.slots[slot].request): 1 for slot in slots}
        return again

    for module in users:
        module.put = put
    loop.repeat, priorities_.withdraw = repeat, withdraw
    try:
        loop.run(state, made, requests, False)
    finally:
        for module in users:
            module.put = real
        loop.repeat, priorities_.withdraw = real_repeat, real_withdraw
    return list(schedule.values())
