"""The caching allocator: what holds of any sequence of requests, and torch's own rules on small ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.simulator.memory.allocator import (
    BLOCK,
    GRAIN,
    LARGE_SEGMENT,
    MIB,
    SMALL_SEGMENT,
    Allocator,
    OutOfMemoryError,
    SegmentPart,
)

REQUESTS = st.lists(
    st.tuples(st.integers(1, 64 * MIB), st.sampled_from(["", "comm:dp"]), st.integers(0, 9)), max_size=60
)


@settings(deadline=None)
@given(requests=REQUESTS, expandable=st.booleans())
def test_blocks_never_overlap_and_sums_agree(requests: list[tuple[int, str, int]], expandable: bool) -> None:
    allocator = Allocator(expandable=expandable)
    held: list[SegmentPart] = []
    for size, stream, release in requests:
        span = allocator.allocate(size, stream)
        assert span.size >= size
        assert span.size % BLOCK == 0
        held.append(span)
        if release < 5 and len(held) > release:
            allocator.release(held.pop(release))
        assert allocator.allocated == sum(each.size for each in held) <= allocator.reserved
        places = sorted((each.address, each.address + each.size) for each in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(places))
    for span in held:
        allocator.release(span)
    assert allocator.allocated == 0
    allocator.empty()
    assert allocator.reserved < GRAIN * 4 if expandable else allocator.reserved == 0


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=30), expandable=st.booleans())
def test_the_second_round_finds_what_the_first_left(sizes: list[int], expandable: bool) -> None:
    allocator = Allocator(expandable=expandable)
    for _ in range(2):
        held = [allocator.allocate(size) for size in sizes]
        taken = allocator.reserved
        for span in held:
            allocator.release(span)
    assert allocator.peak_reserved == taken == allocator.reserved


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, SMALL_SEGMENT),
        (MIB, SMALL_SEGMENT),
        (MIB + 1, LARGE_SEGMENT),
        (10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB),
    ],
)
def test_segments_are_those_of_torch(size: int, segment: int) -> None:
    allocator = Allocator()
    allocator.allocate(size)
    assert allocator.reserved == segment


def test_streams_do_not_share_blocks() -> None:
    allocator = Allocator()
    allocator.release(allocator.allocate(64 * MIB))
    allocator.allocate(64 * MIB, "comm:dp")
    assert allocator.reserved == 128 * MIB


def test_an_expandable_segment_serves_what_separate_ones_cannot() -> None:
    reserved = {}
    for expandable in (False, True):
        allocator = Allocator(expandable=expandable)
        for span in [allocator.allocate(40 * MIB) for _ in range(2)]:
            allocator.release(span)
        allocator.allocate(80 * MIB)
        reserved[expandable] = allocator.reserved
    assert reserved == {False: 160 * MIB, True: 80 * MIB}


def test_unused_segments_are_given_back_before_memory_runs_out() -> None:
    allocator = Allocator(capacity=100 * MIB)
    allocator.release(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert allocator.reserved == 80 * MIB
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(40 * MIB)
