"""Sums of serving engines: their own kernel's rows for small ones, NCCL's for those that they leave to it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import Op, make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.models.registry import Registry
from opcast.models.training import train
from opcast.simulator.engines import ask, build_engine
from opcast.simulator.question.plan import load_stack
from opcast.simulator.step.build import engine_of
from opcast.simulator.workbench import SHIPPED_PREDICTORS

SMALL, LARGE = (make_op("all_reduce", size_bytes=size, ranks=8) for size in (1 << 20, 1 << 28))
ACROSS = make_op("all_reduce", size_bytes=1 << 20, ranks=16, link="ib")
ROWS = ((SMALL, "nccl", 50.0), (LARGE, "nccl", 900.0), (ACROSS, "nccl", 120.0), (SMALL, "vllm:custom_all_reduce", 9.0))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sums")
    taken = {"device_id": "h100_sxm", "run_id": "r", "measured_at": datetime(2026, 1, 1, tzinfo=UTC)}
    rows = [Measurement(op=op, backend=backend, latency_us=us, **taken) for op, backend, us in ROWS]  # type: ignore[arg-type]
    Store(path).write(rows, "r")
    return path


@pytest.mark.parametrize(("op", "us"), [(SMALL, 9.0), (LARGE, 900.0), (ACROSS, 120.0)])
def test_an_engine_leaves_large_sums_and_those_between_nodes_to_nccl(store: Path, op: Op, us: float) -> None:
    engine = engine_of(load_stack("vllm"), build_engine(load_device("h100_sxm"), [store], []))
    assert ask(engine, [op]).latency_us.tolist() == [us]


def test_training_sums_by_nccl_whatever_the_size(store: Path) -> None:
    engine = engine_of(load_stack("torchtitan"), build_engine(load_device("h100_sxm"), [store], []))
    assert ask(engine, [SMALL, LARGE, ACROSS]).latency_us.tolist() == [50.0, 900.0, 120.0]


def test_rows_of_nccl_that_all_failed_leave_the_formula_as_it_is(tmp_path: Path) -> None:
    failed = {"device_id": "h100_sxm", "run_id": "r", "measured_at": datetime(2026, 1, 1, tzinfo=UTC)}
    row = Measurement(op=SMALL, backend="nccl", status="error", error="no peers", **failed)  # type: ignore[arg-type]
    Store(tmp_path).write([row], "r")
    device = load_device("h100_sxm")
    empty = ask(build_engine(device, [], []), [SMALL]).latency_us
    assert ask(build_engine(device, [tmp_path], []), [SMALL]).latency_us.tolist() == empty.tolist()


NORMED = SMALL.replace(norm="yes")


def answer_us(stack: str | None, paths: list[Path], op: Op) -> float:
    engine = build_engine(load_device("h100_sxm"), paths, [])
    return float(ask(engine if stack is None else engine_of(load_stack(stack), engine), [op]).latency_us[0])


@pytest.mark.parametrize("stack", ["vllm", "sglang", None])
def test_rows_with_the_norm_answer_sums_with_the_norm_alone(store: Path, tmp_path: Path, stack: str | None) -> None:
    taken = {"device_id": "h100_sxm", "run_id": "r", "measured_at": datetime(2026, 1, 1, tzinfo=UTC)}
    both = "flashinfer:trtllm_all_reduce_norm"
    row = Measurement(op=NORMED, backend=both, latency_us=11.0, **taken)  # type: ignore[arg-type]
    Store(tmp_path).write([row], "r")
    alone = 50.0 if stack is None else 9.0
    assert answer_us(stack, [store, tmp_path], SMALL) == alone
    assert answer_us(stack, [store, tmp_path], NORMED) == 11.0
    assert answer_us(stack, [tmp_path], SMALL) == answer_us(stack, [], SMALL)


@pytest.mark.parametrize("stack", ["vllm", "sglang", "trtllm"])
def test_a_norm_that_no_row_has_costs_its_way_through_memory_beside_the_sum(store: Path, stack: str) -> None:
    device = load_device("h100_sxm")
    fastest = 2 * SMALL.size_bytes / (max(device.l2_gbps, device.memory_gbps) * 1e3)
    added = answer_us(stack, [store], NORMED) - answer_us(stack, [store], SMALL)
    assert fastest * 0.99 <= added < 1.0


def test_predictors_of_rows_with_the_norm_answer_sums_with_the_norm_alone(tmp_path: Path) -> None:
    """Between measured sizes, beside the tables that ship: one predictor a kernel, whose rows all have the norm."""
    taken = {"device_id": "h100_sxm", "run_id": "r", "measured_at": datetime(2026, 1, 1, tzinfo=UTC)}
    both, alone = "flashinfer:trtllm_all_reduce_norm", "vllm:custom_all_reduce"
    rows = []
    for size in (2 ** np.arange(12, 23)).tolist():
        for op, backend, us in ((NORMED, both, 30.0), (SMALL, alone, 10.0)):
            us += size / 1e5
            rows.append(Measurement(op=op.replace(size_bytes=size), backend=backend, latency_us=us, **taken))  # type: ignore[arg-type]
    Store(tmp_path / "store").write(rows, "r")
    device, home = load_device("h100_sxm"), tmp_path / "predictors"
    train(Store(tmp_path / "store"), device, registry=Registry(home))
    engine = engine_of(load_stack("sglang"), build_engine(device, [tmp_path / "store"], [home, SHIPPED_PREDICTORS]))
    between = [op.replace(size_bytes=3 << 16) for op in (NORMED, SMALL)]
    found = ask(engine, between)
    assert found.latency_us.tolist() == pytest.approx([32.0, 12.0], rel=0.1)
    assert [each.partition("/")[0] for each in found.predictor] == [f"all_reduce@{both}", f"all_reduce@{alone}"]


@pytest.mark.parametrize("cluster", ["mi300x_8", "mi355x_8"])
def test_an_engine_sums_a_few_kilobytes_on_a_mesh_faster_than_rccl(cluster: str) -> None:
    """vLLM's and SGLang's own kernel runs on ROCm too; no table of a mesh has it."""
    machine = load_cluster(cluster)
    base = build_engine(load_device(machine.device), [], [], cluster=machine)
    sizes = [2**power for power in range(13, 25)]

    def times(stack: str, ranks: int) -> np.ndarray:
        engine = replace(base, stack=load_stack(stack), answered={}, derived={})
        sums = [make_op("all_reduce", size_bytes=size, ranks=ranks, ranks_per_node=ranks) for size in sizes]
        return ask(engine, sums).latency_us

    for ranks in (2, 4, 8):
        own, nccl = times("vllm", ranks), times("tgi", ranks)
        assert (own[1:] > 0.9 * own[:-1]).all()  # the kernel turns to two shots where one takes as long
        assert (own[:11] < nccl[:11]).all()
        assert own[-1] == nccl[-1]  # beyond what the kernel takes
    assert 5.0 < times("sglang", 8)[1] < 10.0
