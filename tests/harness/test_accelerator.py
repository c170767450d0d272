"""What the accelerator at hand is called, whether it works, what it can run, and its figures where no file has them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opcast.datasets.device_names import CUDA_IDS, cuda_device_id, figures_of_file, seen_device_id
from opcast.datasets.devices import known_devices, load_device
from opcast.datasets.ops import make_op
from opcast.harness import accelerator, cuda_timer, environment
from opcast.harness.campaign import in_device_formats
from opcast.harness.formats import in_format
from opcast.harness.measuring import abilities
from opcast.harness.plan import CampaignPlan, Case, Settings
from opcast.harness.probe_gpu import elapsed_us, formats_of, measure_gpu
from opcast.harness.provenance import gpu_facts, limits
from opcast.tests.harness.fake_cuda import FakeGpu, fake_cuda

RTX_3050 = FakeGpu(
    name="NVIDIA GeForce RTX 3050", capability=(8, 6), units=20, memory_gib=7.7, l2_mib=2.0, memory_gbps=200.0,
    l2_gbps=1200.0, clock_mhz=1777.0, power_limit_w=130.0, half_tflops=36.0, single_tflops=9.0,
)  # fmt: skip
T4 = FakeGpu(name="Tesla T4", capability=(7, 5), units=40, memory_gib=14.6, l2_mib=4.0, bf16=False)
V100 = FakeGpu(name="Tesla V100-SXM2-32GB", capability=(7, 0), units=80, memory_gib=31.7, l2_mib=6.0, bf16=False)
P100 = FakeGpu(name="Tesla P100-PCIE-16GB", capability=(6, 0), units=56, memory_gib=15.9, l2_mib=4.0, bf16=False)
P4 = FakeGpu(name="Tesla P4", capability=(6, 1), units=20, memory_gib=7.4, l2_mib=2.0, bf16=False)


# --- names ---------------------------------------------------------------------------------------------


def test_every_id_that_a_name_leads_to_has_a_file_and_every_file_a_name() -> None:
    """Patterns with a variable part lead to the ids that the parametrized names of ``test_devices`` go through."""
    fixed = {device_id for _, device_id in CUDA_IDS if "\\1" not in device_id}
    assert fixed <= set(known_devices())
    numbered = [re.compile(device_id.replace("\\1", ".+")) for _, device_id in CUDA_IDS if "\\1" in device_id]
    for name in known_devices():
        unnamed = not any(pattern.fullmatch(name) for pattern in numbered) and name not in fixed
        device = load_device(name)
        nobodys = device.vendor in ("apple", "google")  # CUDA names none of theirs
        assert not unnamed or device.variant_of or nobodys, name


@pytest.mark.parametrize(
    ("name", "units", "memory_gib", "l2_mib", "device_id"),
    [
        ("NVIDIA H100 80GB HBM3", 132, 79.1, 50.0, "h100_sxm"),
        ("NVIDIA H100 80GB HBM3", 132, 79.6, 0.0, "h100_sxm"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, 9.75, 6.25, "h100_sxm_16sm_10gib"),
        ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 132, 79.1, 50.0, "h100_sxm"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 42, 19.5, 20.0, "a100_sxm_40gb_42sm_20gib"),
        ("NVIDIA H200", 132, 139.8, 60.0, "h200_sxm"),
        ("NVIDIA L40S", 142, 47.4, 96.0, "l40s"),
        ("AMD Instinct MI300X", 304, 191.98, 0.0, "mi300x"),
        ("AMD Instinct MI300X", 38, 23.9, 0.0, "mi300x_38sm_24gib"),
        ("NVIDIA GeForce GTX 1080", 20, 7.9, 2.0, "gtx_1080"),
    ],
)
def test_a_slice_or_variant_is_not_passed_off_as_the_whole_device(
    name: str, units: int, memory_gib: float, l2_mib: float, device_id: str
) -> None:
    assert seen_device_id(name, units, memory_gib, l2_mib) == device_id


@pytest.mark.parametrize("name", known_devices())
def test_figures_are_read_from_a_file_without_a_parser(name: str) -> None:
    device = load_device(name)
    assert figures_of_file(name) == {
        "compute_units": device.compute_units, "memory_gib": device.memory_gib, "l2_mib": device.l2_mib
    }  # fmt: skip
    assert seen_device_id("x", 1, 1.0) == "x"


SLICE = FakeGpu(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", units=16, memory_gib=9.75, l2_mib=6.25, nvlink=True)


def test_a_mig_slice_has_the_clocks_of_its_chip_and_neither_its_power_nor_its_links() -> None:
    with fake_cuda(SLICE):
        assert environment.is_slice()
        seen = environment.clocks()
        assert (seen.sm_clock_mhz, seen.temperature_c, seen.reasons) == (1980.0, 40.0, ("power_cap",))
        assert environment.boost_clock_mhz() == 1980.0
        unknown = (seen.power_w, environment.energy_j(), environment.power_limit_w(), limits(0)["power_limit_w"])
        assert unknown == (None,) * 4
        assert environment.has_nvlink() is False
        assert environment.nvlink_domain() == ""
        assert environment.environment("cuda")["device_id"] == "h100_sxm_16sm_10gib"
    with fake_cuda(FakeGpu(nvlink=True)):
        assert not environment.is_slice()
        assert environment.clocks().power_w == 350.0
        assert environment.energy_j() is not None
        assert environment.has_nvlink()


def test_the_figures_of_a_slice_are_its_own() -> None:
    with fake_cuda(SLICE):
        figures, facts = measure_gpu(), gpu_facts()
    assert (figures.id, figures.compute_units, figures.tdp_w) == ("h100_sxm_16sm_10gib", 16, 0.0)
    assert figures.memory_gib == pytest.approx(9.75)
    assert figures.sources["tdp_w"] == "unknown: a slice has no limit of its own"
    assert figures.sources["link_gbps"] == "none: no other GPU reaches a slice"
    assert (facts["power_limit_w"], facts["ecc"]) == (None, True)
    with fake_cuda(FakeGpu(uuid="another")):
        assert gpu_facts()["gpu"] != facts["gpu"]


def test_a_mig_slice_without_nvml_or_an_old_nvml_is_no_error() -> None:
    for machine in ({"nvml": False}, {"old_nvml": True}):
        with fake_cuda(SLICE, **machine):
            assert environment.clocks().power_w is None
            assert environment.power_limit_w() is None
            assert environment.has_nvlink() is (False if "old_nvml" in machine else None)
            assert accelerator.look().device_id == "h100_sxm_16sm_10gib"


def test_nvml_and_torch_may_number_devices_differently() -> None:
    first, second = FakeGpu(clock_mhz=1111.0, uuid="aaaa"), FakeGpu(clock_mhz=2222.0, uuid="bbbb")
    with fake_cuda(first, second, nvml_order=(1, 0)):
        assert environment.clocks(index=0).sm_clock_mhz == 1111.0
        assert environment.clocks(index=1).sm_clock_mhz == 2222.0


def test_an_old_driver_is_asked_the_older_question() -> None:
    with fake_cuda(old_nvml=True):
        assert environment.clocks().reasons == ("hw_thermal",)


def test_whether_nvlink_is_there_is_unknown_without_nvml() -> None:
    for nvlink in (True, False):
        with fake_cuda(FakeGpu(nvlink=nvlink)):
            assert environment.has_nvlink() is nvlink
    with fake_cuda(FakeGpu(nvlink=True), nvml=False):
        assert environment.has_nvlink() is None


# --- whether it works ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "precision"),
    [(T4, "fp16"), (V100, "fp16"), (P100, "fp16"), (P4, "fp32"), (RTX_3050, "bf16"), (FakeGpu(), "bf16")],
)  # fmt: skip
def test_the_format_is_one_that_the_device_has_units_for(gpu: FakeGpu, precision: str) -> None:
    with fake_cuda(gpu):
        found = accelerator.look()
    assert (found.hardware, found.precision, found.trouble) == ("cuda", precision, "")
    if figures_of_file(found.device_id):
        assert load_device(found.device_id).supports(precision)


def test_exclusive_process_mode_is_seen() -> None:
    with fake_cuda(exclusive=True):
        assert accelerator.look().one_process
    with fake_cuda():
        assert not accelerator.look().one_process


def test_without_nvml_exclusive_process_mode_is_asked_of_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for mode, exclusive in (("Exclusive_Process", True), ("Default", False)):
        smi.write_text(f"#!/bin/sh\necho {mode}\n")
        smi.chmod(0o755)
        with fake_cuda(nvml=False):
            assert environment.one_process_only() is exclusive


def test_an_ill_gpu_is_one_line_and_the_cpu() -> None:
    with fake_cuda(ill_after=1):
        found = accelerator.look()
    assert found.hardware == "cpu"
    assert "illegal memory access" in found.trouble


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ({"old_driver": True, "driver": "470.82.01"}, r"the driver \(470.82.01\) is too old for it or the GPU is lost"),
        ({"off_the_bus": True}, "or the GPU is lost"),
        ({"old_driver": True, "cuda": None}, "was built without CUDA: install one"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_said(
    trouble: dict, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0000:65:00.0").mkdir()
    monkeypatch.setattr(accelerator, "NVIDIA_GPUS", tmp_path)
    with fake_cuda(**trouble):
        found = accelerator.look()
    assert found.hardware == "cpu"
    assert len(found.trouble.splitlines()) == 1
    assert re.search(words, found.trouble)


def test_an_amd_gpu_without_rocm_and_an_apple_gpu_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "AMD_GPUS", tmp_path)
    with fake_cuda(old_driver=True):
        assert "built without ROCm" in accelerator.look().trouble
    with fake_cuda(FakeGpu(name="AMD Instinct MI300X", hip=True), old_driver=True):
        assert "rocminfo" in accelerator.look().trouble
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with fake_cuda(old_driver=True):
        assert "Apple GPU (mps)" in accelerator.look().trouble


def test_the_question_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerator.ask().hardware in ("cpu", "cuda")
    dead = subprocess.CompletedProcess([], -11, "", "Fatal Python error: Segmentation fault\n")
    monkeypatch.setattr(accelerator.subprocess, "run", lambda *_, **__: dead)
    assert "Segmentation fault" in accelerator.ask().trouble

    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("x", 1.0)

    monkeypatch.setattr(accelerator.subprocess, "run", hang)
    assert "did not answer" in accelerator.ask().trouble


# --- figures of a device without a file ----------------------------------------------------------------


def test_an_unknown_gpus_figures_are_measured() -> None:
    with fake_cuda(RTX_3050):
        found = measure_gpu()
    assert (found.id, found.architecture, found.sm, found.vendor) == ("rtx_3050", "ampere", 8.6, "nvidia")
    assert (found.compute_units, found.clock_mhz, found.tdp_w) == (20, 1777.0, 130.0)
    assert found.memory_gib == pytest.approx(7.7)
    assert found.memory_gbps == pytest.approx(200.0, rel=0.02)
    assert found.tensor_tflops["bf16"] == pytest.approx(36.0, rel=0.02)
    assert found.tensor_tflops["fp32"] == found.vector_tflops == pytest.approx(9.0, rel=0.02)
    assert 1.2 * found.memory_gbps < found.l2_gbps < 2.5 * 1200.0
    assert "fp8" not in found.tensor_tflops
    figures = {"tensor_tflops", "vector_tflops", "memory_gbps", "l2_gbps", "launch_us", "dispatch_us", "tdp_w"}
    assert figures | {"clock_mhz", "compute_units", "link_gbps", "pcie_gbps"} <= set(found.sources)


def test_without_nvml_the_clock_is_measured_and_the_power_limit_unknown() -> None:
    with fake_cuda(RTX_3050, nvml=False):
        found = measure_gpu()
    assert found.clock_mhz == pytest.approx(1777.0, rel=0.01)
    assert found.tdp_w == 0.0
    assert found.sources["clock_mhz"] == "measured: cycles of a spinning kernel"
    assert found.sources["link_gbps"] == "unknown: NVML does not answer"


def test_a_format_that_is_refused_is_left_out() -> None:
    with fake_cuda(FakeGpu(name="NVIDIA Odd", capability=(8, 0), bf16=False)):
        found = measure_gpu()
    assert "bf16" not in found.tensor_tflops
    assert found.supports("fp16")


def test_formats_follow_the_compute_capability() -> None:
    assert formats_of(7, 0, False) == ["fp64", "fp32", "fp16"]
    assert "fp8" in formats_of(8, 9, False)
    assert "fp8" not in formats_of(8, 6, False)
    assert "tf32" not in formats_of(9, 4, True)


def test_a_wait_in_cycles_is_never_too_short() -> None:
    assert max(load_device(name).clock_mhz for name in known_devices()) < cuda_timer.CYCLES_PER_US
    with fake_cuda(FakeGpu(name="NVIDIA GeForce RTX 5090", clock_mhz=3100.0)):
        assert min(elapsed_us(lambda: cuda_timer.block(1000.0), 3)) >= 1000.0


def test_what_v100_and_t4_cannot_run_costs_no_time() -> None:
    """Windows and continued contexts need FlashAttention-2, and some cases more memory than they have."""
    from opcast.harness.cases import Unsupported, prepare

    windowed = make_op(
        "attention_prefill", "fp16", seq_q=64, seq_kv=64, heads_q=2, heads_kv=2, head_dim=64, v_head_dim=64, window=16
    )
    large = make_op("elementwise", "fp32", numel=1 << 32, inputs=2, fn="arithmetic")
    with fake_cuda(T4):
        with pytest.raises(Unsupported, match=r"needs compute capability 8\.0, this GPU has 7\.5"):
            prepare(windowed, "sdpa", "cuda")
        with pytest.raises(torch.OutOfMemoryError, match=r"needs 48\.0 GiB of 1\d\.\d GiB available"):
            prepare(large, "torch", "cuda")


# --- campaigns in another format -----------------------------------------------------------------------


def test_a_campaign_changes_its_format_and_keeps_its_casts() -> None:
    spec = {
        "dtype": {"cpu": "fp32", "cuda": "bf16"},
        "cases": [
            {"kind": "elementwise", "dtype": {"cpu": "fp32", "cuda": ["bf16", "fp32"]}},
            {"kind": "elementwise", "fn": "cast", "dtype, out_dtype": [["fp32", "bf16"], ["int64", "fp32"]]},
        ],
        "ops": [{"kind": "gemm", "dtype": "bf16", "m": 8}],
    }
    half = in_format(spec, "fp16")
    assert half["dtype"] == {"cpu": "fp32", "cuda": "fp16"}
    assert half["cases"][0]["dtype"]["cuda"] == ["fp16", "fp32"]
    assert half["cases"][1]["dtype, out_dtype"] == [["fp32", "fp16"], ["int64", "fp32"]]
    assert half["ops"][0] == {"kind": "gemm", "dtype": "fp16", "m": 8}
    single = in_format(spec, "fp32")
    assert single["cases"][0]["dtype"]["cuda"] == ["fp32", "fp32"]
    assert single["cases"][1]["dtype, out_dtype"][0] == ["fp32", "bf16"]
    assert in_format(spec, "bf16") is spec


def test_a_plan_made_elsewhere_takes_the_format_of_the_device_that_runs_it() -> None:
    """A V100 of a cluster whose login node has no GPU at all."""
    products = [make_op("gemm", dtype, m=8, n=16, k=32) for dtype in ("bf16", "fp16", "fp32")]
    cast = make_op("elementwise", "bf16", "fp16", numel=64, fn="cast")
    cases = tuple(Case(op, "torch") for op in (*products, cast))
    plan = CampaignPlan("made", cases, cases[:1], Settings(device="cuda"))
    with fake_cuda(V100):
        told = abilities(plan.settings, None)
    assert told["format"] == "fp16"
    here = in_device_formats(plan, told)
    assert [(case.op.dtype, case.op.out_dtype) for case in here.cases] == [
        ("fp16", "fp16"),
        ("fp32", "fp32"),
        ("bf16", "fp16"),
    ]
    assert here.canaries[0].op.dtype == "fp16"
    with fake_cuda():
        assert in_device_formats(plan, abilities(plan.settings, None)) is plan
    kept = CampaignPlan("made", cases, (), Settings(device="cuda", formats="planned"))
    assert in_device_formats(kept, told) is kept


def test_looking_costs_no_torch_until_asked() -> None:
    code = "import sys; from opcast.harness import accelerator; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_geforce_names_lead_to_their_numbers() -> None:
    assert cuda_device_id("NVIDIA GeForce RTX 4070 Ti SUPER") == "rtx_4070_ti_super"
    assert cuda_device_id("NVIDIA GeForce RTX 3080 Ti") == "rtx_3080_ti"
    assert cuda_device_id("NVIDIA GeForce RTX 4090 Laptop GPU") == "rtx_4090_laptop_gpu"
    assert cuda_device_id("NVIDIA RTX A6000") == "rtx_a6000"
    assert cuda_device_id("NVIDIA RTX 6000 Ada Generation") == "rtx_6000_ada"
    assert cuda_device_id("NVIDIA RTX PRO 5000 Blackwell") == "rtx_pro_5000"
