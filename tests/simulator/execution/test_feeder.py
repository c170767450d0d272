"""Nodes run when their parents have ended and their lanes are free, whatever the policy; the same every time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.datasets.traces.builder import TraceBuilder
from opcast.datasets.traces.groups import JoinedRun, RankedTraces, join_ranks
from opcast.datasets.traces.schema import CollectiveKind, NodeKind, TraceFileError
from opcast.datasets.traces.table import ExecutionTrace
from opcast.simulator.engines import ask
from opcast.simulator.engines.network import NetworkEngine
from opcast.simulator.execution import feeder
from opcast.simulator.execution.analysis import covered_us, critical_path, path_shares, simulated_accounts
from opcast.simulator.execution.feeder import execute, lanes_of
from opcast.simulator.execution.idleness import idle_shares
from opcast.simulator.execution.policies import POLICIES
from opcast.simulator.execution.run import recorded_us, simulate_run

REDUCE = CollectiveKind.ALL_REDUCE
NAMES = sorted(POLICIES)


def collective(size: int, kind: CollectiveKind = REDUCE, stream: int = 9) -> list[tuple[str, str, object]]:
    return [("is_cpu_op", "bool", False), ("comm_type", "int64", kind), ("comm_size", "int64", size),
            ("stream", "int64", stream)]  # fmt: skip


def rank(nodes: list[tuple[float, int, list[int], bool]]) -> ExecutionTrace:
    """(duration, stream, parents, collective) of each node."""
    builder = TraceBuilder()
    for id, (us, stream, parents, together) in enumerate(nodes, 1):
        if together:
            builder.add(id, "all_reduce", NodeKind.COMM_COLL, duration_us=us, data=parents, attributes=collective(8))
        else:
            builder.add(id, "gemm", duration_us=us, data=parents, attributes=[("stream", "int64", stream)])
    return builder.trace()


NODE = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.25]), st.integers(1, 3), st.sets(st.integers(0, 20), max_size=3)
)
RANK = st.lists(NODE, min_size=1, max_size=12)


def run_of(ranks: list[list[tuple[float, int, set[int]]]], together: int) -> RankedTraces:
    """Ranks of random nodes, each with as many collectives in between that follow each other."""
    traces = {}
    for number, nodes in enumerate(ranks):
        made: list[tuple[float, int, list[int], bool]] = []
        last = 0
        for place, (us, stream, parents) in enumerate(nodes):
            made.append((us, stream, sorted({1 + p % (len(made) + 1) for p in parents} - {len(made) + 1}), False))
            if place < together:
                made.append((us + 1, 9, [last, len(made)] if last else [len(made)], True))
                last = len(made)
        for _ in range(len(nodes), together):
            made.append((1.0, 9, [last] if last else [], True))
            last = len(made)
        traces[number] = rank(made)
    return RankedTraces(traces)


@settings(max_examples=60)
@given(ranks=st.lists(RANK, min_size=1, max_size=3), together=st.integers(0, 3), policy=st.sampled_from(NAMES))
def test_dependencies_and_lanes_are_kept(
    ranks: list[list[tuple[float, int, set[int]]]], together: int, policy: str
) -> None:
    run = run_of(ranks, together)
    joint = join_ranks(run)
    duration = recorded_us(run, joint)
    made = execute(run, joint, duration, policy)
    assert np.allclose(made.end_us - made.start_us, duration)
    assert (made.start_us[joint.edges.child] >= made.end_us[joint.edges.parent]).all()
    assert (made.start_us >= made.ready_us).all()
    lanes = lanes_of(run, joint)
    for lane in np.unique(lanes.values):
        on = lanes.rows[lanes.values == lane]
        assert np.sum(duration[on]) == pytest.approx(covered_us(made.start_us[on], made.end_us[on]))
    again = execute(run, joint, duration, policy)
    assert again.start_us.tolist() == made.start_us.tolist()
    if made.total_us:
        whole = simulate_run(run, policy=policy)
        path = critical_path(whole)
        assert sum(share.total_us for share in path_shares(whole, path)) == pytest.approx(whole.executions.total_us)


def test_machine_code_does_what_the_plain_loop_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    rng = np.random.default_rng(0)
    nodes = [(float(us), int(lane), {int(p)}) for us, lane, p in rng.integers(0, 19, (300, 3))]
    run = run_of([nodes, nodes[::-1]], 40)
    joint = join_ranks(run)
    plain = execute(run, joint, recorded_us(run, joint))
    monkeypatch.setattr(feeder, "COMPILE_FROM_NODES", 0)
    assert execute(run, joint, recorded_us(run, joint)).start_us.tolist() == plain.start_us.tolist()


def test_a_policy_says_which_ready_node_goes_first() -> None:
    builder = TraceBuilder()
    builder.add(1, "first", duration_us=2, attributes=[("stream", "int64", 1)])
    builder.add(2, "late", duration_us=2, start_us=9, attributes=[("stream", "int64", 1)])
    builder.add(3, "early", duration_us=2, start_us=3, attributes=[("stream", "int64", 1)])
    builder.add(4, "call", NodeKind.COMM_COLL, duration_us=2, start_us=20, attributes=collective(8, stream=1))
    run = RankedTraces({0: builder.trace()})
    joint = join_ranks(run)
    starts = {
        policy: execute(run, joint, recorded_us(run, joint), policy).start_us[joint.node[0]] for policy in POLICIES
    }
    assert np.argsort(starts["start_time"]).tolist() == [0, 2, 1, 3]
    assert np.argmin(starts["communication_first"]) == 3
    assert np.argsort(starts["fifo"]).tolist() == [0, 1, 2, 3]


def test_a_rank_that_comes_late_keeps_the_others_waiting() -> None:
    early, late = rank([(1.0, 1, [], False), (5.0, 9, [1], True)]), rank([(8.0, 1, [], False), (3.0, 9, [1], True)])
    made = simulate_run(RankedTraces({0: early, 1: late}))
    assert made.executions.total_us == 11.0  # 8, then the shorter of the two recorded calls: the other one waited
    first, second = simulated_accounts(made)
    assert (first.compute_us, first.exposed_us) == (1.0, 3.0)
    assert (second.compute_us, second.idle_us) == (8.0, 0.0)


@pytest.mark.parametrize(("kind", "op"), [(REDUCE, "all_reduce"), (CollectiveKind.ALL_GATHER, "all_gather"),
                                          (CollectiveKind.ALL_TO_ALL, "all_to_all")])  # fmt: skip
@pytest.mark.parametrize("ranks", [4, 16])
def test_collectives_of_traces_take_what_the_network_says(kind: CollectiveKind, op: str, ranks: int) -> None:
    """Rings inside a node and over two of DGX H100: the reference's one-collective traces, on our own network."""
    cluster = replace(load_cluster("dgx_h100"), nodes=2 if ranks > 8 else 1)
    traces = {}
    for number in range(ranks):
        builder = TraceBuilder()
        builder.add(1, op, NodeKind.COMM_COLL, attributes=collective(1 << 20, kind))
        traces[number] = builder.trace()
    engine = NetworkEngine(load_device("h100_sxm"), cluster)
    made = simulate_run(RankedTraces(traces), engine, cluster, compute=False)
    size = (1 << 20) * (ranks if op == "all_gather" else 1)
    near = min(ranks, 8)
    link = cluster.link if ranks <= 8 else cluster.fabric
    asked = make_op(op, size_bytes=size, ranks=ranks, ranks_per_node=near, link=link)
    assert made.executions.total_us == pytest.approx(float(ask(engine, [asked]).latency_us[0]), rel=1e-12)


def test_more_ranks_than_devices_are_refused() -> None:
    cluster = load_cluster("dgx_h100")
    run = RankedTraces({9: rank([(1.0, 1, [], False)])})
    with pytest.raises(TraceFileError, match="the cluster has devices 0 to 7"):
        simulate_run(run, NetworkEngine(load_device("h100_sxm"), cluster), cluster)


@settings(max_examples=40)
@given(ranks=st.lists(RANK, min_size=1, max_size=3), together=st.integers(0, 3), window=st.integers(1, 40))
def test_a_window_knows_so_many_nodes_of_a_rank(
    ranks: list[list[tuple[float, int, set[int]]]], together: int, window: int
) -> None:
    """Parents come first in these files: any window gets to the end, and a wide one changes nothing."""
    run = run_of(ranks, together)
    joint = join_ranks(run)
    duration = recorded_us(run, joint)
    made, whole = execute(run, joint, duration, window=window), execute(run, joint, duration)
    if window >= max(len(trace) for trace in run.traces.values()):
        assert made.start_us.tolist() == whole.start_us.tolist()
    assert (made.start_us[joint.edges.child] >= made.end_us[joint.edges.parent]).all()
    for rank, trace in run.traces.items():
        start, end = made.start_us[joint.node[rank]], made.end_us[joint.node[rank]]
        for place in range(window, len(trace)):
            assert start[place] >= np.sort(end[:place])[place - window]  # all but window - 1 of those before have ended


def test_a_window_that_is_too_small_names_the_node() -> None:
    builder = TraceBuilder()
    for id, parents in ((1, []), (2, [9]), (3, [9]), (9, [])):
        builder.add(id, "op", duration_us=1, data=parents)
    run = RankedTraces({0: builder.trace()})
    assert simulate_run(run, window=3).executions.total_us == 4.0
    with pytest.raises(TraceFileError, match=r"rank 0: node 2 waits for one that comes more than 2 nodes later"):
        simulate_run(run, window=2)


def last_first(run: RankedTraces, joint: JoinedRun) -> np.ndarray:
    """A policy of one's own."""
    return -np.arange(joint.edges.nodes)


def test_a_policy_of_ones_own_says_who_goes_first() -> None:
    builder = TraceBuilder()
    for id in range(1, 5):
        builder.add(id, "op", duration_us=1, attributes=[("stream", "int64", 1)])
    run = RankedTraces({0: builder.trace()})
    made = simulate_run(run, policy=f"{__name__}:last_first")
    assert made.executions.start_us.tolist() == [3.0, 2.0, 1.0, 0.0]
    with pytest.raises(TraceFileError, match=r"policy='fifa' is none, .* did you mean fifo"):
        simulate_run(run, policy="fifa")
    with pytest.raises(TraceFileError, match="must return a number for each of the 4 nodes"):
        simulate_run(run, policy=f"{__name__}:none")


def none(run: RankedTraces, joint: JoinedRun) -> np.ndarray:
    """A policy that says nothing."""
    return np.zeros(0)


@settings(max_examples=40)
@given(ranks=st.lists(RANK, min_size=1, max_size=3), together=st.integers(0, 3))
def test_idle_time_is_told_by_what_it_waited_for(ranks: list[list[tuple[float, int, set[int]]]], together: int) -> None:
    made = simulate_run(run_of(ranks, together))
    found = idle_shares(made)
    for each in simulated_accounts(made):
        own = [share for share in found if share.rank == each.rank]
        assert sum(share.total_us for share in own) == pytest.approx(each.idle_us, abs=1e-3)
        assert all(0 < share.longest_us <= share.total_us * (1 + 1e-12) for share in own)


def test_idle_time_names_a_late_rank_and_a_gap() -> None:
    builder = TraceBuilder()
    gap = [("stream", "int64", 1), ("opcast_op", "string", "host_gap")]
    builder.add(1, "host_gap", duration_us=3, attributes=gap)
    builder.add(2, "gemm", duration_us=1, data=[1], attributes=[("stream", "int64", 1)])
    builder.add(3, "all_reduce", NodeKind.COMM_COLL, duration_us=2, data=[2], attributes=collective(8))
    late = rank([(9.0, 1, [], False), (2.0, 9, [1], True)])
    found = [each for each in idle_shares(simulate_run(RankedTraces({0: builder.trace(), 1: late}))) if not each.rank]
    assert [(each.waited_for, each.count, each.total_us, each.node) for each in found] == [
        ("late rank", 1, 5.0, 3), ("host gap", 1, 3.0, 2)]  # fmt: skip
