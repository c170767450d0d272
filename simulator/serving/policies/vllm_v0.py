"""vLLM v0: a batch of whole prompts where any fits, else all decodes."""

from __future__ import annotations

from ..queues import admit, cached_tokens, decode_all, first_waiting, fits, length, put, tokens_to_compute
from ..rules import SchedulerRules
from ..state import NONE, LoopState
from .policy import Policy


def vllm_v0(state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float) -> None:
    """vLLM v0: a batch of whole prompts where any fits, else all decodes; Splitwise's pools have the same batches."""
    ranks = state.ranks
    entries, total, longest = 0, 0, 0
    while ranks[rank].count < rules.max_seqs:
        slot = first_waiting(state, rank)
        if slot == NONE:
            break
        hit = cached_tokens(state, rules, rank, slot)
        tokens = tokens_to_compute(state, slot) - hit
        back = state.slots[slot].computed > 0  # its cache comes from elsewhere: it decodes with the others
        most = (entries + 1) * max(longest, tokens) if rules.padded else total + tokens
        if not fits(state, rules, rank, slot, hit, length(state, slot), rules.watermark):
            break
        if entries > 0 and most > rules.max_tokens and not back:
            break
        admit(state, rules, rank, slot, hit, length(state, slot), now_us)
        if back:
            continue
        put(state, rules, rank, batch, slot, tokens)
        entries, total, longest = entries + 1, total + tokens, max(longest, tokens)
    if entries == 0:
        decode_all(state, rules, rank, batch, rules.spare)


POLICY = Policy("vllm_v0", vllm_v0, max_tokens=4096, watermark=0.01, spare=1, mixed=False, refuses="long")
