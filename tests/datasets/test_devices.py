"""The shipped device figures: complete, sourced, and consistent with the hardware they describe."""

from __future__ import annotations

import re

import pytest
import yaml
from opcast.datasets.device_names import cuda_device_id
from opcast.datasets.devices import DEVICE_DIRECTORY, Device, DeviceError, known_devices, load_device, overridden

REQUIRED = [
    "a100_sxm_40gb",
    "a100_sxm_80gb",
    "a100_pcie_40gb",
    "a100_pcie_80gb",
    "h100_sxm",
    "h100_pcie",
    "h100_nvl",
    "h200_sxm",
    "h800_sxm",
    "h20_sxm",
    "b200_sxm",
    "gb200",
    "l4",
    "l40s",
    "l20",
    "a40",
    "a10",
    "v100_sxm",
    "mi300x",
    "v100_pcie",
    "p100_pcie",
    "p4",
    "t4",
    "mi100",
    "mi210",
    "mi250",
]

# FLOPs a clock and compute unit for dense fp16 (fp32 on P4, which has no fp16): whitepapers of each architecture.
HALF_PER_CLOCK = {
    "v100_sxm": 1024, "a100_sxm_40gb": 2048, "a100_sxm_80gb": 2048, "a100_pcie_40gb": 2048, "a100_pcie_80gb": 2048,
    "h100_sxm": 4096, "h100_pcie": 4096, "h100_nvl": 4096, "h200_sxm": 4096, "h800_sxm": 4096, "h20_sxm": 1024,
    "h100_96gb_hbm2e": 4096,
    "b200_sxm": 8192, "gb200": 8192, "b300_sxm": 8192, "gb300": 8192, "l4": 1024, "l40s": 1024, "l20": 512,
    "a40": 1024, "a10": 1024, "rtx_pro_6000_server": 1024, "mi300x": 2048,
    "v100_pcie": 1024, "p100_pcie": 256, "p4": 256, "t4": 1024, "mi100": 1024, "mi210": 1024, "mi250": 1024,
}  # fmt: skip
# FLOPs a clock and compute unit of ordinary fp32 lanes (a fused multiply-add counts two).
VECTOR_PER_CLOCK = {"volta": 128, "hopper": 256, "ada": 256, "blackwell": 256, "cdna3": 256}
VECTOR_OF = {"a40": 256, "a10": 256, "p4": 256}
WITHOUT_BF16 = {"v100_sxm", "v100_pcie", "p100_pcie", "p4", "t4"}


def half_rate(device: Device) -> float:
    return device.tensor_tflops.get("fp16") or device.tensor_tflops["fp32"]


def test_every_named_device_ships() -> None:
    assert set(REQUIRED) <= set(known_devices())
    assert "cpu" not in known_devices()


@pytest.mark.parametrize("name", known_devices())
def test_figures_are_complete_and_sourced(name: str) -> None:
    device = load_device(name)
    assert device.id == name
    assert device.vendor in ("nvidia", "amd")
    assert not device.synchronous
    values = yaml.safe_load((DEVICE_DIRECTORY / f"{name}.yaml").read_text())
    figures = {"tensor_tflops", "vector_tflops", "memory_gib", "memory_gbps", "l2_mib", "l2_gbps", "shared_kib"}
    figures |= {"link_gbps", "pcie_gbps", "launch_us", "dispatch_us", "tdp_w"}
    assert figures <= set(values), f"{name} leaves figures to defaults"
    assert figures <= set(device.sources), f"{name} has figures without a source"
    assert Device.from_dict(device.to_dict()) == device


@pytest.mark.parametrize("name", known_devices())
def test_peak_rates_follow_from_units_and_clock(name: str) -> None:
    device = load_device(name)
    per_clock = half_rate(device) * 1e6 / (device.compute_units * device.clock_mhz)
    assert per_clock == pytest.approx(HALF_PER_CLOCK[name], rel=0.05)
    vector = VECTOR_PER_CLOCK.get(device.architecture, VECTOR_OF.get(name, 128))
    # Ordinary lanes may boost higher than tensor cores do, up to 1980 over 1620 MHz.
    assert vector * 0.99 <= device.vector_tflops * 1e6 / (device.compute_units * device.clock_mhz) <= vector * 1.23


@pytest.mark.parametrize("name", known_devices())
def test_formats_stand_in_their_ratios(name: str) -> None:
    device, rates = load_device(name), load_device(name).tensor_tflops
    half = half_rate(device)
    assert rates.get("bf16", half) == (half if name != "mi100" else rates["fp16"] / 2)
    for dtype, factor in (("fp8", 2), ("mxfp8", 2), ("int8", 2), ("tf32", 0.5)):
        if dtype in rates and name not in ("p4", "mi100", "mi210", "mi250"):
            assert rates[dtype] == pytest.approx(factor * half, rel=0.02), dtype
    if "nvfp4" in rates:
        assert rates["nvfp4"] / half in (pytest.approx(4, rel=0.01), pytest.approx(6, rel=0.01))
    blackwell = device.architecture == "blackwell"
    assert ("nvfp4" in rates, "mxfp8" in rates) == (blackwell, blackwell)
    assert ("fp8" in rates) == (device.architecture in ("ada", "hopper", "blackwell", "cdna3"))
    assert device.supports("bf16") == (name not in WITHOUT_BF16)
    assert rates["fp32"] >= device.vector_tflops * 0.99


@pytest.mark.parametrize("name", known_devices())
def test_memories_are_ordered(name: str) -> None:
    device = load_device(name)
    assert device.memory_gbps < device.l2_gbps < 60 * device.compute_units * device.clock_mhz * 1.1e-3
    assert device.pcie_gbps < device.memory_gbps / 4
    assert device.link_gbps < device.memory_gbps
    assert 2 <= device.l2_mib < 300
    assert 50 < device.tdp_w < 1500


def test_variants_differ_where_they_should() -> None:
    h100, h200, h800 = (load_device(name) for name in ("h100_sxm", "h200_sxm", "h800_sxm"))
    assert h100.tensor_tflops == h200.tensor_tflops
    assert h200.memory_gbps > h100.memory_gbps
    assert h200.memory_gib > h100.memory_gib
    assert h800.link_gbps < h100.link_gbps
    assert "fp64" not in h800.tensor_tflops
    assert load_device("a100_sxm_80gb").memory_gbps > load_device("a100_pcie_80gb").memory_gbps
    assert load_device("b300_sxm").tensor_tflops["fp64"] < load_device("b200_sxm").tensor_tflops["fp64"] / 10


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100_sxm_80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100_sxm_40gb"),
        ("NVIDIA A100 80GB PCIe", "a100_pcie_80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100_pcie_40gb"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA H200", "h200_sxm"),
        ("NVIDIA H20", "h20_sxm"),
        ("NVIDIA B200", "b200_sxm"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L20", "l20"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA A10", "a10"),
        ("Tesla V100-SXM2-32GB", "v100_sxm"),
        ("Tesla V100-PCIE-32GB", "v100_pcie"),
        ("Tesla P100-PCIE-16GB", "p100_pcie"),
        ("Tesla P4", "p4"),
        ("Tesla T4", "t4"),
        ("AMD Instinct MI300X VF", "mi300x"),
        ("AMD Instinct MI210", "mi210"),
        ("AMD Instinct MI250X / MI250", "mi250"),
        ("AMD Instinct MI100", "mi100"),
        ("NVIDIA A100-PG509-200", "a100_sxm_40gb"),
    ],
)
def test_the_name_a_driver_reports_leads_to_a_shipped_device(reported: str, name: str) -> None:
    assert cuda_device_id(reported) == name
    assert name in known_devices()


def test_rates_of_related_formats() -> None:
    h100 = load_device("h100_sxm")
    assert h100.tensor_rate("fp8_block") == h100.tensor_rate("fp8") == h100.tensor_rate("mxfp8")
    assert load_device("b200_sxm").tensor_rate("mxfp4") == load_device("b200_sxm").tensor_rate("nvfp4")
    with pytest.raises(DeviceError, match="has no nvfp4 matrix units; it has fp64, fp32"):
        h100.tensor_rate("nvfp4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gbs": 1.0}, r"has no figure 'memory_gbs'; did you mean 'memory_gbps'\?"),
        ({"memory_gbps": -1.0}, "device.memory_gbps=-1.0 must be positive"),
        ({"compute_units": 0}, "device.compute_units=0 must be positive"),
        ({"tensor_tflops": {"bf16": 0.0}}, "device.tensor_tflops=0.0 must be positive"),
        ({"l2_mib": float("nan")}, "device.l2_mib=nan must be positive"),
    ],
)
def test_impossible_figures_are_refused_in_one_line(change: dict, message: str) -> None:
    values = load_device("h100_sxm").to_dict() | change
    with pytest.raises(DeviceError, match=message) as caught:
        Device.from_dict(values)
    assert "\n" not in str(caught.value)


def test_missing_figures_and_unknown_devices_are_named() -> None:
    values = load_device("l4").to_dict()
    del values["memory_gbps"], values["clock_mhz"]
    with pytest.raises(DeviceError, match="'l4' lacks clock_mhz, memory_gbps"):
        Device.from_dict(values)
    with pytest.raises(DeviceError, match="unknown device 'h1000'; did you mean"):
        load_device("h1000")
    for outside in ("../device/l4", "", "cpu/../l4", "/etc/passwd"):
        with pytest.raises(DeviceError):
            load_device(outside)


def test_no_source_is_a_placeholder() -> None:
    for name in known_devices():
        for figure, source in load_device(name).sources.items():
            assert len(source) > 3, (name, figure)
            assert not re.search(r"\b(todo|tbd|unknown|guess)\b", source, re.IGNORECASE), (name, figure)


def test_peak_rates_follow_units_and_clock_unless_they_are_given() -> None:
    known = load_device("h100_sxm")
    made = overridden(known, {"compute_units": 66, "clock_mhz": 915})
    assert made.tensor_rate("bf16") == pytest.approx(989.4 / 4)
    assert made.vector_tflops == pytest.approx(66.9 / 4)
    assert made.memory_gbps == known.memory_gbps
    given = overridden(known, {"compute_units": 66, "tensor_tflops": {**known.tensor_tflops, "bf16": 500.0}})
    assert (given.tensor_rate("bf16"), given.tensor_rate("fp8")) == (500.0, pytest.approx(1978.9 / 2))
    assert overridden(known, {}) == known
