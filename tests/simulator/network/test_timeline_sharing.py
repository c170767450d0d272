"""Communications of a timeline on shared links: the same as flows from event to event, whatever overlaps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.simulator.network.fabric import Fabric, Transfer
from opcast.simulator.network.shapes import Dimension, product
from opcast.simulator.network.timeline_sharing import Patterns, SharedTimeline, Traffic, Usage, run_traffic

FABRICS = {
    "ring": product([Dimension("ring", 8, 50.0)]),
    "torus": product([Dimension("ring", 4, 25.0), Dimension("ring", 4, 50.0)]),
    "switch": product([Dimension("switch", 8, 100.0)]),
}
LINK = np.array([10.0, 10.0])  # GB/s


def usage(fabric: Fabric, collective: str, group: tuple[int, ...]) -> Usage:
    algorithm = "path" if collective == "send" else "ring"
    return fabric.usage(collective, algorithm, [group])


@st.composite
def timelines(draw):
    fabric = Fabric(FABRICS[draw(st.sampled_from(sorted(FABRICS)))], "shortest")
    ranks = fabric.topology.ranks
    count = draw(st.integers(1, 4))
    groups = []
    for _ in range(count):
        collective = draw(st.sampled_from(["send", "all_gather", "all_reduce"]))
        size = 2 if collective == "send" else draw(st.integers(2, ranks))
        members = draw(st.lists(st.integers(0, ranks - 1), min_size=size, max_size=size, unique=True))
        groups.append((collective, tuple(members)))
    which = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=8))
    sizes = [draw(st.floats(1e3, 1e8)) for _ in which]
    starts = [draw(st.floats(0.0, 2e3)) for _ in which]
    stream = [draw(st.integers(0, 5)) for _ in which]
    previous = [max((j for j in range(i) if stream[j] == own), default=-1) for i, own in enumerate(stream)]
    return fabric, groups, which, sizes, starts, previous


@given(timelines())
@settings(deadline=None, max_examples=60)
def test_same_as_flows_of_the_same_transfers(timeline):
    fabric, groups, which, sizes, starts, previous = timeline
    transfers = [
        Transfer(
            *groups[at], size, None if groups[at][0] == "send" else "ring", start, (before,) if before >= 0 else ()
        )
        for at, size, start, before in zip(which, sizes, starts, previous, strict=True)
    ]
    _, expected, _ = fabric.flow(transfers)
    patterns = Patterns([usage(fabric, *each) for each in groups], fabric.topology.bandwidth_gbps)
    costs = [fabric.cost(each.collective, fabric.algorithm(each), each.group) for each in transfers]
    still = np.array([cost.latency_us for cost in costs])
    moving = patterns.us_per_byte[which] * np.array(sizes)
    traffic = Traffic(np.array(which), np.array(starts), still, moving, np.array(previous))
    _, found = run_traffic(patterns, traffic)
    assert found == pytest.approx(expected, rel=3e-3)  # flows end early by a thousandth of their own time


def pair(first: float, second: float) -> Patterns:
    """Two patterns that fill one link each and use the other's by a part."""
    return Patterns([Usage(np.array([1.0, first]), 1.0), Usage(np.array([second, 1.0]), 1.0)], LINK)


def rows_of(*rows: tuple[int, float, float, float]) -> Traffic:
    pattern, start, still, moving = zip(*rows, strict=True)
    return Traffic(np.array(pattern), np.array(start), np.array(still), np.array(moving), np.full(len(rows), -1))


def ends(patterns: Patterns, given_: Traffic) -> np.ndarray:
    return run_traffic(patterns, given_)[1]


def test_patterns_apart_do_not_wait():
    found = ends(pair(0.0, 0.0), rows_of((0, 0.0, 1.0, 10.0), (1, 5.0, 1.0, 10.0)))
    assert found == pytest.approx([11.0, 16.0])


def test_a_shared_link_is_split_while_both_move():
    found = ends(pair(1.0, 1.0), rows_of((0, 0.0, 0.0, 10.0), (1, 5.0, 0.0, 10.0)))
    assert found == pytest.approx([15.0, 20.0])


def test_the_same_pattern_twice_at_once_takes_twice_as_long():
    found = ends(pair(0.0, 0.0), rows_of((0, 0.0, 0.0, 10.0), (0, 0.0, 0.0, 10.0)))
    assert found == pytest.approx([20.0, 20.0])


def test_what_stands_still_is_in_nobodys_way():
    found = ends(pair(1.0, 1.0), rows_of((0, 0.0, 0.0, 10.0), (1, 0.0, 10.0, 10.0)))
    assert found == pytest.approx([10.0, 20.0])


def test_flows_rise_at_the_same_rate_until_a_link_is_full():
    found = ends(pair(0.5, 0.0), rows_of((0, 0.0, 0.0, 10.0), (1, 0.0, 0.0, 10.0)))
    assert found == pytest.approx([15.0, 15.0])  # one and a half flows on the second link


def test_a_stream_waits_for_the_one_before():
    rows = rows_of((0, 0.0, 1.0, 10.0), (1, 5.0, 1.0, 10.0), (0, 5.0, 1.0, 10.0))
    start, end = run_traffic(pair(1.0, 1.0), rows._replace(previous=np.array([-1, -1, 0])))
    assert start == pytest.approx([0.0, 5.0, 16.0])
    assert end == pytest.approx([16.0, 25.0, 31.0])  # while the third stands still, the second moves alone
    start, end = run_traffic(pair(0.0, 0.0), rows._replace(previous=np.array([-1, -1, 0])))
    assert (start[2], end[2]) == pytest.approx((11.0, 22.0))


@given(st.lists(st.tuples(st.integers(0, 1), st.floats(0, 50), st.floats(0, 5), st.floats(0.1, 20)), min_size=1))
@settings(deadline=None, max_examples=60)
def test_company_never_helps_and_capacity_is_kept(rows):
    patterns, given_ = pair(0.7, 0.3), rows_of(*rows)
    found = ends(patterns, given_)
    assert (found >= given_.start_us + given_.alone_us - 1e-6).all()
    work = np.bincount(given_.pattern, given_.moving_us, 2)
    busiest = (patterns.usages[0].load * work[0] + patterns.usages[1].load * work[1]).max()
    assert found.max() >= busiest - 1e-6


def test_load_over_time_adds_up_to_the_bytes():
    patterns = pair(0.5, 0.0)
    given_ = rows_of((0, 0.0, 0.0, 10.0), (1, 20.0, 2.0, 10.0))
    size = np.array([1e5, 2e5])
    start, end = run_traffic(patterns, given_)
    shared = SharedTimeline(patterns, given_, size, start, end, end.max(), end.max())
    load = shared.over_time(np.arange(2), 50)
    width = end.max() / 50
    carried = [1e5, 1e5 * 0.5 + 2e5]
    assert (load.sum(axis=0) * LINK * 1e3 * width) == pytest.approx(carried, rel=1e-6)
    assert load[30:, 0].max() == 0.0
    assert shared.load() * LINK * 1e3 * end.max() == pytest.approx(carried, rel=1e-6)


def test_links_that_are_used_alike_count_once():
    fabric = Fabric(product([Dimension("switch", 8, 400.0), Dimension("switch", 32, 50.0)]), "shortest")
    groups = [tuple(range(first, 256, 8)) for first in range(8)]
    rings = fabric.usage("all_gather", "ring", groups)
    sends = fabric.usage("send", "path", [(each, each + 8) for each in range(0, 256, 16)])
    patterns = Patterns([rings, sends], fabric.topology.bandwidth_gbps)
    assert fabric.topology.links == 1024
    assert patterns.share.shape == (2, 1)
