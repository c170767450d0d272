"""TensorRT-LLM with GUARANTEED_NO_EVICT: a request starts when blocks for prompt and answer are free."""

from __future__ import annotations

from ..blocks import blocks_for
from ..queues import (
    PromptLimits,
    cached_tokens,
    continue_prompts,
    decode_all,
    first_waiting,
    fits,
    start_prompts,
    tokens_to_compute,
)
from ..rules import SchedulerRules
from ..state import NONE, LoopState
from .policy import Policy


def trtllm(state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float) -> None:
    """TensorRT-LLM: decodes, then prompts up to the first that does not fit the budget; a request starts when blocks
    for prompt and output are free, or (max utilisation) for its prompt, and then the newest is paused for lack."""
    ranks = state.ranks
    gone = ranks[rank].count
    decode_all(state, rules, rank, batch, 0)
    gone -= ranks[rank].count
    budget = continue_prompts(state, rules, rank, batch, rules.max_tokens - state.batches[batch].size)
    if ranks[rank].held or (rules.wait_iterations > 0 and holds_back_prompts(state, rules, rank, batch, budget)):
        return
    if gone == 0:
        start_prompts(state, rules, rank, batch, budget, PromptLimits(0, rules.max_tokens, 0, 0, 1), now_us)


def wait_for_ranks(state: LoopState, rules: SchedulerRules, first: int, count: int) -> bool:
    """Whether prompts of ranks in lockstep wait beside decodes until each rank has one that can start
    (``_balance_adp_requests`` of TensorRT-LLM's ``py_executor.py``)."""
    scheduler, prompts, decodes = state.ranks[first], 0, 0
    for rank in range(first, first + count):
        slot = first_waiting(state, rank)
        if slot != NONE and state.ranks[rank].count < rules.max_seqs:
            need = state.slots[slot].input + state.slots[slot].output
            prompts += 1 if fits(state, rules, rank, slot, cached_tokens(state, rules, rank, slot), need, 0) else 0
        decodes += 1 if state.ranks[rank].count > 0 else 0
    if prompts == count:
        scheduler.apart = 0
        waits = decodes == count and scheduler.gathered < rules.gather_iterations
        scheduler.gathered = scheduler.gathered + 1 if waits else 0
        return waits
    scheduler.apart += 1
    if scheduler.apart < rules.balance_iterations and decodes == count:
        return True
    scheduler.apart = 0
    return False


def holds_back_prompts(state: LoopState, rules: SchedulerRules, rank: int, batch: int, budget: float) -> bool:
    """Whether prompts that could start wait for more of them, beside decodes: for some iterations, or until the batch
    has enough tokens (``_waiting_requests`` of TensorRT-LLM's ``py_executor.py``)."""
    scheduler, slot = state.ranks[rank], first_waiting(state, rank)
    if slot == NONE or state.batches[batch].decodes == 0 or scheduler.count >= rules.max_seqs:
        return False
    remaining, seats = budget, rules.max_seqs - scheduler.count
    blocks = scheduler.free
    while slot != NONE and seats > 0 and state.slots[slot].arrival_us <= scheduler.visible_us:
        tokens = tokens_to_compute(state, slot)
        blocks -= blocks_for(state.slots[slot].input + state.slots[slot].output, rules.block_tokens)
        if tokens > remaining or blocks < 0:
            break
        remaining -= tokens
        seats -= 1
        slot = state.slots[slot].next
    if remaining == budget:
        return False
    if scheduler.clock >= rules.wait_iterations or state.batches[batch].size + budget - remaining >= rules.wait_tokens:
        scheduler.clock = 0
        return False
    scheduler.clock += 1
    return True


POLICY = Policy(
    "trtllm",
    trtllm,
    engine="trtllm",
    said=("GUARANTEED_NO_EVICT",),
    max_seqs=2048,
    chunked=False,
    lag=True,
    refuses="uncut",
    reserves=True,
    holds_back=True,
)
