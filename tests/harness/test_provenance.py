"""What rows say of a GPU: limits that NVML tells, libraries that are loaded, a name without a serial number."""

from __future__ import annotations

import ctypes.util
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opcast.datasets.ops import make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.harness import environment, provenance
from opcast.harness.campaign import run_id
from opcast.harness.plan import CampaignPlan, Case
from opcast.harness.provenance import cublas_version, dotted, gpu_facts, limits, uuid_hash

torch = pytest.importorskip("torch")


class RefusalError(Exception):
    pass


def nvml(**answers: Any) -> SimpleNamespace:
    """NVML with some answers; a question without one is refused, as a driver does it that does not tell."""

    def question(name: str) -> Any:
        def ask(handle: object, *which: object) -> Any:
            if name not in answers:
                raise RefusalError
            return answers[name]

        return ask

    names = ("EnforcedPowerLimit", "EccMode", "ApplicationsClock", "MaxClockInfo", "VbiosVersion")
    asked = {f"nvmlDeviceGet{name}": question(name) for name in names}
    return SimpleNamespace(NVMLError=RefusalError, NVML_CLOCK_SM=1, **asked)


def told(monkeypatch: pytest.MonkeyPatch, binding: Any) -> dict[str, Any]:
    monkeypatch.setattr(environment, "_nvml", lambda: binding)
    monkeypatch.setattr(environment, "_nvml_handle", lambda index: binding and object())
    return limits(0)


def test_limits_are_what_nvml_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"EnforcedPowerLimit": 400_000, "EccMode": [1, 1], "ApplicationsClock": 1410, "MaxClockInfo": 1980}
    h100 = nvml(**named, VbiosVersion=b"96.00.89.00.01")
    figures = {"power_limit_w": 400.0, "ecc": True, "clock_limit_mhz": 1410.0}
    assert told(monkeypatch, h100) == {**figures, "firmware": "96.00.89.00.01"}
    free = nvml(EnforcedPowerLimit=700_000, EccMode=[0, 1], ApplicationsClock=1980, MaxClockInfo=1980)
    figures = {"power_limit_w": 700.0, "ecc": False, "clock_limit_mhz": None}
    assert told(monkeypatch, free) == {**figures, "firmware": None}
    nothing = dict.fromkeys(("power_limit_w", "ecc", "clock_limit_mhz", "firmware"))
    assert told(monkeypatch, nvml()) == told(monkeypatch, None) == nothing


def test_numbers_become_versions() -> None:
    assert dotted(91002, 10_000) == "9.10.2"
    assert dotted(8902, 1000) == "8.9.2"
    assert dotted(120805, 10_000) == "12.8.5"


def test_cublas_is_asked_of_the_library_that_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cublas_version("") is None
    assert cublas_version("7f00-7f01 r-xp 0 0 0 /nowhere/libcublasLt.so.12") is None
    library = SimpleNamespace(cublasLtGetVersion=type("F", (), {"__call__": lambda self: 130101})())
    monkeypatch.setattr(provenance.ctypes, "CDLL", lambda path: library if path.endswith("libcublasLt.so.13") else None)
    line = "7f00-7f01 r-xp 0 0 0 /usr/lib/libc.so.6\n7f02-7f03 r-xp 0 0 0 /venv/lib/libcublasLt.so.13\n"
    assert cublas_version(line) == "13.1.1"


def test_a_library_that_is_no_cublas_tells_nothing() -> None:
    libc = ctypes.util.find_library("c")
    assert libc
    assert cublas_version(f"7f00-7f01 r-xp 0 0 0 /none/libcublasLt.so {libc}") is None


def test_a_gpu_is_named_without_its_serial_number(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = "6a3e2c1b-0000-1111-2222-333344445555"
    assert uuid_hash(None) is None
    assert uuid_hash(identity) == uuid_hash(identity) != uuid_hash(identity[:-1] + "6")
    assert identity[:8] not in str(uuid_hash(identity))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=identity))
    found = gpu_facts()
    assert set(found) - {"health"} <= set(Measurement.__dataclass_fields__)  # health is said with a session
    assert found["gpu"] == uuid_hash(identity)


def test_another_power_limit_is_another_campaign() -> None:
    plan = CampaignPlan("p", (Case(make_op("gelu", rows=1, cols=1)),))
    seen = {"device_id": "h100_sxm", "torch": "2.9", "gpu": "gpu-1"}
    plain = run_id(plan, seen)
    assert run_id(plan, {**seen, "gpu": "gpu-2"}) == plain, "another GPU of the kind goes on with it"
    assert run_id(plan, {**seen, "power_limit_w": None, "ecc": None}) == plain, "as older versions named it"
    names = {
        run_id(plan, {**seen, "power_limit_w": watts, "ecc": ecc}) for watts in (400.0, 700.0) for ecc in (True, False)
    }
    assert len(names | {plain}) == 5


def test_rows_of_two_limits_stand_side_by_side(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    op = make_op("gelu", rows=1, cols=1)

    def row(watts: float | None, us: float) -> Measurement:
        now = datetime.now(UTC)
        return Measurement(op=op, device_id="d", run_id="r", measured_at=now, latency_us=us, power_limit_w=watts)

    store.write([row(400.0, 2.0), row(700.0, 1.0), row(None, 3.0)], "r")
    store.write([row(400.0, 2.5)], "r")
    assert sorted(store.read("gelu")["latency_us"].to_pylist()) == [1.0, 2.5, 3.0]


def test_old_stores_are_read(tmp_path: Path) -> None:
    """A file without the columns of today: they are null, and its rows count as done."""
    import pyarrow.parquet as pq

    store = Store(tmp_path / "store")
    op = make_op("gelu", rows=1, cols=1)
    failed = Measurement(op=op, device_id="d", run_id="r", measured_at=datetime.now(UTC), status="error", error="x")
    (path,) = store.write([failed], "r")
    new = ("kernel", "device_healthy", "cudnn", "cublas", "triton", "gpu", "ecc", "clock_limit_mhz", "firmware")
    pq.write_table(pq.read_table(path).drop_columns(list(new)), path)
    (row,) = Store(tmp_path / "store").read("gelu", status=None).to_pylist()
    assert [row[name] for name in new] == [None] * len(new)
    assert len(store.done("d", "r")) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_a_gpu_tells_of_itself() -> None:
    found = gpu_facts()
    assert found["gpu"]
    assert found["cudnn"]
    assert found["cublas"]
