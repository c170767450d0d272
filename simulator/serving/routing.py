"""Which rank a request goes to: one function and one row of :data:`TABLE` for each router, over the ranks ``first`` ..
``last`` - 1 of its pool.

A router of a user's own has the same form, ``route(state, setup, slot, first, last)``, and returns a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..question.serving import ROUTERS
from .blocks import blocks_for, hit_tokens
from .chain import chain
from .counted import by_counts
from .fleet import takes
from .rules import ServingSetup, rules_of
from .scorers import by_scores, pick
from .state import LoopState

Route = Callable[[Any, Any, int, int, int], int]


@dataclass(frozen=True)
class RequestRouter:
    """``choose`` returns the rank of a request; whether it ``reads_blocks`` of the caches of ranks."""

    choose: Route
    reads_blocks: bool = False


def route(state: LoopState, setup: ServingSetup, slot: int, first: int, last: int) -> int:
    """The rank of a request by the router of the set-up."""
    if last - first == 1:
        return first
    rank = first
    for _ in range(last - first):
        rank = chosen(state, setup, slot, first, last)
        if setup.choosy == 0 or takes(state, setup, slot, rank):
            break
    return rank


def draw(state: LoopState, count: int) -> int:
    """A random number below ``count``, by Lehmer's generator: the same with and without numba."""
    return pick(state, count)


def round_robin(state: LoopState, setup: ServingSetup, slot: int, first: int, last: int) -> int:
    """One after the other."""
    totals = state.totals[0]
    if first > 0:
        totals.decode_turn += 1
        return first + (totals.decode_turn - 1) % (last - first)
    totals.turn += 1
    return (totals.turn - 1) % last


def at_random(state: LoopState, setup: ServingSetup, slot: int, first: int, last: int) -> int:
    """Any of them."""
    return first + draw(state, last - first)


def least_outstanding(state: LoopState, setup: ServingSetup, slot: int, first: int, last: int) -> int:
    """The fewest requests that have not ended."""
    best, least = first, 1 << 60
    for rank in range(first, last):
        if state.ranks[rank].outstanding < least and (setup.choosy == 0 or takes(state, setup, slot, rank)):
            best, least = rank, state.ranks[rank].outstanding
    return best


def least_waiting(state: LoopState, setup: ServingSetup, slot: int, first: int, last: int) -> int:
    """The shortest queue."""
    best, least = first, 1 << 60
    for rank in range(first, last):
        if state.ranks[rank].waiting < least and (setup.choosy == 0 or takes(state, setup, slot, rank)):
            best, least = rank, state.ranks[rank].waiting
    return best


def power_of_two(state: LoopState, setup: ServingSetup, slot: int, first: int, last: int) -> int:
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
        if cost < least and (setup.choosy == 0 or takes(state, setup, slot, rank)):
            best, least = rank, cost
    return best


def shortest(state: LoopState, setup: ServingSetup, slot: int, first: int, last: int) -> int:
    """The fewest tokens still to compute: Splitwise's queues."""
    best, least = first, 1 << 60
    for rank in range(first, last):
        if state.ranks[rank].work < least and (setup.choosy == 0 or takes(state, setup, slot, rank)):
            best, least = rank, state.ranks[rank].work
    return best


TABLE = {
    "round_robin": RequestRouter(round_robin),
    "random": RequestRouter(at_random),
    "least_outstanding": RequestRouter(least_outstanding),
    "least_waiting": RequestRouter(least_waiting),
    "power_of_two": RequestRouter(power_of_two),
    "kv_aware": RequestRouter(kv_aware, reads_blocks=True),
    "splitwise": RequestRouter(shortest),
    "scorers": RequestRouter(by_scores, reads_blocks=True),
    "vllm_dp": RequestRouter(by_counts),
}


def link_route(code: int, choose: Route, others: Route) -> Route:
    """A function that routes as ``choose`` does where the router is ``code``, else as ``others``."""

    def route_one(state: LoopState, setup: ServingSetup, slot: int, first: int, last: int) -> int:
        if setup.router == code:
            return choose(state, setup, slot, first, last)
        return others(state, setup, slot, first, last)

    return route_one


ROUTES = chain(link_route, [TABLE[name].choose for name in ROUTERS], round_robin)
chosen = ROUTES[-1]
