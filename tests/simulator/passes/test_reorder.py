"""Reordering: a permutation that keeps every dependence, with communication early and its readers late."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import Cluster, load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.simulator.engines import build_engine
from opcast.simulator.graph import Block, Graph, Node, Tensor
from opcast.simulator.passes.order import TRAINING, Pass, apply_passes
from opcast.simulator.passes.reorder import dependences, reorder, reorder_section
from opcast.simulator.passes.rewriting.draft import Draft, Item
from opcast.simulator.question.plan import Parallel, Plan, Stack, load_stack
from opcast.simulator.timing.costs import cost_graphs
from opcast.simulator.timing.phases import time_phase
from opcast.simulator.trace import Workload, trace

H100 = load_device("h100_sxm")
PLAN = Plan(Parallel(), Cluster("c", "c", "h100_sxm", nodes=1))
ADD = make_op("elementwise", numel=8)
STREAMS = ("compute", "compute", "compute", "comm:tp", "comm:dp")
NODES = st.lists(
    st.tuples(st.sets(st.integers(0, 9), max_size=3), st.sets(st.integers(0, 9), max_size=2), st.sampled_from(STREAMS)),
    min_size=1,
    max_size=14,
)


def node(name: str, reads: tuple[int, ...], writes: tuple[int, ...], stream: str = "compute") -> Node:
    return Node(ADD, name, "", "backward", reads, writes, 0, stream=stream)


def graph(nodes: list[Node], tensors: int = 10) -> Graph:
    return Graph("g", (Block(tuple(nodes)),), (Tensor(0, 16, "bf16", "activation", tensors),), 0, 0.0)


def in_order(items: list[Item], original: list[Item]) -> bool:
    """Whether ``items`` are a permutation of ``original`` that keeps its dependences."""
    positions = {id(item): position for position, item in enumerate(items)}
    if sorted(positions) != sorted(id(item) for item in original):
        return False
    needs = dependences([item.node for item in original])
    return all(
        positions[id(original[b])] < positions[id(original[a])] for a, before in enumerate(needs) for b in before
    )


@settings(deadline=None, max_examples=300)
@given(NODES)
def test_dependences_hold_whatever_the_order(steps: list[tuple[set[int], set[int], str]]) -> None:
    nodes = [node(str(i), tuple(r), tuple(w), s) for i, (r, w, s) in enumerate(steps)]
    section = Draft(graph(nodes)).sections[0]
    before: list[Item] = list(section.items)
    reorder_section(section)
    assert in_order(section.items, before)


@settings(deadline=None, max_examples=200)
@given(NODES)
def test_values_are_the_same_in_any_order(steps: list[tuple[set[int], set[int], str]]) -> None:
    """Run as a program whose nodes hash what they read: every tensor ends with the same value."""

    def run(nodes: list[Node]) -> dict[int, int]:
        values = dict.fromkeys(range(10), 0)
        for each in nodes:
            result = hash((each.source, *(values[t] for t in each.reads)))
            values.update(dict.fromkeys(each.writes, result))
        return values

    nodes = [node(str(i), tuple(sorted(r)), tuple(sorted(w)), s) for i, (r, w, s) in enumerate(steps)]
    section = Draft(graph(nodes)).sections[0]
    reorder_section(section)
    assert run([item.node for item in section.items]) == run(nodes)


def test_a_sum_leaves_before_what_need_not_wait_and_is_read_after() -> None:
    nodes = [
        node("wgrad", (0,), (1,)),
        node("dgrad", (0,), (2,)),
        node("sum", (2,), (2,), "comm:tp"),
        node("norm", (2,), (3,)),
    ]
    made = reorder(graph(nodes), PLAN)
    assert [n.source for n in made.nodes()] == ["dgrad", "sum", "wgrad", "norm"]


def test_without_streams_nothing_moves() -> None:
    plain = graph([node("b", (1,), (2,)), node("a", (0,), (1,))])
    assert reorder(plain, PLAN) is plain


def test_gathers_of_sharded_weights_leave_earlier(small_model) -> None:
    """What ``overlap`` has not ordered is reordered; what it has is left alone."""
    traced = trace(
        small_model("llama", layers=4, hidden_size=512), Workload("train", 1, 256, attention="fused"), "bf16"
    )
    engine = build_engine(H100, [], [])

    def exposed(plan: Plan, *passes: Pass) -> float:
        costs = cost_graphs([apply_passes(traced, plan, (*TRAINING, *passes))], H100, engine)[0]
        times = (time_phase(costs, phase, plan, H100) for phase in ("forward", "backward"))
        return sum(sum(each.exposed_us.values()) for each in times)

    sharded = Plan(Parallel(zero_stage=3), load_cluster("dgx_h100"), replace(load_stack("torch"), cuda_graph=True))
    assert exposed(sharded, reorder) < 0.99 * exposed(sharded)
    cut = Plan(Parallel(tp=4), load_cluster("dgx_h100"), Stack(overlap=("tp",), cuda_graph=True))
    assert exposed(cut, reorder) == exposed(cut)
