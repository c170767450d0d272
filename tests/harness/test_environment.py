"""Names of devices, decoded clocks, and what the environment of a child does to its memory."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from opcast.datasets.device_names import cuda_device_id
from opcast.datasets.schema import Measurement
from opcast.harness import environment


@pytest.mark.parametrize(
    ("name", "device_id"),
    [
        ("NVIDIA H200", "h200_sxm"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm_80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100_sxm_40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100_pcie_40gb"),
        ("NVIDIA A100 80GB PCIe", "a100_pcie_80gb"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA B200", "b200_sxm"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000_server"),
        ("Tesla V100-SXM2-32GB", "v100_sxm"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
    ],
)
def test_gpu_names_become_device_ids(name: str, device_id: str) -> None:
    assert cuda_device_id(name) == device_id


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz", "intel_xeon_platinum_8480c"),
        ("AMD EPYC 9654 96-Core Processor", "amd_epyc_9654"),
        ("AMD Ryzen 7 7840U with Radeon 780M Graphics", "amd_ryzen_7_7840u_radeon_780m"),
        ("", "unknown"),
    ],
)
def test_processor_names_lose_what_is_no_name(name: str, expected: str) -> None:
    assert environment.slug(name) == expected


def test_cpu_device_id_says_how_many_threads() -> None:
    assert environment.cpu_device_id(7).endswith("_7t")
    assert environment.cpu_device_id() == environment.cpu_device_id(environment.default_threads())
    assert environment.cpu_device_id().removeprefix("cpu_").replace("_", "").isalnum()


def test_cpu_device_id_is_fast_and_needs_no_torch() -> None:
    code = (
        "import sys, time; from opcast.harness import environment; start = time.process_time();"
        "environment.cpu_device_id(); assert time.process_time() - start < 0.1; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bland_names_get_family_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    bland = ({"processor": "0", "model name": "AMD EPYC", "cpu family": "25", "model": "17"},)
    monkeypatch.setattr(environment, "_cpuinfo", lambda: bland)
    environment.cpu_name.cache_clear()
    try:
        assert environment.cpu_device_id(2) == "cpu_amd_epyc_f25m17_2t"
    finally:
        environment.cpu_name.cache_clear()


def test_threads_count_physical_cores_once(monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = tuple({"processor": str(i), "physical id": "0", "core id": str(i % 4)} for i in range(8))
    monkeypatch.setattr(environment, "_cpuinfo", lambda: siblings)
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert environment.core_ids() == [0, 1, 2, 3]
    assert environment.physical_cores() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda _: {2, 6, 7}, raising=False)
    assert environment.core_ids() == [2, 7]


def test_clock_reasons_are_decoded_and_the_power_cap_is_no_disturbance() -> None:
    assert environment.decode_reasons(0) == ()
    assert environment.decode_reasons(0x4 | 0x40) == ("power_cap", "hw_thermal")
    assert environment.Clocks(reasons=("power_cap", "sync_boost")).throttled is False
    assert environment.Clocks(reasons=("power_cap", "hw_thermal")).throttled is True
    assert environment.Clocks().throttled is None


def test_unknown_clocks_are_none_not_errors() -> None:
    seen = environment.clocks("cpu")
    assert seen.power_w is None
    assert seen.sm_clock_mhz is None or 100 < seen.sm_clock_mhz < 10_000
    environment.clocks("cuda")


def test_provenance_fits_the_store() -> None:
    found = environment.environment("cpu", threads=3)
    assert set(found) <= set(Measurement.__dataclass_fields__)
    assert found["device_id"] == environment.cpu_device_id(3)
    assert found["source"] == "harness"
    assert found["torch"]
    assert found["cuda"] is None
    assert environment.platform.node() not in str(found["node"])


def test_nvml_answers_become_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The binding's own names and units, with a driver that does not tell the temperature."""
    pynvml = pytest.importorskip("pynvml")

    def refuse(*_: object) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def clock(_: object, which: int) -> int:
        return {pynvml.NVML_CLOCK_SM: 1755, pynvml.NVML_CLOCK_MEM: 2619}[which]

    answers = {
        "nvmlDeviceGetClockInfo": clock,
        "nvmlDeviceGetPowerUsage": lambda _: 698_000,
        "nvmlDeviceGetTemperature": refuse,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _: 0x4 | 0x20,
        "nvmlDeviceGetNvLinkState": lambda _, link: int(link == 3),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setattr(environment, "_nvml", lambda: pynvml)
    monkeypatch.setattr(environment, "_nvml_handle", lambda index: object())
    seen = environment.clocks("cuda")
    assert seen == environment.Clocks(1755.0, 2619.0, None, 698.0, ("power_cap", "sw_thermal"))
    assert seen.throttled is True
    assert environment.has_nvlink()


@pytest.mark.gpu
def test_clocks_of_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = environment.environment("cuda")
    assert found["cuda"]
    assert found["driver"]
    seen = environment.clocks("cuda")
    if seen.reasons is not None:
        assert seen.sm_clock_mhz > 0
        assert seen.power_w > 0


def test_free_memory_is_plausible() -> None:
    assert 2**24 < environment.free_memory_bytes("cpu") < 2**50


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator settings are glibc's")
def test_child_environment_keeps_freed_memory() -> None:
    """Without it every block above 32 MiB is faulted in anew: 16,384 faults a round."""
    code = (
        "import resource\n"
        "for i in range(12):\n"
        "    block = bytearray(64 << 20)\n"
        "    del block\n"
        "    if i == 1: before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"
    )
    faults = []
    for env in (environment.child_environment(1), None):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        faults.append(int(done.stdout))
    assert faults[0] < 2000
    assert faults[0] < faults[1] / 4


def test_child_environment_pins_the_threads() -> None:
    child = environment.child_environment(3)
    assert [child[name] for name in environment.THREAD_VARIABLES] == ["3", "3", "3"]
    assert child["PATH"]
    assert environment.child_environment()["OMP_NUM_THREADS"] == str(environment.default_threads())


def test_reading_clocks_is_cheap() -> None:
    environment.clocks("cpu")
    before = time.process_time()
    for _ in range(20):
        environment.clocks("cpu")
    assert time.process_time() - before < 0.3
