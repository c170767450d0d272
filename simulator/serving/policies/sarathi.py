"""Sarathi-Serve: all decodes, then prompts that have begun, then new ones, prompt tokens up to ``chunk``."""

from __future__ import annotations

from ..queues import PromptLimits, continue_prompts, decode_all, start_prompts
from ..rules import SchedulerRules
from ..state import LoopState
from .policy import Policy


def sarathi(state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float) -> None:
    """Sarathi: all decodes, then prompts that have begun, then new ones, whose blocks are taken whole; prompt tokens
    fill what decodes leave of the chunk."""
    decode_all(state, rules, rank, batch, rules.spare)
    budget = continue_prompts(state, rules, rank, batch, rules.chunk - state.batches[batch].size)
    limits = PromptLimits(0, 0, rules.watermark, rules.watermark, 0)
    start_prompts(state, rules, rank, batch, budget, limits, now_us)


POLICY = Policy("sarathi", sarathi, chunk=512, watermark=0.01, spare=1, loads="async")
