"""What rejects a request: what it may be at most on its replica, and who may come in; and how each limit is told.

Compiled with the loop (:mod:`.compiled`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..question.request_classes import Admission
from .blocks import blocks_for
from .rules import SchedulerRules

WITHIN, CONTEXT, MEMORY, ITERATION = 0, 1, 2, 3  # of lengths,
REQUESTS, PROMPTS, QUEUE, RATE = 4, 5, 6, 7  # and of who may come in (:mod:`.admission`)
FAILED = 8  # its replica failed, and it is not tried again (:mod:`.fleet`)
TOLD: Mapping[int, tuple[str, str, str]] = {  # code -> name, what it is, the setting that raises it
    CONTEXT: ("context", "the context", "scheduler.max_model_len"),
    MEMORY: ("kv_memory", "the KV memory", "kv.blocks"),
    ITERATION: ("iteration", "a prompt in one iteration", "scheduler.max_tokens"),
    REQUESTS: ("max_requests", "requests on a replica", "admission.max_requests"),
    PROMPTS: ("max_prompt_tokens", "tokens of prompts on a replica", "admission.max_prompt_tokens"),
    QUEUE: ("max_queue", "requests that wait on a rank", "admission.max_queue"),
    RATE: ("rate", "requests a second", "admission.rate"),
}
OF_LENGTHS = (CONTEXT, MEMORY, ITERATION)


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
    counts: Sequence[Sequence[int]],
    classes: Sequence[str],
    rules: SchedulerRules,
    decode_rules: SchedulerRules,
    admission: Admission,
    mixed: bool = False,
) -> dict[str, dict[str, Any]]:
    """How many requests each limit rejected (``counts`` [classes, codes]), by its name: with the tokens that it allows
    (``most_tokens``: the fewer of both pools, the more of ``mixed`` kinds) or the most that may come in (``most``), the
    setting that says how many, and how many of each of the ``classes``."""
    limits: dict[str, dict[str, Any]] = {}
    for code, (name, _, setting) in TOLD.items():
        by_class = [int(row[code]) for row in counts]
        if not any(by_class):
            continue
        limits[name] = {"requests": sum(by_class), "setting": setting}
        if code in OF_LENGTHS:
            allowed = tokens_allowed(rules, code), tokens_allowed(decode_rules, code)
            limits[name]["most_tokens"] = max(allowed) if mixed else min(allowed)
        else:
            limits[name]["most"] = getattr(admission, name)
        if classes:
            limits[name]["classes"] = {
                class_name: count for class_name, count in zip(classes, by_class, strict=True) if count
            }
    return limits


def rejection_note(rejected: Mapping[str, Mapping[str, Any]], arrived: int) -> str:
    """The same in a sentence; empty where none was rejected."""
    if not rejected:
        return ""
    names = {name: what for name, what, _ in TOLD.values()}
    parts = []
    for name, limit in rejected.items():
        count, setting = f"{limit['requests']:,}", limit["setting"]
        if "most_tokens" in limit:
            part = f"{count} longer than {names[name]} allows ({limit['most_tokens']:,} tokens, {setting})"
        else:
            part = f"{count} because there are at most {limit['most']:,} {names[name]} ({setting})"
        if "classes" in limit:
            part += ", " + ", ".join(
                f"{of_class:,} of class {class_name}" for class_name, of_class in limit["classes"].items()
            )
        parts.append(part)
    total = sum(limit["requests"] for limit in rejected.values())
    return f"{total:,} of {arrived:,} requests were rejected: {'; '.join(parts)}"
