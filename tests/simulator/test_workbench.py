"""A workbench: what it builds is kept from question to question, until a measurement is added."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.simulator.engines.flow import flow_engine
from opcast.simulator.question.network import NetworkChoice
from opcast.simulator.question.sources import Sources
from opcast.simulator.workbench import Workbench, workbench

DGX, DEVICE = replace(load_cluster("dgx_h100"), nodes=2), load_device("h100_sxm")


def test_engines_are_built_once_until_something_is_measured(tmp_path: Path) -> None:
    bench = workbench(Sources.at(str(tmp_path)))
    assert workbench(Sources.at(str(tmp_path))) is bench
    alone, joined = bench.engine(DEVICE), bench.engine(DEVICE, DGX)
    assert bench.engine(DEVICE) is alone
    assert bench.engine(DEVICE, replace(DGX)) is joined is not alone
    row = Measurement(
        op=make_op("gemm", m=8, n=8, k=8),
        device_id="h100_sxm",
        run_id="test",
        measured_at=datetime(2026, 1, 1, tzinfo=UTC),
        latency_us=5.0,
    )
    Store(tmp_path / "store").write([row], "test")
    assert bench.engine(DEVICE) is not alone


def test_flows_take_the_formula_of_the_engines_that_they_stand_before(tmp_path: Path) -> None:
    bench = Workbench(Sources.at(str(tmp_path)))
    usual = bench.engine(DEVICE, DGX)
    asked = bench.engine_with_links(DEVICE, DGX, NetworkChoice("flow"))
    flows = flow_engine(asked)
    assert flows is not None
    assert flows.network is bench.formula(DEVICE, DGX)
    assert any(flows.network is each for each in usual.engines)
    assert bench.engine_with_links(DEVICE, DGX, NetworkChoice()) is usual
    told = replace(DGX, nccl={"algorithm": "ring"})
    assert bench.formula(DEVICE, told).families == bench.formula(DEVICE, DGX).families


def test_a_device_comes_from_a_store_or_as_shipped(tmp_path: Path) -> None:
    bench = Workbench(Sources.at(str(tmp_path)), machine=lambda: "cpu_of_mine")
    with pytest.raises(ValueError, match=r"this machine \(cpu_of_mine\) is not measured yet"):
        bench.device("cpu")
    with pytest.raises(ValueError, match="or measure it with `opcast profile`"):
        bench.device("h100_sx")
    assert bench.device("cpu", DGX) == DEVICE
    Store(tmp_path / "store").save_device(replace(DEVICE, id="cpu_of_mine"))
    assert bench.device("cpu").id == "cpu_of_mine"


def test_local_is_what_this_machine_was_last_measured_on(tmp_path: Path) -> None:
    bench = Workbench(Sources.at(str(tmp_path)), machine=lambda: "cpu_of_mine", node=lambda: "node-1")
    with pytest.raises(ValueError, match="nothing was measured on this machine yet"):
        bench.device("local")
    store = Store(tmp_path / "store")
    store.save_device(replace(DEVICE, id="rtx_3050"))
    store.note_machine("node-2", "rtx_9090")
    for device_id in ("rtx_3050", "l4"):
        store.note_machine("node-1", device_id)
        assert Workbench(bench.sources, bench.machine, bench.node).device("local").id == device_id
