"""Streams of a device: order, waiting, host, sharing while they overlap, and repetitions that are left out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.ops import make_op
from opcast.simulator.graph import Block, Node
from opcast.simulator.timing.schedule.program import group_of
from opcast.simulator.timing.schedule.streams import Overlap, Placed, place

STREAMS = ("compute", "comm:dp", "comm:tp", "copy")
GEMM = make_op("gemm", m=64, n=64, k=64)


def program_of(nodes: Sequence[Node]) -> tuple[Block, ...]:
    """Nodes that do not repeat, as a program."""
    return (Block(tuple(nodes)),)


def node(
    stream: str = "compute", reads: tuple[int, ...] = (), writes: tuple[int, ...] = (), link: str = "nvlink"
) -> Node:
    if stream == "compute":
        return Node(GEMM, "aten.mm", "layer", "forward", reads, writes, 0)
    if stream == "copy":
        op = make_op("copy", size_bytes=64, direction="d2h")
        return Node(op, "aten.copy_", "layer", "forward", reads, writes, 64, stream=stream)
    op = make_op("all_reduce", size_bytes=64, ranks=8, ranks_per_node=8, link=link)
    group = stream.partition(":")[2]
    return Node(op, "nccl.all_reduce", "layer", "forward", reads, writes, 64, group=group, stream=stream)


@st.composite
def programs(draw: st.DrawFn, streams: tuple[str, ...] = STREAMS, longest: int = 25) -> tuple[Block, ...]:
    tensors = st.lists(st.integers(0, 12), max_size=3, unique=True).map(tuple)
    links = st.sampled_from(["nvlink", "ib"])
    nodes = st.builds(node, st.sampled_from(streams), tensors, tensors, links)
    return program_of(draw(st.lists(nodes, min_size=1, max_size=longest)))


@st.composite
def folded(draw: st.DrawFn) -> tuple[Block, ...]:
    """Blocks that repeat, whose values are carried on, prefetched, and read again backwards."""
    size = 100  # no tensor's repetitions reach another's
    blocks: list[Block] = []
    for number in range(draw(st.integers(1, 3))):
        steps = {t * size: draw(st.sampled_from([0, 1, 1, -1])) for t in range(2, 9)}
        tensor = st.sampled_from([t + carried for t, s in steps.items() for carried in ((0, 1) if s == 1 else (0,))])
        tensors = st.lists(tensor, max_size=2, unique=True).map(tuple)
        nodes = draw(st.lists(st.builds(node, st.sampled_from(STREAMS), tensors, tensors), min_size=1, max_size=8))
        full = {t + carried: s for t, s in steps.items() for carried in ((0, 1) if s == 1 else (0,))}
        repeat = draw(st.integers(1, 30)) if number else draw(st.integers(19, 40))
        blocks.append(Block(tuple(nodes), repeat, full))
    return tuple(blocks)


def written_out(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    return program_of([each for block in blocks for i in range(block.repeat) for each in block.repetition(i)])


def latencies(blocks: tuple[Block, ...], seed: int, most: float = 10.0) -> np.ndarray:
    count = sum(len(block.nodes) for block in blocks)
    return np.random.default_rng(seed).uniform(0.5, most, count)


def streams_of(blocks: tuple[Block, ...], placed: Placed) -> np.ndarray:
    return np.array([n.stream for block in blocks for n in block.nodes])[placed.node]


@given(st.integers(1, 30), st.integers(0, 99), st.booleans())
@settings(deadline=None)
def test_one_stream_runs_node_after_node(count: int, seed: int, hosted: bool) -> None:
    blocks = program_of([node()] * count)
    latency = latencies(blocks, seed)
    host = latencies(blocks, seed + 1) if hosted else None
    placed = place(blocks, latency, host)
    clock = issued = 0.0
    for position in range(count):
        issued += host[position] if host is not None else 0.0
        start = max(clock, issued)
        assert placed.start_us[position] == pytest.approx(start)
        clock = start + latency[position]
    assert placed.total_us == pytest.approx(clock)
    assert placed.compute_us == pytest.approx(latency.sum())
    assert placed.idle_us == pytest.approx(clock - latency.sum())


@given(st.integers(1, 30), st.integers(0, 99), st.floats(0, 5))
@settings(deadline=None)
def test_gaps_between_kernels_add_up_unless_the_host_is_waited_for(count: int, seed: int, gap_us: float) -> None:
    blocks = program_of([node()] * count)
    latency = latencies(blocks, seed)
    ahead = place(blocks, latency, gap_us=gap_us)
    assert ahead.total_us == pytest.approx(latency.sum() + count * gap_us)
    assert ahead.compute_us == pytest.approx(latency.sum())
    assert ahead.idle_us == pytest.approx(count * gap_us, abs=1e-9)
    host = np.full(count, latency.max() + gap_us)
    assert place(blocks, latency, host, gap_us=gap_us).total_us == pytest.approx(host.sum() + gap_us + latency[-1])


@given(programs(), st.integers(0, 99), st.floats(0, 5))
@settings(deadline=None)
def test_streams_keep_their_gaps(blocks: tuple[Block, ...], seed: int, gap_us: float) -> None:
    latency = latencies(blocks, seed)
    placed = place(blocks, latency, gap_us=gap_us)
    for name in set(stream := streams_of(blocks, placed)):
        mine = np.flatnonzero(stream == name)
        assert (placed.start_us[mine][1:] >= placed.end_us[mine][:-1] + gap_us - 1e-9).all()
    assert (placed.end_us - placed.start_us >= latency[placed.node] - 1e-9).all()
    assert placed.compute_us + sum(placed.exposed_us.values()) + placed.idle_us == pytest.approx(placed.total_us)


@given(programs(), st.integers(0, 99), st.floats(0, 1), st.floats(0, 1), st.booleans())
@settings(deadline=None)
def test_streams_keep_their_order_tensors_and_shares(
    blocks: tuple[Block, ...], seed: int, compute: float, communication: float, hosted: bool
) -> None:
    latency = latencies(blocks, seed)
    host = latencies(blocks, seed + 1, 2.0) if hosted else None
    placed = place(blocks, latency, host, Overlap(compute, communication))
    stream = streams_of(blocks, placed)
    for name in set(stream):
        mine = np.flatnonzero(stream == name)
        assert (placed.start_us[mine][1:] >= placed.end_us[mine][:-1] - 1e-9).all()
    nodes = blocks[0].nodes
    for later, after in enumerate(nodes):
        for earlier, before in enumerate(nodes[:later]):
            if set(before.writes) & {*after.reads, *after.writes} or set(before.reads) & set(after.writes):
                assert placed.start_us[later] >= placed.end_us[earlier] - 1e-9
    assert (placed.end_us - placed.start_us >= latency - 1e-9).all()
    if host is not None:
        assert (placed.start_us >= np.cumsum(host) - 1e-9).all()
    assert placed.compute_us + sum(placed.exposed_us.values()) + placed.idle_us == pytest.approx(placed.total_us)
    lengths = placed.end_us - placed.start_us
    for group in placed.exposed_us:
        whole = lengths[[group_of(n) == group for n in nodes]].sum()
        assert placed.exposed_us[group] + placed.hidden_us[group] == pytest.approx(whole)
        assert placed.exposed_us[group] <= whole + 1e-9


@given(programs(("compute", "comm:dp", "copy")), st.integers(0, 99), st.data())
@settings(deadline=None)
def test_longer_nodes_end_nothing_earlier_where_nothing_is_shared(
    blocks: tuple[Block, ...], seed: int, data: st.DataObject
) -> None:
    latency = latencies(blocks, seed)
    longer = latency.copy()
    longer[data.draw(st.integers(0, len(latency) - 1))] += 3.0
    assert (place(blocks, longer).end_us >= place(blocks, latency).end_us - 1e-9).all()


@given(folded(), st.integers(0, 99), st.floats(0, 0.5), st.sampled_from([0.0, 0.3, 5.0]), st.sampled_from([0.0, 0.2]))
@settings(deadline=None, max_examples=60)
def test_repetitions_left_out_change_nothing(
    blocks: tuple[Block, ...], seed: int, slowdown: float, host_us: float, waiting: float
) -> None:
    latency = latencies(blocks, seed)
    host = np.full(len(latency), host_us)
    waits = np.random.default_rng(seed).random(len(latency)) < waiting
    overlap = Overlap(slowdown, slowdown)
    quick = place(blocks, latency, host, overlap, waits)
    slow = place(written_out(blocks), latency[quick.node], host[quick.node], overlap, waits[quick.node])
    assert np.allclose(quick.start_us, slow.start_us, rtol=1e-6, atol=1e-6)
    assert np.allclose(quick.end_us, slow.end_us, rtol=1e-6, atol=1e-6)
    assert quick.exposed_us == pytest.approx(slow.exposed_us, rel=1e-6, abs=1e-5)
    assert quick.idle_us == pytest.approx(slow.idle_us, rel=1e-6, abs=1e-5)


@given(programs(), st.integers(0, 99), st.integers(0, 99))
@settings(deadline=None)
def test_after_a_wait_the_host_issues_from_its_end_on(blocks: tuple[Block, ...], seed: int, where: int) -> None:
    latency, host = latencies(blocks, seed), latencies(blocks, seed + 1, 3.0)
    waits = np.zeros(len(latency), dtype=bool)
    waits[where % len(latency)] = True
    alone = Overlap(0.0, 0.0)  # what starts later is slowed by less beside it, and may end earlier for it
    level, ahead = place(blocks, latency, host, alone, waits), place(blocks, latency, host, alone)
    stop = int(np.flatnonzero(waits)[0])
    issued = level.end_us[stop] + np.cumsum(host[stop + 1 :])
    assert (level.start_us[stop + 1 :] >= issued - 1e-9).all()
    assert level.total_us >= ahead.end_us[: stop + 1].max() - 1e-9
    assert place(blocks, latency, None, waits=waits).total_us == place(blocks, latency).total_us


@settings(max_examples=60, deadline=None)
@given(st.one_of(programs(), programs(("compute",))), st.integers(0, 99), st.floats(0.0, 50.0))
def test_a_host_that_began_earlier_ends_nothing_later(blocks: tuple[Block, ...], seed: int, lead_us: float) -> None:
    latency, host = latencies(blocks, seed), latencies(blocks, seed + 1, 8.0)
    level, ahead = place(blocks, latency, host), place(blocks, latency, host, lead_us=lead_us)
    if len({node.stream for block in blocks for node in block.nodes}) == 1:
        assert ahead.total_us == pytest.approx(max(level.total_us - lead_us, level.total_us - level.idle_us))
    long_ago = place(blocks, latency, host, lead_us=float(host.sum()) * max(block.repeat for block in blocks) + 1.0)
    assert long_ago.start_us == pytest.approx(place(blocks, latency).start_us)


def test_a_host_ahead_loses_its_lead_by_waiting() -> None:
    blocks, latency, host = program_of([node()] * 3), np.array([10.0, 1.0, 1.0]), np.full(3, 2.0)
    assert place(blocks, latency, host).start_us.tolist() == [2, 12, 13]
    waits = np.array([True, False, False])
    assert place(blocks, latency, host, waits=waits).start_us.tolist() == [2, 14, 16]
    assert place(blocks, latency, host, waits=waits, lead_us=1.5).start_us.tolist() == [0.5, 12.5, 14.5]


def test_communication_hides_behind_compute_that_does_not_need_it() -> None:
    blocks = program_of(
        [node(writes=(1,)), node("comm:dp", (1,), (1,)), node(writes=(2,)), node(reads=(1,), writes=(3,))]
    )
    placed = place(blocks, np.array([10.0, 8.0, 5.0, 1.0]))
    assert placed.start_us.tolist() == [0, 10, 10, 18]
    assert placed.exposed_us == {"dp": 3.0}
    assert placed.hidden_us == {"dp": 5.0}


def test_what_overlaps_takes_longer_while_it_overlaps() -> None:
    blocks = program_of([node(), node("comm:dp")])
    placed = place(blocks, np.array([10.0, 5.0]), overlap=Overlap(0.5, 0.2))
    assert placed.end_us.tolist() == pytest.approx([10 + 2, 6])  # in 6 µs computing gets 4 µs done, then 6 remain
    copied = place(program_of([node(), node("copy")]), np.array([10.0, 5.0]), overlap=Overlap(0.5, 0.2))
    assert copied.end_us.tolist() == [10, 5]


@pytest.mark.parametrize(("links", "ends"), [(("nvlink", "nvlink"), [12, 16]), (("nvlink", "ib"), [6, 10])])
def test_communications_share_a_link_of_one_kind(links: tuple[str, str], ends: list[float]) -> None:
    blocks = program_of([node("comm:dp", link=links[0]), node("comm:tp", link=links[1])])
    placed = place(blocks, np.array([6.0, 10.0]))
    assert placed.end_us.tolist() == pytest.approx(ends)
    assert sum(placed.exposed_us.values()) == pytest.approx(placed.total_us)


def test_two_programs_beside_each_other_share_the_device() -> None:
    forward = [node(writes=(1,)), node("comm:tp", (1,), (2,)), node(reads=(2,))]
    backward = [replace(n, stream=f"{n.stream}'", reads=(), writes=()) for n in [node()] * 3]
    placed = place((*program_of(forward), *program_of(backward)), np.array([4.0, 6.0, 4.0, 4.0, 4.0, 4.0]))
    assert placed.total_us == pytest.approx(20.0)  # all of the compute, and the communication hidden
    assert placed.exposed_us == {"tp": pytest.approx(0.0)}


def test_communication_on_the_compute_stream_is_exposed() -> None:
    reduced = replace(node("comm:tp", (1,), (1,)), stream="compute")
    placed = place(program_of([node(writes=(1,)), reduced, node(reads=(1,))]), np.array([4.0, 3.0, 2.0]))
    assert placed.total_us == 9.0
    assert placed.exposed_us == {"tp": 3.0}


def test_a_program_of_nothing() -> None:
    assert place((), np.zeros(0)).total_us == 0.0
    with pytest.raises(ValueError, match="2 latencies for 1 stored nodes"):
        place(program_of([node()]), np.ones(2))


def fsdp(layers: int, nodes: int = 40) -> tuple[Block, ...]:
    """Layers whose weights are gathered on a stream of their own when the layer before begins."""
    wide = layers + 2
    weights, values = 0, wide
    body = [node("comm:dp", (values,), (weights + 1,)), node(reads=(weights, values), writes=(values + 1,))]
    body += [node(reads=(values + 1,), writes=(2 * wide,))] * (nodes - 2)
    steps = {weights: 1, weights + 1: 1, values: 1, values + 1: 1, 2 * wide: 0}
    return (*program_of([node("comm:dp", (), (weights,))]), Block(tuple(body), layers, steps))


def test_a_host_that_loses_its_lead_slowly_is_walked_to_the_end() -> None:
    """First the device is behind the host, some thirty repetitions on it waits for it."""
    slow, quick = Block((node(), node("comm:dp")), 1), Block((node(), node("comm:dp")), 60)
    latency, host = np.array([100.0, 1.0, 4.0, 1.0]), np.array([1.0, 1.0, 3.5, 3.5])
    placed = place((slow, quick), latency, host)
    assert placed.total_us == pytest.approx(2 + 60 * 7 + 1)
    assert placed.idle_us > 0


def test_gathering_ahead_is_hidden_when_computing_takes_longer() -> None:
    blocks = fsdp(126)
    latency = np.full(41, 1.0)
    latency[:2] = 20.0
    placed = place(blocks, latency)
    assert placed.total_us == pytest.approx(20 + 126 * 39)
    assert placed.exposed_us == {"dp": pytest.approx(20.0)}
    latency[1] = 50.0
    assert place(blocks, latency).exposed_us == {"dp": pytest.approx(20 + 126 * 11)}


def test_five_thousand_nodes_take_little_time() -> None:
    blocks = fsdp(126)
    latency = np.random.default_rng(0).uniform(1, 5, 41)
    host = np.full(41, 0.4)

    def seconds(program: tuple[Block, ...], us: np.ndarray, issue: np.ndarray) -> float:
        started = time.process_time()
        place(program, us, issue, Overlap(0.1, 0.2))
        return time.process_time() - started

    plain = written_out(blocks)
    node_of = place(blocks, latency, host).node
    quick = min(seconds(blocks, latency, host) for _ in range(5))
    whole = min(seconds(plain, latency[node_of], host[node_of]) for _ in range(3))
    assert quick < whole / 2
    assert whole < 1.0
