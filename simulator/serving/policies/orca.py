"""Orca: all that run, and whole new prompts; blocks for prompt and answer are taken at the start."""

from __future__ import annotations

from ..queues import first_waiting, put, start_whole, tokens_to_compute
from ..rules import SchedulerRules
from ..state import NONE, LoopState
from .policy import Policy


def orca(state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float) -> None:
    """Orca: all that run, and new prompts whole beside them; blocks for prompt and output are taken at the start."""
    ranks = state.ranks
    for position in range(ranks[rank].count):
        slot = state.running[rank, position]
        if tokens_to_compute(state, slot) > 0:
            put(state, rules, rank, batch, slot, tokens_to_compute(state, slot))
    while ranks[rank].count < rules.max_seqs:
        slot = first_waiting(state, rank)
        if slot == NONE or not start_whole(state, rules, rank, batch, slot, now_us):
            break


POLICY = Policy("orca", orca, reserves=True)
