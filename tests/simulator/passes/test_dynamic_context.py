"""Context parallelism per sequence: as good as the best of all ways where those can be tried, and always sound."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.simulator.passes.dynamic_context import Work, attention_work, dynamic_context
from opcast.simulator.question.plan import PlanError

WORK = attention_work(hidden=1024, layer_flops_per_token=24 * 1024**2, exchange_flops_per_token=2 * 1024**2)


def blocks(ranks: int, length: int) -> list[tuple[int, int]]:
    """(degree, first rank) of every way to place a sequence."""
    degrees = [d for d in range(1, ranks + 1) if ranks % d == 0 and length % d == 0]
    return [(degree, first) for degree in degrees for first in range(0, ranks, degree)]


def best_of_all(lengths: list[int], ranks: int, work: Work) -> float:
    """The least load of the busiest rank, by trying everything."""
    best = float("inf")
    for choice in product(*(blocks(ranks, length) for length in lengths)):
        loads = [0.0] * ranks
        for length, (degree, first) in zip(lengths, choice, strict=True):
            both = [False, True] if degree > 1 and length % (2 * degree) == 0 else [False]
            for rank in range(first, first + degree):
                loads[rank] += min(work(length, degree, zigzag) for zigzag in both)
        best = min(best, max(loads))
    return best


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 64).map(lambda n: 256 * n), min_size=1, max_size=4), st.sampled_from([1, 2, 4]))
def test_as_good_as_the_best_of_all_ways(lengths: list[int], ranks: int):
    found = dynamic_context(lengths, ranks, WORK)
    assert found.busiest == pytest.approx(best_of_all(lengths, ranks, WORK), rel=1e-9)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 1 << 17), min_size=0, max_size=40), st.sampled_from([1, 2, 6, 8, 16]))
def test_every_sequence_is_placed_once_and_loads_add_up(lengths: list[int], ranks: int):
    found = dynamic_context(lengths, ranks, WORK)
    assert [p.length for p in found.placements] == lengths
    loads = [0.0] * ranks
    for placement in found.placements:
        first = placement.ranks[0]
        assert first % placement.degree == 0
        assert ranks % placement.degree == 0
        assert placement.ranks == tuple(range(first, first + placement.degree))
        assert placement.length % (placement.degree * (2 if placement.zigzag else 1)) == 0
        for rank in placement.ranks:
            loads[rank] += WORK(placement.length, placement.degree, placement.zigzag)
    assert found.load == pytest.approx(loads)
    assert found == dynamic_context(lengths, ranks, WORK)


def test_short_sequences_stay_whole_and_long_ones_are_spread():
    lengths = [131072, *[2048] * 56]
    found = dynamic_context(lengths, 8, WORK)
    long, *short = found.placements
    assert (long.degree, long.zigzag) == (8, True)
    assert {p.degree for p in short} == {1}
    assert max(found.load) / min(found.load) == pytest.approx(1.0)
    everything_spread = sum(WORK(length, 8, True) for length in lengths)
    assert found.busiest < everything_spread


def test_zigzag_shares_pairs_evenly_and_a_row_does_not():
    work = attention_work(hidden=1, layer_flops_per_token=0.0)
    assert 4 * work(64, 4, True) == work(64, 1, False)
    assert work(64, 4, False) == pytest.approx(4 * (16 * 48 + 16 * 17 / 2))


def test_impossible_batches_are_one_line():
    with pytest.raises(PlanError, match="at least 1, not 0"):
        dynamic_context([4, 0], 2, WORK)


def test_large_batches_are_quick_and_balanced():
    lengths = [64 * (1 + (i * 7919) % 2000) for i in range(500)]
    found = dynamic_context(lengths, 64, WORK)
    assert found.busiest < 1.02 * sum(found.load) / 64
