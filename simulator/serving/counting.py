"""What the event loop counts as it goes: iterations in spans of time and by size, and gaps between tokens."""

from __future__ import annotations

import math
from typing import Any

from .histogram import bin_of
from .rules import ServingSetup, first_decode_rank, rules_of
from .state import SIZES, LoopState


def note(state: LoopState, setup: ServingSetup, rank: int, lane: int, batch: int, end_us: float) -> None:
    """Write an iteration down: in spans of time, which double when they run out, and in the log as far as it goes."""
    totals, scheduler, sums = state.totals[0], state.ranks[rank], state.batches[batch]
    pool = 1 if rank >= first_decode_rank(setup) else 0
    pools, now_us = len(state.sizes) // (2 * SIZES), totals.now_us
    spans = len(state.spans) // pools
    while now_us >= totals.width_us * spans:
        widen(state, spans)
    span = state.spans[pool * spans + int(now_us / totals.width_us)]
    took_us, used = end_us - now_us, rules_of(setup, rank).blocks - scheduler.free
    span.iterations += 1
    span.busy_us += took_us
    span.decodes += sums.decodes * took_us
    span.prefill_tokens += sums.prefill_tokens
    span.blocks += used * took_us
    span.waiting += scheduler.waiting * took_us
    if totals.logged < len(state.log):
        row = state.log[totals.logged]
        totals.logged += 1
        row.rank, row.lane, row.blocks, row.waiting = rank, lane, used, scheduler.waiting
        row.start_us, row.end_us = now_us, end_us
        row.decodes, row.prefill_tokens = sums.decodes, sums.prefill_tokens
        row.decode_context, row.samples = sums.decode_context, sums.samples
        row.swapped_out, row.swapped_in = scheduler.swapped_out, scheduler.swapped_in
    scheduler.swapped_out, scheduler.swapped_in = 0, 0


def count_size(state: LoopState, decode: bool, sums: Any, busy_us: float) -> None:
    """Count an iteration of a rank with those of like size; one without tokens with those of one."""
    tokens, mixed = sums.decodes + sums.prefill_tokens, 1 if sums.prefill_tokens > 0 else 0
    pool = 1 if decode and len(state.sizes) > 2 * SIZES else 0
    sized = state.sizes[(2 * pool + mixed) * SIZES + min(int(math.log2(max(tokens, 1.0))), SIZES - 1)]
    sized.iterations += 1
    sized.busy_us += busy_us
    sized.tokens_us += tokens * busy_us


def widen(state: LoopState, spans: int) -> None:
    """Spans twice as long, two of the old in each, in each pool's ``spans``."""
    state.totals[0].width_us *= 2.0
    for index in range(len(state.spans)):
        pool = index // spans
        into, first = state.spans[index], pool * spans + 2 * (index - pool * spans)
        iterations, busy_us, decodes, prefill_tokens, blocks, waiting = 0, 0.0, 0.0, 0.0, 0.0, 0.0
        for source in range(first, min(first + 2, (pool + 1) * spans)):
            span = state.spans[source]
            iterations, busy_us, decodes = iterations + span.iterations, busy_us + span.busy_us, decodes + span.decodes
            prefill_tokens, blocks = prefill_tokens + span.prefill_tokens, blocks + span.blocks
            waiting += span.waiting
        into.iterations, into.busy_us, into.decodes = iterations, busy_us, decodes
        into.prefill_tokens, into.blocks, into.waiting = prefill_tokens, blocks, waiting


def note_gap(state: LoopState, gap_us: float, count: int) -> None:
    """Count the time between tokens of so many requests."""
    if count > 0:
        totals = state.totals[0]
        state.gaps[bin_of(gap_us)] += count
        totals.gaps += count
        totals.gap_us += gap_us * count
        totals.least_gap_us = min(totals.least_gap_us, gap_us)
        totals.most_gap_us = max(totals.most_gap_us, gap_us)
