"""Runs of the prefix cache are used as a plain line of blocks would be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from opcast.simulator.question.serving import ServingRequest
from opcast.simulator.serving import blocks, fleet, loop, moving, queues, repeating, routing, scorers, setup, tiers
from opcast.simulator.serving.policies import sglang
from opcast.simulator.serving.state import NONE

from .test_repeating import free_contents, requests

Play = Callable[..., Any]
USERS = (blocks, fleet, loop, moving, queues, repeating, routing, scorers, sglang, tiers)
PLAIN = ("take", "let_go", "hit_tokens", "idle_hits", "sit", "remember", "remember_own")


class PlainBlocks:
    """Every block by itself: those that are free in line, every content with the blocks that have it, the first that
    had it first, and the blocks of every request. Contents of a request's own are like all others."""

    def __init__(self) -> None:
        self.lines: dict[int, list[int]] = {}
        self.having: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.contents: dict[tuple[int, int], int] = {}
        self.users: dict[tuple[int, int], int] = defaultdict(int)
        self.held: dict[int, list[int]] = defaultdict(list)

    def line(self, state: Any, rank: int) -> list[int]:
        return self.lines.setdefault(rank, list(range(state.ranks[rank].bare)))

    def take(self, state: Any, rules: Any, rank: int, slot: int, count: int) -> None:
        scheduler = state.ranks[rank]
        for _ in range(count if blocks.caches_prefixes(state) else 0):
            block = self.line(state, rank).pop(0)
            if (rank, block) in self.contents:
                self.having[rank, self.contents.pop((rank, block))].remove(block)
            self.users[rank, block] = 1
            self.held[slot].append(block)
        state.slots[slot].blocks += count
        scheduler.free -= count
        scheduler.peak = max(scheduler.peak, rules.blocks - scheduler.free)

    def let_go(self, state: Any, rank: int, slot: int) -> None:
        request, scheduler, line = state.slots[slot], state.ranks[rank], self.line(state, rank)
        for block in reversed(self.held.pop(slot, [])):
            self.users[rank, block] -= 1
            if self.users[rank, block] == 0:
                scheduler.free += 1
                line.insert(len(line) if (rank, block) in self.contents else 0, block)
        state.seats[rank, scheduler.seats] = request.seat
        scheduler.seats += 1
        request.seat = NONE

    def hits(self, state: Any, rules: Any, rank: int, slot: int, most: int) -> list[int]:
        found = []
        for index in range(most):
            having = self.having[rank, int(blocks.content(state, rules, slot, index))]
            if not having:
                break
            found.append(having[0])
        return found

    def hit_tokens(self, state: Any, rules: Any, rank: int, slot: int) -> int:
        request, size = state.slots[slot], rules.block_tokens
        if not blocks.caches_prefixes(state):
            return 0
        return len(self.hits(state, rules, rank, slot, (request.input + request.made - 1) // size)) * size

    def idle_hits(self, state: Any, rules: Any, rank: int, slot: int, tokens: int) -> int:
        most = (tokens - state.slots[slot].tiered) // rules.block_tokens
        return sum(self.users[rank, block] == 0 for block in self.hits(state, rules, rank, slot, most))

    def sit(self, state: Any, rules: Any, rank: int, slot: int, tokens: int) -> None:
        scheduler, request = state.ranks[rank], state.slots[slot]
        scheduler.seats -= 1
        request.seat = state.seats[rank, scheduler.seats]
        for block in self.hits(state, rules, rank, slot, tokens // rules.block_tokens):
            if self.users[rank, block] == 0:
                self.line(state, rank).remove(block)
                scheduler.free -= 1
            self.users[rank, block] += 1
            self.held[slot].append(block)
        request.blocks = tokens // rules.block_tokens
        state.totals[0].hit_tokens += tokens

    def remember(self, state: Any, rules: Any, rank: int, slot: int, before: int, after: int) -> None:
        for index in range(before // rules.block_tokens, after // rules.block_tokens):
            block, key = self.held[slot][index], int(blocks.content(state, rules, slot, index))
            self.contents[rank, block] = key
            self.having[rank, key].append(block)

    def remember_own(self, state: Any, rank: int, slot: int) -> None:
        """They are there already."""


@settings(
    max_examples=25,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(requests())
def test_runs_are_used_as_a_plain_line_of_blocks_would_be(played: Play, request: ServingRequest) -> None:
    request = replace(request, scheduler=replace(request.scheduler, prefix_caching=True))
    ours = played(request)
    oracle = PlainBlocks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "looked_at", lambda request: True)  # iterations are formed one by one
        for module in USERS:
            for name in PLAIN:
                if hasattr(module, name):
                    patch.setattr(module, name, getattr(oracle, name))
        theirs = played(request)
    assert ours.requests.tobytes() == theirs.requests.tobytes()
    assert ours.iterations.tobytes() == theirs.iterations.tobytes()
    for rank, contents in enumerate(free_contents(ours.state)):
        line = oracle.lines.get(rank, [NONE] * len(contents))
        assert contents == [oracle.contents.get((rank, block), NONE) for block in line]
