"""Blocks of the prefix cache are found as a plain list of all contents would have them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from opcast.simulator.question.serving import ServingRequest
from opcast.simulator.serving import blocks, fleet, loop, queues, repeating, tiers
from opcast.simulator.serving.state import LINE, NONE

from .test_repeating import requests

Play = Callable[..., Any]
USERS = (blocks, fleet, loop, queues, repeating, tiers)


class PlainList:
    """Every block by its content, the first that had it first; contents of a request's own like all others."""

    def __init__(self) -> None:
        self.having: dict[tuple[int, int], list[int]] = defaultdict(list)

    def find(self, state: Any, rank: int, key: int) -> int:
        return self.having[rank, int(key)][0] if self.having[rank, int(key)] else NONE

    def forget(self, state: Any, rank: int, block: int) -> None:
        row = state.blocks[blocks.ring_of(state, rank) + block]
        if row.key != NONE:
            self.having[rank, int(row.key)].remove(int(block))
        row.key = NONE

    def remember(self, state: Any, rules: Any, rank: int, slot: int, before: int, after: int) -> None:
        size = rules.block_tokens
        for index in range(before // size, after // size):
            block = int(state.table[rank, state.slots[slot].seat, index])
            key = int(blocks.content(state, rules, slot, index))
            state.blocks[blocks.ring_of(state, rank) + block].key = key
            self.having[rank, key].append(block)

    def remember_own(self, state: Any, rules: Any, rank: int, slot: int) -> None:
        """They are there already."""


@settings(
    max_examples=25,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(requests())
def test_what_is_found_is_what_a_plain_list_would_find(played: Play, request: ServingRequest) -> None:
    request = replace(request, scheduler=replace(request.scheduler, prefix_caching=True))
    ours = played(request)
    oracle = PlainList()
    with pytest.MonkeyPatch.context() as patch:
        for module in USERS:
            for name in ("find", "forget", "remember", "remember_own"):
                if hasattr(module, name):
                    patch.setattr(module, name, getattr(oracle, name))
        theirs = played(request)
    assert ours.requests.tobytes() == theirs.requests.tobytes()
    assert ours.iterations.tobytes() == theirs.iterations.tobytes()
    for name in ("users", "after", "before"):
        assert (ours.state.blocks[name] == theirs.state.blocks[name]).all()


@pytest.mark.parametrize("size", [16, 64, 4096])
def test_searches_come_to_every_bucket_once_and_neighbours_share_a_line(size: int) -> None:
    bucket, seen = 5, []
    for _ in range(size):
        seen.append(bucket)
        bucket = blocks.next_bucket(bucket, size)
    assert bucket == 5
    assert sorted(seen) == list(range(size))
    steps = [blocks.step_of(each, size) for each in seen]
    assert (np.diff(steps) % size == 1).all()
    for first in (0, 7 * LINE, -blocks.INDICES, (1 << 44) + 3 * LINE):
        homes = [blocks.home(first + index, size) for index in range(LINE)]
        assert len({each // LINE for each in homes}) == 1
        assert len(set(homes)) == LINE
