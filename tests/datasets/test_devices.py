"""The shipped device figures: complete, sourced, and consistent with the hardware they describe."""

from __future__ import annotations

import re

import pytest

from opcast.datasets.device_names import cuda_device_id
from opcast.datasets.devices import DEVICE_DIRECTORY, Device, DeviceError, known_devices, load_device, overridden
from opcast.datasets.reading import read_yaml

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
    "mi308x",
    "v100_pcie",
    "p100_pcie",
    "p4",
    "t4",
    "mi100",
    "mi210",
    "mi250",
]

# FLOPs a clock and compute unit for dense fp16 (fp32 on P4, which has no fp16) by die, from the whitepapers.
HALF_OF_DIE = {
    "gp104": 256, "gp100": 256, "gv100": 1024, "tu104": 1024, "ga100": 2048, "ga102": 1024, "ga104": 1024,
    "ga106": 1024,
    "ad102": 1024, "ad103": 1024, "ad104": 1024, "ad106": 1024, "ad107": 1024, "gh100": 4096, "gb100": 8192,
    "gb110": 8192, "gb202": 1024, "gb203": 1024, "gb205": 1024, "gb206": 1024, "gb20b": 1024, "arcturus": 1024,
    "aldebaran": 1024, "aqua_vanjaram": 2048, "gfx950": 4096, "tpu_v6e": 2 * 256 * 256,
}  # fmt: skip
# Cards whose maker cut the matrix units: GeForce with fp32 accumulation, A10G, L40 and L20 to a half, H20 to a quarter.
CUT = {"a10g": 2, "l40": 2, "l20": 2, "h20_sxm": 4, "h20_141gb": 4}
GEFORCE = re.compile(r"rtx_[345]0[6-9]0(_ti)?(_super)?")
# FLOPs a clock and compute unit of ordinary fp32 lanes (a fused multiply-add counts two).
VECTOR_PER_CLOCK = {
    "volta": 128,
    "hopper": 256,
    "ada": 256,
    "blackwell": 256,
    "cdna3": 256,
    "cdna4": 256,
    **dict.fromkeys(("apple7", "apple8", "apple9"), 256),
    "trillium": 1024,
}
WITHOUT_POWER = ("apple", "google")  # who publishes none
WITHOUT_BF16 = {name for name in known_devices() if load_device(name).die in ("gv100", "gp100", "gp104", "tu104")}


def per_clock(device: Device) -> float:
    cut = 2 if GEFORCE.fullmatch(device.id) else CUT.get(device.id, 1)
    if device.vendor == "apple":  # matrices on ordinary lanes
        return VECTOR_PER_CLOCK[device.architecture]
    return HALF_OF_DIE[device.die] / cut


def half_rate(device: Device) -> float:
    return device.tensor_tflops.get("fp16") or device.tensor_tflops["fp32"]


def test_every_named_device_ships() -> None:
    assert set(REQUIRED) <= set(known_devices())
    assert "cpu" not in known_devices()


@pytest.mark.parametrize("name", known_devices())
def test_figures_are_complete_and_sourced(name: str) -> None:
    device = load_device(name)
    assert device.id == name
    assert device.vendor in ("nvidia", "amd", "apple", "google")
    assert not device.synchronous
    values = read_yaml(DEVICE_DIRECTORY / f"{name}.yaml", ValueError)
    figures = {"compute_units", "clock_mhz", "tensor_tflops", "vector_tflops", "memory_gib", "memory_gbps", "l2_mib"}
    figures |= {"l2_gbps", "shared_kib", "link_gbps", "pcie_gbps", "launch_us", "dispatch_us", "tdp_w"}
    assert figures <= set(values), f"{name} leaves figures to defaults"
    assert figures <= set(device.sources), f"{name} has figures without a source"
    assert Device.from_dict(device.to_dict()) == device


@pytest.mark.parametrize("name", known_devices())
def test_peak_rates_follow_from_units_and_clock(name: str) -> None:
    device = load_device(name)
    assert half_rate(device) * 1e6 / (device.compute_units * device.clock_mhz) == pytest.approx(
        per_clock(device), rel=0.05
    )
    narrow = 256 if device.die in ("ga102", "ga104", "ga106", "gp104") else 128
    vector = VECTOR_PER_CLOCK.get(device.architecture, narrow)
    # Ordinary lanes may boost higher than tensor cores do, up to 1980 over 1620 MHz.
    assert vector * 0.99 <= device.vector_tflops * 1e6 / (device.compute_units * device.clock_mhz) <= vector * 1.23


@pytest.mark.parametrize("name", known_devices())
def test_formats_stand_in_their_ratios(name: str) -> None:
    device, rates = load_device(name), load_device(name).tensor_tflops
    half = half_rate(device)
    assert rates.get("bf16", half) == (half if name != "mi100" else rates["fp16"] / 2)
    alike = ("fp8",) if device.vendor == "google" else ()  # TPU v6e multiplies fp8 as bf16
    for dtype, factor in (("fp8", 2), ("mxfp8", 2), ("int8", 2), ("tf32", 0.5)):
        if dtype in rates and dtype not in alike and name not in ("p4", "mi100", "mi210", "mi250"):
            geforce = 2 if dtype == "int8" and GEFORCE.fullmatch(name) else 1  # integers are not cut
            assert rates[dtype] == pytest.approx(geforce * factor * half, rel=0.02), dtype
    if "nvfp4" in rates:
        assert rates["nvfp4"] / half in [pytest.approx(factor, rel=0.01) for factor in (4, 6, 8)]
    assert ("nvfp4" in rates) == (device.architecture == "blackwell")
    assert ("mxfp8" in rates) == (device.architecture in ("blackwell", "cdna4"))
    assert ("fp8" in rates) == (device.architecture in ("ada", "hopper", "blackwell", "cdna3", "cdna4", "trillium"))
    assert device.supports("bf16") == (name not in WITHOUT_BF16)
    assert rates["fp32"] >= device.vector_tflops * 0.99


@pytest.mark.parametrize("name", known_devices())
def test_memories_are_ordered(name: str) -> None:
    device = load_device(name)
    units = load_device("mi300x" if name == "mi308x" else name).compute_units  # MI308X has the base dies of MI300X
    widest = 6000 if device.vendor == "google" else 60  # bytes a clock and unit: VMEM is beside the matrix units
    assert device.memory_gbps < device.l2_gbps < widest * units * device.clock_mhz * 1.1e-3
    assert device.pcie_gbps < device.memory_gbps / 4
    assert (device.tdp_w == 0) == (device.vendor in WITHOUT_POWER)
    assert device.link_gbps < device.memory_gbps
    assert 2 <= device.l2_mib < 300
    assert 50 < device.tdp_w < 1500 or device.vendor in WITHOUT_POWER


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
        ("NVIDIA GeForce RTX 3060", "rtx_3060"),
        ("NVIDIA GeForce RTX 3060 Ti", "rtx_3060_ti"),
        ("NVIDIA GeForce RTX 3070", "rtx_3070"),
        ("NVIDIA GeForce RTX 3070 Ti", "rtx_3070_ti"),
        ("NVIDIA GeForce RTX 3080", "rtx_3080"),
        ("NVIDIA GeForce RTX 3080 Ti", "rtx_3080_ti"),
        ("NVIDIA GeForce RTX 3090", "rtx_3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx_3090_ti"),
        ("NVIDIA GeForce RTX 4060", "rtx_4060"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx_4060_ti"),
        ("NVIDIA GeForce RTX 4070", "rtx_4070"),
        ("NVIDIA GeForce RTX 4070 SUPER", "rtx_4070_super"),
        ("NVIDIA GeForce RTX 4070 Ti", "rtx_4070_ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx_4070_ti_super"),
        ("NVIDIA GeForce RTX 4080", "rtx_4080"),
        ("NVIDIA GeForce RTX 4080 SUPER", "rtx_4080_super"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("NVIDIA GeForce RTX 5060", "rtx_5060"),
        ("NVIDIA GeForce RTX 5060 Ti", "rtx_5060_ti"),
        ("NVIDIA GeForce RTX 5070", "rtx_5070"),
        ("NVIDIA GeForce RTX 5070 Ti", "rtx_5070_ti"),
        ("NVIDIA GeForce RTX 5080", "rtx_5080"),
        ("NVIDIA GeForce RTX 5090", "rtx_5090"),
        ("NVIDIA RTX A4000", "rtx_a4000"),
        ("NVIDIA RTX A4500", "rtx_a4500"),
        ("NVIDIA RTX A5000", "rtx_a5000"),
        ("NVIDIA RTX A5500", "rtx_a5500"),
        ("RTX A6000", "rtx_a6000"),
        ("NVIDIA RTX 5000 Ada Generation", "rtx_5000_ada"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx_6000_ada"),
        ("NVIDIA RTX PRO 4000 Blackwell", "rtx_pro_4000"),
        ("NVIDIA RTX PRO 4500 Blackwell", "rtx_pro_4500"),
        ("NVIDIA RTX PRO 5000 Blackwell", "rtx_pro_5000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx_pro_6000_workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx_pro_6000_max_q"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000_server"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A30", "a30"),
        ("NVIDIA A800-SXM4-80GB", "a800_sxm_80gb"),
        ("NVIDIA A800 80GB PCIe", "a800_pcie_80gb"),
        ("NVIDIA A800 40GB Active", "a800_pcie_40gb"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA H100 64GB HBM2", "h100_64gb"),
        ("NVIDIA H800", "h800_sxm"),
        ("NVIDIA H800 PCIe", "h800_pcie"),
        ("NVIDIA H20-3e", "h20_141gb"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 144G HBM3e", "gh200_144gb"),
        ("NVIDIA H200 NVL", "h200_nvl"),
        ("NVIDIA B300 SXM6 AC", "b300_sxm"),
        ("NVIDIA GB10", "gb10"),
        ("Tesla V100-SXM2-16GB", "v100_sxm_16gb"),
        ("Tesla V100-PCIE-16GB", "v100_pcie_16gb"),
        ("Tesla P100-SXM2-16GB", "p100_sxm"),
        ("AMD Instinct MI325X", "mi325x"),
        ("AMD Instinct MI350X", "mi350x"),
        ("AMD Instinct MI355X", "mi355x"),
    ],
)
def test_the_name_a_driver_reports_leads_to_a_shipped_device(reported: str, name: str) -> None:
    assert cuda_device_id(reported) == name
    assert name in known_devices()


def test_rates_of_related_formats() -> None:
    h100 = load_device("h100_sxm")
    assert h100.tensor_rate("fp8_block") == h100.tensor_rate("fp8")
    assert load_device("b200_sxm").tensor_rate("mxfp4") == load_device("b200_sxm").tensor_rate("nvfp4")
    for dtype in ("nvfp4", "mxfp8", "mxfp4a8"):  # Hopper has no units of microscaled formats
        with pytest.raises(DeviceError, match=f"has no {dtype} matrix units; it has fp64, fp32"):
            h100.tensor_rate(dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gbs": 1.0}, r"has no figure 'memory_gbs'; did you mean memory_gbps\?"),
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
