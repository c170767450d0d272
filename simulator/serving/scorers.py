"""Weighted scorers, as llm-d and the Gateway API Inference Extension route: of the ranks that take a request the one
with the highest sum of scores times their weights, of equal ones any.

Each score is from 0 to 1, and a function of its own. They follow kubernetes-sigs/gateway-api-inference-extension,
``pkg/epp/framework/plugins/scheduling/scorer``: ``queuedepth/queue.go`` (commit cb1c67d),
``kvcacheutilization/kvcache_utilization.go`` (33173e4), ``prefix/plugin.go`` (05aed77), which llm-d's endpoint picker
loads; the random choice among equals is that of ``picker/max_score_picker.go`` (02308be). Prefixes are those that the
rank really has, as llm-d's precise-prefix-cache-scorer knows them, not an index of what was sent there; metrics are
those of the moment, not of the last scrape.

Compiled with the loop (:mod:`.compiled`).
"""

from __future__ import annotations

from .blocks import hit_tokens
from .fleet import takes
from .rules import ServingSetup, rules_of
from .state import LoopState

MOST_BLOCKS = 256  # of a prompt that are looked at (DefaultMaxPrefixBlocks of prefix/plugin.go)


def by_scores(state: LoopState, setup: ServingSetup, slot: int, first: int, last: int) -> int:
    """The highest sum of scores for a short queue, free KV memory and a cached prefix (as llm-d weighs them)."""
    shortest, longest = queues_of(state, setup, slot, first, last)
    best, highest, alike = first, -1.0, 0
    for rank in range(first, last):
        if setup.choosy > 0 and not takes(state, setup, slot, rank):
            continue
        score = setup.weights[0] * queue_score(state, rank, shortest, longest)
        score += setup.weights[1] * kv_score(state, setup, rank)
        if setup.weights[2] > 0.0:
            score += setup.weights[2] * prefix_score(state, setup, slot, rank)
        if score > highest:
            best, highest, alike = rank, score, 1
        elif score == highest:
            alike += 1
            if pick(state, alike) == 0:
                best = rank
    return best


def pick(state: LoopState, count: int) -> int:
    """A random number below ``count`` (:func:`.routing.draw`)."""
    totals = state.totals[0]
    totals.seed = totals.seed * 48271 % 2147483647
    return int(totals.seed * count // 2147483647)


def queues_of(state: LoopState, setup: ServingSetup, slot: int, first: int, last: int) -> tuple[int, int]:
    """The shortest and the longest queue of ranks that take a request."""
    shortest, longest = 1 << 60, -1
    for rank in range(first, last):
        if setup.choosy == 0 or takes(state, setup, slot, rank):
            shortest, longest = min(shortest, state.ranks[rank].waiting), max(longest, state.ranks[rank].waiting)
    return shortest, longest


def queue_score(state: LoopState, rank: int, shortest: int, longest: int) -> float:
    """How much shorter than the longest its queue is, over the difference of all; 1 where they are alike."""
    return 1.0 if longest == shortest else (longest - state.ranks[rank].waiting) / (longest - shortest)


def kv_score(state: LoopState, setup: ServingSetup, rank: int) -> float:
    """The share of its KV blocks that is free."""
    return float(state.ranks[rank].free / rules_of(setup, rank).blocks)


def prefix_score(state: LoopState, setup: ServingSetup, slot: int, rank: int) -> float:
    """The share of a prompt's full blocks that it has cached, from the first on."""
    rules = rules_of(setup, rank)
    blocks = min(state.slots[slot].input // rules.block_tokens, MOST_BLOCKS)
    return 0.0 if blocks == 0 else min(hit_tokens(state, rules, rank, slot) // rules.block_tokens, blocks) / blocks
