"""The figures measured on the machine at hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from opcast.datasets.devices import Device  # noqa: E402
from opcast.harness import probe  # noqa: E402


def test_measured_device_is_complete_plausible_and_gives_itself_little_time(monkeypatch: pytest.MonkeyPatch):
    allowed = []
    best_seconds = probe.best_seconds

    def counted(run: Callable[[], object], seconds: float, least: int = 3) -> float:
        allowed.append(seconds)
        return best_seconds(run, seconds, least)

    monkeypatch.setattr(probe, "best_seconds", counted)
    device = probe.measure_cpu("cpu_of_mine")
    assert Device.from_dict(device.to_dict()) == device
    assert device.synchronous
    assert device.id == "cpu_of_mine"
    assert set(device.tensor_tflops) == {"fp32", "bf16", "fp16", "fp64", "int8"}
    assert 1e-3 < device.tensor_tflops["fp32"] < 100
    assert device.tensor_tflops["fp32"] > device.vector_tflops / 4
    assert 1 < device.memory_gbps < 5000
    assert device.l2_gbps >= device.memory_gbps
    assert 0 < device.dispatch_us <= 1.5 * device.launch_us < 200
    assert device.compute_units == torch.get_num_threads()
    assert {"tensor_tflops", "vector_tflops", "memory_gbps", "l2_mib", "l2_gbps", "launch_us"} <= set(device.sources)
    assert 0 < sum(allowed) + probe.MATRIX_SECONDS * len(device.tensor_tflops) < 8, "a busy machine may take longer"


@pytest.mark.parametrize(
    ("text", "size"), [("32K", 32 << 10), ("32768K\n", 32 << 20), ("1M", 1 << 20), ("512", 512), ("?", 0)]
)
def test_cache_sizes_are_parsed(text: str, size: int):
    assert probe.parse_size(text) == size


def test_the_largest_data_cache_is_reported(tmp_path: Path):
    for index, (kind, size) in enumerate(
        [("Data", "32K"), ("Instruction", "64M"), ("Unified", "1M"), ("Unified", "32M")]
    ):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "type").write_text(kind)
        (folder / "size").write_text(size)
    assert probe.reported_cache_bytes(tmp_path) == 32 << 20
    assert probe.reported_cache_bytes(tmp_path / "nothing") == 0


def test_the_knee_of_the_sweep_is_the_effective_cache():
    sizes = tuple(1 << power for power in range(20, 28))
    assert probe.effective_cache_bytes(sizes, (90, 100, 100, 95, 90, 30, 22, 20)) == sizes[4]
    assert probe.effective_cache_bytes(sizes, (20,) * 8) == sizes[-1]
