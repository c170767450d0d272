"""What an iteration takes longer because experts are uneven, and because weights move (:mod:`.expert_drift`).

Compiled with the loop (:mod:`.compiled`).
"""

from __future__ import annotations

from typing import Any

from .iteration import at_point
from .rules import IterationTiming
from .state import LoopState


def mean_tokens(state: LoopState, timing: IterationTiming, batch: int, per: int) -> float:
    """Tokens that a rank brings to the experts that ranks in lockstep share: the mean of all of them."""
    tokens = 0.0
    for local in range(per):
        tokens += tokens_of(timing, state.batches[batch + local])
    return tokens / per


def tokens_of(timing: IterationTiming, sums: Any) -> float:
    """Tokens that a rank's batch brings to the experts."""
    return float(sums.decodes * (1 + timing.drafts) + sums.prefill_tokens)


def imbalance_us(state: LoopState, timing: IterationTiming, rank: int, tokens: float) -> float:
    """Microseconds that an iteration of a replica, whose first rank this is, takes longer: for uneven experts, of so
    many tokens of each rank, and for weights that move before it."""
    scheduler, totals = state.ranks[rank], state.totals[0]
    block = scheduler.steps // timing.drift_block % len(timing.imbalance)
    moves = scheduler.steps % timing.drift_block == 0
    scheduler.steps += 1
    us = at_point(timing.expert_tokens, timing.expert_us, tokens * timing.imbalance[block])
    uneven_us = us - at_point(timing.expert_tokens, timing.expert_us, tokens)
    totals.uneven += timing.imbalance[block]
    totals.uneven_us += uneven_us
    if moves and timing.move_us[block] > 0.0:
        totals.rebalances += 1
        totals.rebalance_us += timing.move_us[block]
        return uneven_us + timing.move_us[block]
    return uneven_us
