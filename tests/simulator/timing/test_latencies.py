"""Timing of a graph: schedules, host time, cache state, memory, intervals."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.devices import Device
from opcast.datasets.ops import KINDS, make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.harness.plan import build_plan
from opcast.simulator.engines import Answers, build_engine
from opcast.simulator.graph import Block, Graph, HostCalls, Node, Tensor
from opcast.simulator.memory.lifetimes import peak_memory
from opcast.simulator.question.stack import STACK_DIRECTORY, known_stacks, load_stack
from opcast.simulator.simulate import alone
from opcast.simulator.timing.coldness import Coldness
from opcast.simulator.timing.costs import Costs, cost_graphs
from opcast.simulator.timing.latencies import (
    IN_STEP,
    IN_STEP_ATTENTION,
    IN_STEP_PRODUCTS,
    host_times,
    in_step_us,
    node_latencies,
    step_interval,
)
from opcast.simulator.timing.phases import PhaseTime, time_phase
from opcast.simulator.timing.residency import cold_blocks
from opcast.simulator.timing.schedule.streams import place

times = st.lists(st.floats(0.0, 1e4), min_size=1, max_size=40)


def cold_fractions(nodes: list[Node], sizes: np.ndarray, cache_bytes: float, code_bytes: int = 0) -> np.ndarray:
    """:func:`cold_blocks` of nodes in execution order, unrolled."""
    return cold_blocks((Block(tuple(nodes)),), (1,), sizes, cache_bytes, code_bytes)


def device(**changes: object) -> Device:
    """A plausible GPU, with some figures changed."""
    figures: dict[str, object] = {
        "id": "made_up",
        "name": "Made up",
        "vendor": "nvidia",
        "architecture": "test",
        "compute_units": 100,
        "clock_mhz": 1500.0,
        "tensor_tflops": {"bf16": 500.0, "fp32": 50.0},
        "vector_tflops": 50.0,
        "memory_gib": 80.0,
        "memory_gbps": 2000.0,
        "l2_mib": 40.0,
        "l2_gbps": 5000.0,
    }
    return Device.from_dict(figures | changes)


def gemm_node(m: int, tensors: tuple[int, int, int], phase: str = "forward", **more: object) -> Node:
    op = make_op("gemm", m=m, n=1024, k=1024)
    reads, writes = tensors[:2], tensors[2:]
    return Node(op, "aten.mm", "layers.0", phase, reads, writes, int(op.cost.bytes), **more)  # type: ignore[arg-type]


def chain(length: int) -> Graph:
    """Products in a row, each with its own weight, each freeing what it read."""
    nodes = tuple(
        gemm_node(256, (i, length + 1 + i, i + 1), frees=(i,), host=HostCalls(views=1)) for i in range(length)
    )
    tensors = (Tensor(0, 2**19, "bf16", "activation", length + 1), Tensor(length + 1, 2**21, "bf16", "weight", length))
    return Graph("chain", (Block(nodes),), tensors, 2**20 * length, 1e9)


def in_a_row(length: int) -> tuple[Block, ...]:
    """Nodes of which each reads what the one before wrote."""
    return (Block(tuple(Node(None, "aten.odd", "", "forward", (i,), (i + 1,), 0) for i in range(length))),)


@given(times, st.data())
def test_no_kernel_starts_before_it_is_issued_or_before_the_last_one_ended(kernel: list[float], data: st.DataObject):
    host = data.draw(st.lists(st.floats(0.0, 1e3), min_size=len(kernel), max_size=len(kernel)))
    placed = place(in_a_row(len(kernel)), np.array(kernel), np.array(host))
    end, issued = 0.0, 0.0
    for begin, lasts, issue in zip(placed.start_us.tolist(), kernel, host, strict=True):
        issued += issue
        assert begin == pytest.approx(max(end, issued), abs=1e-6)
        end = begin + lasts
    assert placed.total_us == pytest.approx(end)


def timed(graph: Graph, target: Device) -> tuple[Costs, PhaseTime]:
    """What the nodes of a forward graph cost on a device alone, and how long they take."""
    (costs,) = cost_graphs([graph], target, build_engine(target, [], []))
    return costs, time_phase(costs, "forward", alone(target, "bf16"), target)


def test_a_synchronous_device_adds_host_and_kernel_time():
    host = device(vendor="cpu", dispatch_us=5.0)
    costs, found = timed(chain(10), host)
    assert found.total_us == pytest.approx((costs.kernel_us + costs.host_us).sum())
    assert found.host_us == pytest.approx(costs.host_us.sum())
    assert found.compute_us == pytest.approx(costs.kernel_us.sum())


@given(times)
def test_launching_ahead_is_never_slower_than_waiting(kernel: list[float]):
    host = np.full(len(kernel), 5.0)
    ahead = place(in_a_row(len(kernel)), np.array(kernel), host)
    assert ahead.total_us <= sum(kernel) + host.sum() + 1e-6


def test_weights_are_cold_and_fresh_activations_warm():
    graph = chain(100)  # 200 MiB of weights against a cache of 40 MiB
    nodes = list(graph.nodes())
    cold = cold_fractions(nodes, graph.tensor_bytes, 40 * 2**20)
    weight_share = 2**21 / (2**21 + 2 * 2**19)
    assert cold[50] == pytest.approx(weight_share, rel=0.05)


def test_everything_is_warm_when_the_step_fits_the_cache():
    graph = chain(5)
    assert cold_fractions(list(graph.nodes()), graph.tensor_bytes, 2**30).max() < 0.05


def test_results_that_are_kept_are_written_to_cold_memory():
    freed = chain(100)
    nodes = [dataclasses.replace(node, frees=()) for node in freed.nodes()]
    kept = cold_fractions(nodes, freed.tensor_bytes, 40 * 2**20)
    assert kept[50] > cold_fractions(list(freed.nodes()), freed.tensor_bytes, 40 * 2**20)[50]


@given(st.integers(1, 60))
def test_a_larger_cache_never_makes_inputs_colder(mib: int):
    graph = chain(30)
    nodes = list(graph.nodes())
    small = cold_fractions(nodes, graph.tensor_bytes, mib * 2**20)
    large = cold_fractions(nodes, graph.tensor_bytes, 2 * mib * 2**20)
    assert np.all(large <= small + 1e-12)


@given(st.floats(1.0, 8.0))
def test_more_bandwidth_is_never_slower(factor: float):
    slow, fast = device(), device(memory_gbps=2000.0 * factor, l2_gbps=5000.0 * factor)
    assert timed(chain(10), fast)[1].total_us <= timed(chain(10), slow)[1].total_us * (1 + 1e-9)


def test_the_interval_holds_the_step_and_grows_with_its_ops():
    costs, found = timed(chain(10), device())
    kinds = [node.op.kind for node in costs.nodes]
    ops = [node.op for node in costs.nodes]
    low, high = step_interval(kinds, ops, costs.kernel_us, costs.low, costs.high, found.total_us)
    assert low < found.total_us < high
    wide = step_interval(kinds, ops, costs.kernel_us, costs.low * 0.5, costs.high * 2, found.total_us)
    assert wide[0] < low
    assert wide[1] > high


@given(st.lists(st.floats(1.0, 100.0), min_size=2, max_size=8), st.floats(0.0, 1.0))
def test_errors_of_a_kind_add_as_far_as_they_are_shared(times_us: list[float], shared: float):
    us = np.array(times_us)
    kinds, ops, factors = ["gemm"] * len(us), list(range(len(us))), np.full(len(us), 1.2)

    def above(ops: list[int], part: float) -> float:
        width = step_interval(kinds, ops, us, 2.0 - factors, factors, us.sum(), part)[1] - us.sum()
        return np.sqrt(width**2 - (IN_STEP_PRODUCTS * us.sum()) ** 2)

    together, apart = above(ops, 1.0), above(ops, 0.0)
    assert together == pytest.approx(0.2 * us.sum())
    assert apart == pytest.approx(0.2 * np.sqrt((us**2).sum()))
    assert above(ops, shared) == pytest.approx(np.sqrt(shared * together**2 + (1.0 - shared) * apart**2))
    assert above([0] * len(us), 0.0) == pytest.approx(together)  # one op, however often it runs, has one error


def test_what_a_step_adds_is_alike_within_a_family_and_apart_between_them():
    kinds = ["gemm", "fused_moe", "mla_decode", "attention_prefill", "all_reduce", "aten.odd"]
    us = np.array([30.0, 50.0, 20.0, 10.0, 40.0, 5.0])
    parts = np.array(
        [IN_STEP_PRODUCTS * 30.0, IN_STEP_PRODUCTS * 50.0, IN_STEP_ATTENTION * 30.0, IN_STEP * 40.0, IN_STEP * 5.0]
    )
    assert in_step_us(kinds, us) == pytest.approx(np.sqrt((parts**2).sum()))
    assert in_step_us(["gemm"] * 6, us) == pytest.approx(IN_STEP_PRODUCTS * us.sum())


def test_host_calls_delay_small_kernels_only_on_a_device_that_waits_for_the_host():
    costs, found = timed(chain(10), device(dispatch_us=50.0))
    assert found.total_us >= costs.host_us.sum()
    assert found.host_us >= costs.host_us[0]


def test_an_operator_without_a_kind_is_costed_by_its_bytes():
    odd = Node(None, "aten.odd", "", "forward", (0,), (1,), 2_000_000_000)
    graph = Graph("odd", (Block((odd,)),), (Tensor(0, 10**9, "bf16", "activation", 2),), 0, 0.0)
    costs, _ = timed(graph, device(launch_us=2.0))
    assert costs.kernel_us[0] == pytest.approx(1000.0 + 2.0)
    assert costs.engine[0] == "bytes"


@given(st.integers(2, 40), st.integers(1, 400))
def test_a_folded_block_is_as_cold_on_average_as_it_is_unrolled(repeat: int, kib: int):
    tensors = (
        Tensor(0, kib * 2**10, "bf16", "activation", repeat + 1),
        Tensor(repeat + 1, 2**20, "bf16", "weight", repeat),
    )
    node = gemm_node(256, (0, repeat + 1, 1), frees=(0,))
    block = Block((node,), repeat, {0: 1, 1: 1, repeat + 1: 1})
    target = device(l2_mib=8.0)
    folded = Graph("folded", (block,), tensors, 0, 1.0)
    (once,), (written,) = (cost_graphs([g], target, build_engine(target, [], [])) for g in (folded, folded.unrolled()))
    assert once.kernel_us[0] * repeat == pytest.approx(written.kernel_us.sum(), rel=0.02)


def test_peak_memory_is_the_largest_sum_of_living_tensors():
    nodes = (
        Node(None, "a", "", "forward", (0,), (1,), 0),
        Node(None, "b", "", "forward", (1,), (2,), 0, frees=(1,)),
        Node(None, "c", "", "forward", (2,), (3,), 0, frees=(2,)),
    )
    gib = 2**30
    tensors = (
        Tensor(0, gib, "bf16", "weight"),
        Tensor(1, 4 * gib, "bf16", "activation"),
        Tensor(2, 2 * gib, "bf16", "activation"),
        Tensor(3, gib, "bf16", "gradient"),
    )
    memory = peak_memory(Graph("m", (Block(nodes),), tensors, 1, 1.0))
    assert memory.peak_gib == pytest.approx(7.0)  # the weight and both activations while b runs
    assert (memory.weights_gib, memory.activations_gib, memory.gradients_gib) == (1.0, 6.0, 0.0)


def test_an_operator_that_has_not_run_for_long_finds_its_code_cold():
    rare = Node(None, "aten.rare", "", "forward", (), (), 0)
    products = [*chain(30).nodes()]
    nodes = [rare, *products[:2], rare, *products[2:]]
    cold = cold_fractions(nodes, chain(30).tensor_bytes, 16 * 2**20, code_bytes=2**20)
    assert cold[0] > 0.95  # since its last call the rest of a step of 60 MiB has run
    assert cold[3] < 0.4  # two products only


class MeasuredHost:
    """Answers what a campaign measured of the host, in microseconds a call."""

    name = "measured"

    def __init__(self, **per_call_us: float) -> None:
        choices = KINDS["host_overhead"].dims[0].choices
        self.per_call_us = np.array([per_call_us[what] for what in choices])

    def answer(self, kind: str, columns: dict[str, np.ndarray], dtype: str, out_dtype: str, cache: str) -> Answers:
        found = Answers.declined(len(columns["what"]))
        found.latency_us[:] = self.per_call_us[columns["what"]] * columns["calls"]
        return found


HOST = {"launch": 4.0, "dispatch": 3.0, "view": 1.0, "module": 1.5, "autograd": 9.0, "operator": 20.0}
GELU = Node(make_op("gelu", rows=1, cols=1), "aten.gelu", "", "forward", (), (), 0)


@pytest.mark.parametrize(("vendor", "expected"), [("nvidia", [7.0, 10.0]), ("cpu", [0.0, 3.0])])
def test_a_kernel_costs_its_host_a_dispatch_and_a_launch(vendor: str, expected: list[float]) -> None:
    """As the campaign's ``dispatch`` and ``launch`` say; a CPU has both inside the operator's own latency."""
    nodes = [GELU, dataclasses.replace(GELU, host=HostCalls(dispatch=1))]
    assert host_times(nodes, device(vendor=vendor), MeasuredHost(**HOST)).us.tolist() == expected


def test_an_operator_of_an_eager_model_costs_its_host_what_one_costs_inside_a_model() -> None:
    """Views, modules and Python are in it; autograd adds what it takes beyond a dispatch, which it has in it."""
    calls = (HostCalls(), HostCalls(views=2, modules=1), HostCalls(dispatch=1), HostCalls(views=1, autograd=2))
    nodes = [dataclasses.replace(GELU, host=each) for each in calls]
    rest = dataclasses.replace(GELU, source="aten.gelu.rest")  # issued with another
    engine = MeasuredHost(**HOST)
    assert host_times([*nodes, rest], device(), engine, eager=True).us.tolist() == [20.0, 20.0, 23.0, 32.0, 0.0]
    assert host_times(nodes, device(vendor="cpu"), engine, eager=True).us.tolist() == [0.0, 3.5, 3.0, 19.0]


@pytest.mark.parametrize("stack", ["torch", "torch_2023"])
def test_eager_pytorch_alone_takes_the_operators_of_a_model(stack: str) -> None:
    assert load_stack(stack).eager
    assert not any(load_stack(name).eager for name in known_stacks() if name not in ("torch", "torch_2023"))


def test_without_a_campaign_a_call_takes_what_the_data_sheet_says() -> None:
    made = device(dispatch_us=5.0)
    engine = build_engine(made, [], [], order=("analytical",))
    assert host_times([GELU], made, engine).us == pytest.approx([5.0])
    assert host_times([GELU], made, engine, eager=True).us == pytest.approx([20.0])


@pytest.mark.parametrize("campaign", ["quick", "compute"])
def test_what_campaigns_measure_of_the_host_is_what_steps_take(campaign: str, tmp_path: Path) -> None:
    """Each planned case of ``host_overhead`` that a step asks for is answered by its row, not by a law."""
    spec = yaml.safe_load((STACK_DIRECTORY.parent / "campaign" / f"{campaign}.yaml").read_text())
    spec["cases"] = [entry for entry in spec["cases"] if entry["kind"] == "host_overhead"]
    spec |= {"first": [], "settings": {**spec["settings"], "device": "cuda"}}
    cases = [case.op for case in build_plan(spec).cases]
    choices = KINDS["host_overhead"].dims[0].choices
    taken = {"device_id": "made_up", "run_id": "r", "measured_at": datetime.now(UTC)}
    us = [1e3 * HOST[choices[op.what]] * op.calls for op in cases]
    store = Store(tmp_path)
    store.write([Measurement(op=op, latency_us=each, **taken) for op, each in zip(cases, us, strict=True)], "r")  # type: ignore[arg-type]
    engine = build_engine(device(), [tmp_path], [])
    assert host_times([GELU], device(), engine).us == pytest.approx([7e3])
    eager = host_times([GELU], device(), engine, eager=True)
    assert eager.us == pytest.approx([20e3])
    unmeasured = host_times([GELU], device(), build_engine(device(), [], []), eager=True)
    assert 1.0 < eager.high < unmeasured.high
    assert unmeasured.low < eager.low < 1.0


class TwiceAsLongCold:
    """Answers 100 us warm, of which it is sure, and 200 us cold, of which it is not."""

    name = "made_up"

    def answer(self, kind: str, columns: dict[str, np.ndarray], dtype: str, out_dtype: str, cache: str) -> Answers:
        found = Answers.declined(len(next(iter(columns.values()))))
        found.latency_us[:], wide = (200.0, 20.0) if cache == "cold" else (100.0, 1.1)
        found.low_us[:], found.high_us[:] = found.latency_us / wide, found.latency_us * wide
        return found


def test_what_crosses_a_link_between_processes_of_a_cpu_is_never_cold():
    """Collectives are measured warm: what they would take cold is a guess, and so are its bounds."""
    ops = (make_op("all_reduce", "bf16", size_bytes=2**20, ranks=2), make_op("gemm", m=256, n=256, k=256))
    nodes = [Node(op, "", "", "forward", (), (), 2**20) for op in ops]
    cold = Coldness(np.ones(2), *np.zeros((3, 2)))
    latency, low, high, *_ = node_latencies(nodes, cold, device(vendor="cpu"), TwiceAsLongCold())
    assert latency.tolist() == pytest.approx([100.0, 200.0])
    assert high.tolist() == pytest.approx([1.1, 20.0])
    assert low[0] == pytest.approx(1 / 1.1)


class WarmAndCold:
    """Knows every op warm in 10 us, and cold in 100."""

    name = "two"

    def answer(self, kind: str, columns: dict[str, np.ndarray], dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        answers.latency_us[:] = answers.low_us[:] = answers.high_us[:] = 10.0 if cache == "warm" else 100.0
        answers.in_envelope[:] = True  # both were timed
        return answers


def test_communication_counts_as_warm_as_it_is_measured():
    gather = make_op("all_gather", size_bytes=1 << 20, ranks=8)
    nodes = [Node(gather, "c10d", "", "forward", (0,), (1,), 1 << 20), gemm_node(64, (0, 1, 2))]
    cold = Coldness(np.ones(2), *np.zeros((3, 2)))
    assert node_latencies(nodes, cold, device(), WarmAndCold())[0].tolist() == [10.0, 100.0]


class SureOfCold(WarmAndCold):
    """The same, known to a tenth cold, and to a factor of ten warm: rows of decoding are cold alone."""

    def answer(self, kind: str, columns: dict[str, np.ndarray], dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = super().answer(kind, columns, dtype, out_dtype, cache)
        off = 1.1 if cache == "cold" else 10.0
        answers.low_us[:], answers.high_us[:] = answers.latency_us / off, answers.latency_us * off
        return answers


@pytest.mark.parametrize(("share", "low", "high"), [(1.0, 1 / 1.1, 1.1), (0.0, 0.1, 10.0)])
def test_a_node_is_as_sure_as_the_answer_for_its_state_of_the_cache(share: float, low: float, high: float) -> None:
    cold = Coldness(np.array([share]), *np.zeros((3, 1)))
    _, found_low, found_high, *_ = node_latencies([gemm_node(64, (0, 1, 2))], cold, device(), SureOfCold())
    assert found_low.tolist() == pytest.approx([low])
    assert found_high.tolist() == pytest.approx([high])
