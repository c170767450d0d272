"""Each call at its own reuse distance, by the curves of a machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from opcast.datasets.devices import Device
from opcast.datasets.ops import make_op
from opcast.simulator.engines import Answers
from opcast.simulator.graph import Block, Graph, HostCalls, Node, Tensor
from opcast.simulator.timing.coldness import coldness_of, concatenate
from opcast.simulator.timing.costs import cost_graphs
from opcast.simulator.timing.latencies import python_us

MIB = 2**20
CURVES: dict[str, Any] = {
    "distances": (0.0, 1.0 * MIB, 8.0 * MIB, 64.0 * MIB),
    "code": {"pointwise": (0.0, 0.1, 0.3, 0.6)},
    "data": {"pointwise": (0.2, 0.4, 0.8, 1.0)},
    "code_us": 10.0,
    "host_us": (1.0, 1.0, 2.0, 5.0),
}


def cpu(**changes: Any) -> Device:
    """A CPU whose curves were measured."""
    figures = {
        "id": "cpu_of_mine",
        "name": "CPU of mine",
        "vendor": "cpu",
        "architecture": "avx2",
        "compute_units": 2,
        "clock_mhz": 2500.0,
        "tensor_tflops": {"fp32": 0.2},
        "vector_tflops": 0.06,
        "memory_gib": 8.0,
        "memory_gbps": 40.0,
        "l2_mib": 16.0,
        "l2_gbps": 200.0,
        "reuse": CURVES,
    }
    return Device.from_dict(figures | changes)


def layers(count: int, weight_bytes: int) -> Graph:
    """Per layer a product that streams a weight of its own, and a small addition behind it."""
    product = make_op("gemm", "fp32", m=1, n=weight_bytes // 4096, k=1024)
    adds = make_op("elementwise", "fp32", numel=256, inputs=2)
    made, own = count + 1, HostCalls(dispatch=1)
    nodes = (
        Node(product, "aten.mm", "layers.0", "forward", (0, 1), (made,), int(product.cost.bytes)),
        Node(adds, "aten.add", "layers.0", "forward", (made,), (0,), int(adds.cost.bytes), host=own),
    )
    tensors = (
        Tensor(0, 1024, "fp32", "activation"),
        Tensor(1, weight_bytes, "fp32", "weight", count),
        Tensor(made, 1024, "fp32", "activation"),
    )
    return Graph("layers", (Block(nodes, count, {1: 1}),), tensors, weight_bytes * count, 1.0)


class Fixed:
    """Answers 10 us warm and 110 us cold."""

    name = "fixed"

    def answer(self, kind: str, columns: Any, dtype: str, out_dtype: str, cache: str) -> Answers:
        found = Answers.declined(len(next(iter(columns.values()))))
        us = 0.0 if kind == "host_overhead" else 110.0 if cache == "cold" else 10.0
        found.latency_us[:], found.low_us[:], found.high_us[:], found.engine[:] = us, 0.9 * us, 1.1 * us, self.name
        return found


def test_what_was_touched_longer_ago_is_colder() -> None:
    near, far = (coldness_of(layers(40, size), cpu()) for size in (MIB // 4, 8 * MIB))
    assert (far.data >= near.data - 1e-12).all()
    assert far.code[1] > near.code[1]
    assert far.python_us[1] > near.python_us[1] >= 1.0
    assert far.data[0] > 0.95  # a weight that is read once a step
    assert far.code[1] == pytest.approx(0.3, abs=0.02)  # 8 MiB since the last addition


def test_a_call_lies_between_warm_and_cold_by_its_code_and_its_data() -> None:
    graph, device = layers(40, 8 * MIB), cpu(memory_gbps=400.0)
    cold = coldness_of(graph, device)
    (costs,) = cost_graphs([graph], device, Fixed())
    assert costs.kernel_us == pytest.approx(10.0 + 10.0 * cold.code + 90.0 * cold.data)
    assert costs.low == pytest.approx(0.9)
    assert costs.host_us == pytest.approx(cold.python_us * np.array([1, 2]))


def test_python_runs_around_the_operators_of_the_forward_pass_alone() -> None:
    cold = concatenate([coldness_of(layers(3, MIB), cpu())])
    nodes = list(layers(3, MIB).blocks[0].nodes)
    backward = [Node(n.op, n.source, n.path, "backward", n.reads, n.writes, n.bytes_moved) for n in nodes]
    assert python_us(backward, cold).tolist() == [0.0, 0.0]
    assert (python_us(nodes, cold) > 0).all()


def test_without_curves_the_law_of_the_cache_holds() -> None:
    found = coldness_of(layers(40, 8 * MIB), cpu(reuse={}))
    assert found.python_us.tolist() == found.code_us.tolist() == [0.0, 0.0]
    assert 0 < found.data[1] < found.data[0] < 1


@pytest.mark.parametrize("curves", [CURVES, {}])
def test_weights_that_are_read_once_a_step_come_from_memory_whatever_cache_is_claimed(curves: dict[str, Any]) -> None:
    """A virtual machine that was told of 480 MiB of its host's cache: answers of 10 and 110 us are its caches'."""
    graph, claiming = layers(40, 8 * MIB), cpu(l2_mib=480.0, memory_gbps=32.6, reuse=curves)
    (costs,) = cost_graphs([graph], claiming, Fixed())
    assert costs.kernel_us[0] >= 0.85 * 8 * MIB / (32.6 * 1e3)
    assert costs.kernel_us[1] <= 110.0  # an addition has no weights
