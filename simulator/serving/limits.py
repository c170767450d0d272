"""What a request may be at most on its replica: the limits that reject it, and how each is told.

Compiled with the loop (:mod:`.compiled`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .blocks import blocks_for
from .rules import SchedulerRules

WITHIN, CONTEXT, MEMORY, ITERATION = 0, 1, 2, 3
TOLD: Mapping[int, tuple[str, str, str]] = {  # code -> name, what it is, the setting that raises it
    CONTEXT: ("context", "the context", "scheduler.max_model_len"),
    MEMORY: ("kv_memory", "the KV memory", "kv.blocks"),
    ITERATION: ("iteration", "a prompt in one iteration", "scheduler.max_tokens"),
}


def limit_of(rules: SchedulerRules, prompt: int, output: int) -> int:
    """The limit that a request of these lengths breaks, :data:`WITHIN` where it can be served: the context, where
    prompts are not cut the tokens of an iteration, the memory."""
    if prompt + output > rules.max_model_len:
        return CONTEXT
    if rules.uncut and prompt > rules.max_tokens:
        return ITERATION
    if blocks_for(prompt + output, rules.block_tokens) + spare_blocks(rules, output) > rules.blocks:
        return MEMORY
    return WITHIN


def spare_blocks(rules: SchedulerRules, output: int) -> int:
    """Blocks that must stay free beside a request."""
    return max(rules.watermark, rules.spare if output > 1 else 0)


def tokens_allowed(rules: SchedulerRules, code: int) -> int:
    """How many tokens a limit allows: prompt and answer together, of an iteration the prompt alone."""
    if code == CONTEXT:
        return rules.max_model_len
    if code == ITERATION:
        return rules.max_tokens
    return max(rules.blocks - spare_blocks(rules, 2), 0) * rules.block_tokens


def rejections(
    counts: Mapping[int, int], rules: SchedulerRules, decode_rules: SchedulerRules
) -> dict[str, dict[str, Any]]:
    """How many requests each limit rejected, by its name, with the tokens that it allows (the fewer of both pools) and
    the setting that says how many."""
    return {
        TOLD[code][0]: {
            "requests": count,
            "most_tokens": min(tokens_allowed(rules, code), tokens_allowed(decode_rules, code)),
            "setting": TOLD[code][2],
        }
        for code, count in counts.items()
        if count
    }


def rejection_note(rejected: Mapping[str, Mapping[str, Any]], arrived: int) -> str:
    """The same in a sentence; empty where none was rejected."""
    if not rejected:
        return ""
    names = {name: (what, setting) for name, what, setting in TOLD.values()}
    parts = [
        f"{limit['requests']:,} longer than {names[name][0]} allows "
        f"({limit['most_tokens']:,} tokens, {limit['setting']})"
        for name, limit in rejected.items()
    ]
    total = sum(limit["requests"] for limit in rejected.values())
    return f"{total:,} of {arrived:,} requests were rejected: {'; '.join(parts)}"
