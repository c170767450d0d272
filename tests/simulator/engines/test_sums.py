"""Sums of serving engines: their own kernel's rows for small ones, NCCL's for those that they leave to it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.ops import Op, make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.simulator.engines import ask, build_engine
from opcast.simulator.question.plan import load_stack
from opcast.simulator.step.build import engine_of

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
