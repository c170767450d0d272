"""Which rank a request goes to: one function per policy, over the ranks ``first`` .. ``last`` - 1 of its pool.

A policy of a user's own has the form ``route(state, setup, slot, first, last)`` and returns a rank.
"""

from __future__ import annotations

from .blocks import blocks_for, hit_tokens
from .rules import (
    JOIN_SHORTEST,
    KV_AWARE,
    LEAST_OUTSTANDING,
    LEAST_WAITING,
    POWER_OF_TWO,
    RANDOM,
    ServingSetup,
    rules_of,
)
from .state import LoopState


def route(state: LoopState, setup: ServingSetup, slot: int, first: int, last: int) -> int:
    """The rank of a request by the policy of the set-up."""
    if last - first == 1:
        return first
    if setup.router == RANDOM:
        return first + draw(state, last - first)
    if setup.router == LEAST_OUTSTANDING:
        return least_outstanding(state, first, last)
    if setup.router == LEAST_WAITING:
        return least_waiting(state, first, last)
    if setup.router == POWER_OF_TWO:
        return power_of_two(state, first, last)
    if setup.router == KV_AWARE:
        return kv_aware(state, setup, slot, first, last)
    if setup.router == JOIN_SHORTEST:
        return shortest(state, first, last)
    return round_robin(state, first, last)


def draw(state: LoopState, count: int) -> int:
    """A random number below ``count``, by Lehmer's generator: the same with and without numba."""
    totals = state.totals[0]
    totals.seed = totals.seed * 48271 % 2147483647
    return totals.seed * count // 2147483647


def round_robin(state: LoopState, first: int, last: int) -> int:
    """One after the other."""
    totals = state.totals[0]
    if first > 0:
        totals.decode_turn += 1
        return first + (totals.decode_turn - 1) % (last - first)
    totals.turn += 1
    return (totals.turn - 1) % last


def least_outstanding(state: LoopState, first: int, last: int) -> int:
    """The fewest requests that have not ended."""
    best = first
    for rank in range(first + 1, last):
        if state.ranks[rank].outstanding < state.ranks[best].outstanding:
            best = rank
    return best


def least_waiting(state: LoopState, first: int, last: int) -> int:
    """The shortest queue."""
    best = first
    for rank in range(first + 1, last):
        if state.ranks[rank].waiting < state.ranks[best].waiting:
            best = rank
    return best


def power_of_two(state: LoopState, first: int, last: int) -> int:
    """Of two ranks by chance the one with fewer requests that have not ended."""
    one, other = first + draw(state, last - first), first + draw(state, last - first)
    return other if state.ranks[other].outstanding < state.ranks[one].outstanding else one


def kv_aware(state: LoopState, setup: ServingSetup, slot: int, first: int, last: int) -> int:
    """The fewest blocks: those of the prompt that its cache lacks, and those that its requests hold (as NVIDIA
    Dynamo's router weighs them)."""
    best, least = first, 1 << 60
    for rank in range(first, last):
        rules = rules_of(setup, rank)
        lacks = state.slots[slot].input - hit_tokens(state, rules, rank, slot)
        waits = state.ranks[rank].work // rules.block_tokens
        cost = blocks_for(lacks, rules.block_tokens) + rules.blocks - state.ranks[rank].free + waits
        if cost < least:
            best, least = rank, cost
    return best


def shortest(state: LoopState, first: int, last: int) -> int:
    """The fewest tokens still to compute: Splitwise's queues."""
    best = first
    for rank in range(first + 1, last):
        if state.ranks[rank].work < state.ranks[best].work:
            best = rank
    return best
