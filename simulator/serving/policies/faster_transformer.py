"""FasterTransformer: a batch, padded to its longest, runs until its longest answer ends."""

from __future__ import annotations

from ..queues import first_waiting, put, start_whole, tokens_to_compute
from ..rules import SchedulerRules
from ..state import NONE, LoopState
from .policy import Policy


def faster_transformer(state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float) -> None:
    """FasterTransformer: a batch is taken, padded to its longest, and runs until its longest output ends."""
    ranks, sums = state.ranks, state.batches[batch]
    if ranks[rank].count > 0:
        for position in range(ranks[rank].count):
            if tokens_to_compute(state, state.running[rank, position]) > 0:
                put(state, rules, rank, batch, state.running[rank, position], 1)
        if rules.padded and sums.decodes > 0:
            sums.decode_context *= ranks[rank].rows / sums.decodes
            sums.decodes = ranks[rank].rows
        return
    longest = 0
    while ranks[rank].count < rules.max_seqs:
        slot = first_waiting(state, rank)
        if slot == NONE or not start_whole(state, rules, rank, batch, slot, now_us):
            break
        longest = max(longest, state.slots[slot].input)
    ranks[rank].rows = ranks[rank].count
    if rules.padded and sums.prefill_tokens > 0:
        sums.prefill_tokens = ranks[rank].rows * longest
        sums.prefill_pairs = sums.prefill_tokens * 0.5 * (longest + 1)


POLICY = Policy(
    "faster_transformer", faster_transformer, max_seqs=32, padded=True, reserves=True, mixed=False, repeats=False
)
