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
    assert probe.effective_cache_bytes(sizes, (100, 98, 101, 97, 99, 100, 96, 95)) == sizes[-1]


MIB = 1 << 20


@pytest.mark.parametrize(
    ("reported", "had", "found"),
    [
        (480 * MIB, 4 * MIB, 4 * MIB),  # two cores of a large Intel socket
        (480 * MIB, 480 * MIB, 256 * MIB),  # the whole of it, to a factor of two: three times as much is read
        (320 * MIB, 256 * MIB, 256 * MIB),
        (32 * MIB, 4 * MIB, 32 * MIB),  # small enough to be read in milliseconds
        (0, 4 * MIB, probe.FALLBACK_CACHE_BYTES),
    ],
)
def test_what_is_read_before_a_cold_call_follows_the_cache_that_is_had(
    reported: int, had: int, found: int, monkeypatch: pytest.MonkeyPatch
):
    from opcast.harness import host_timer, reuse
    from opcast.harness.cases import base

    def triad(array_bytes: int, seconds: float) -> float:
        assert array_bytes <= 1024 * MIB, "three such arrays do not fit a small machine"
        return 90.0 + 7.0 * (array_bytes % 3) if 3 * array_bytes <= had else 25.0

    monkeypatch.setattr(probe, "reported_cache_bytes", lambda: reported)
    monkeypatch.setattr(probe, "triad_gbps", triad)
    probe.last_level_cache_bytes.cache_clear()
    base.cache_bytes.cache_clear()
    try:
        assert probe.last_level_cache_bytes() == base.cache_bytes("cpu") == found
        assert reuse.distances()[-1] == base.COLD_CACHES * found
        read: list[int] = []
        monkeypatch.setattr(torch, "ones", lambda numel: read.append(4 * numel) or torch.zeros(1))
        host_timer.flusher()
        assert read == [base.COLD_CACHES * found]
    finally:
        probe.last_level_cache_bytes.cache_clear()
        base.cache_bytes.cache_clear()
