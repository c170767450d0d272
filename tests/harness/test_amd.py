"""What AMD's GPUs do otherwise, on a fake of torch's HIP and of amdsmi as ROCm documents it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from opcast.harness import amd, environment, provenance  # noqa: E402
from opcast.harness.cases.base import torch_dtype  # noqa: E402


class SmiError(Exception):
    """amdsmi.AmdSmiException."""


METRICS: dict[str, Any] = {
    "current_gfxclk": "N/A",
    "current_gfxclks": [2100, 2085, "N/A", 65535],
    "current_uclk": 1300,
    "temperature_hotspot": 61,
    "current_socket_power": 548,
    "average_socket_power": "N/A",
    "ppt_residency_acc": 10,
    "socket_thm_residency_acc": 0,
    "prochot_residency_acc": 0,
}


@pytest.fixture
def mi300x(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Two MI300X, the second of which amdsmi names first; their metrics."""
    metrics: dict[str, dict[str, Any]] = {
        "0000:05:00.0": dict(METRICS),
        "0000:c1:00.0": dict(METRICS, current_uclk=900),
    }
    link = {"type": 2}
    order = ["0000:c1:00.0", "0000:05:00.0"]

    def properties(index: int) -> Any:
        return SimpleNamespace(
            name="AMD Instinct MI300X",
            gcnArchName="gfx942:sramecc+:xnack-",
            pci_domain_id=0,
            pci_bus_id=(5, 0xC1)[index],
            pci_device_id=0,
        )

    smi = SimpleNamespace(
        AmdSmiException=SmiError,
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: list(order),
        amdsmi_get_gpu_device_bdf=lambda handle: handle,
        amdsmi_get_gpu_metrics_info=metrics.__getitem__,
        amdsmi_get_power_cap_info=lambda handle: {"power_cap": 750_000_000},
        amdsmi_topo_get_link_type=lambda a, b: {"hops": 1, **link},
    )
    monkeypatch.setitem(sys.modules, "amdsmi", smi)
    monkeypatch.setattr(torch.version, "hip", "6.4.1", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    amd._smi.cache_clear()
    environment._nvml_handle.cache_clear()
    amd.LAST.clear()
    yield {"first": metrics["0000:05:00.0"], "link": link}
    amd._smi.cache_clear()
    environment._nvml_handle.cache_clear()


def test_clocks_power_and_heat_are_those_that_amdsmi_tells(mi300x: dict[str, Any]) -> None:
    seen = environment.clocks(index=0)
    assert (seen.sm_clock_mhz, seen.mem_clock_mhz, seen.temperature_c, seen.power_w) == (2100.0, 1300.0, 61.0, 548.0)
    assert seen.throttled is False
    assert environment.clocks(index=1).mem_clock_mhz == 900.0
    mi300x["first"]["ppt_residency_acc"] += 7
    assert environment.clocks(index=0).reasons == ("power_cap",)
    mi300x["first"]["socket_thm_residency_acc"] += 1
    assert environment.clocks(index=0).throttled is True
    assert environment.clocks(index=0).throttled is False
    assert environment.power_limit_w(0) == provenance.limits(0)["power_limit_w"] == 750.0


def test_without_amdsmi_clocks_are_unknown(mi300x: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    amd._smi.cache_clear()
    assert environment.clocks(index=0) == environment.Clocks()
    assert amd.has_xgmi() is None


def test_mi300_multiplies_floats_without_a_negative_zero(
    mi300x: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch_dtype("fp8") == torch_dtype("fp8_block") == torch.float8_e4m3fnuz
    assert torch_dtype("fp8_e5m2") == torch.float8_e5m2fnuz
    assert torch_dtype("bf16") == torch.bfloat16
    told = SimpleNamespace(gcnArchName="gfx950")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told)
    assert torch_dtype("fp8") == torch.float8_e4m3fn
    monkeypatch.setattr(torch.version, "hip", None)
    assert torch_dtype("fp8") == torch.float8_e4m3fn


def test_rccl_is_called_by_its_name(mi300x: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 22, 3))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setenv("RCCL_MSCCL_ENABLE", "0")
    assert str(environment._nccl_version()).startswith("rccl 2.22.3")
    assert "RCCL_MSCCL_ENABLE=0" in str(environment._nccl_version())


def test_xgmi_is_found(mi300x: dict[str, Any]) -> None:
    assert amd.has_xgmi() is True
    mi300x["link"]["type"] = 1
    assert amd.has_xgmi() is False
