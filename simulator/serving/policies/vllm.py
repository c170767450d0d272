"""vLLM v1: running requests in order of admission, decodes and chunks alike, then new ones.

For lack of blocks the newest goes back.
"""

from __future__ import annotations

from ..priorities import continue_by_priority
from ..queues import PromptLimits, make_room, put, start_prompts, tokens_to_compute
from ..rules import SchedulerRules
from ..state import NONE, LoopState
from .policy import Policy


def vllm(state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float) -> None:
    """vLLM v1: running requests in order of admission, decodes and chunks alike, then new ones, within one budget."""
    slots, ranks = state.slots, state.ranks
    budget, gone, position = rules.max_tokens, 0, 0
    longest = rules.long_prefill if ranks[rank].count + ranks[rank].waiting > 1 else 0
    if state.totals[0].ordered:
        budget, position = continue_by_priority(state, rules, rank, batch, longest), ranks[rank].count
    while position < ranks[rank].count and budget > 0:
        slot = state.running[rank, position]
        tokens = min(tokens_to_compute(state, slot), budget)
        if longest > 0:
            tokens = min(tokens, longest)
        if tokens > 0:
            freed = make_room(state, rules, rank, position, slots[slot].computed + tokens, 0)
            if freed == NONE:
                gone += 1
                break
            gone += freed
            put(state, rules, rank, batch, slot, tokens)
            budget -= tokens
        position += 1
    if gone == 0:
        limits = PromptLimits(longest, rules.max_tokens, 0, rules.watermark, NONE)
        start_prompts(state, rules, rank, batch, budget, limits, now_us)


POLICY = Policy("vllm", vllm, engine="vllm", max_seqs=1024, lag=True, refuses="uncut", loads="async")
