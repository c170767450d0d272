"""The devices that are not there behave as tests of the GPU path need them to."""

from __future__ import annotations

import pytest
import torch

from opcast.datasets.ops import make_op
from opcast.harness import environment
from opcast.harness.measuring import outcome
from opcast.harness.plan import Case, Settings
from opcast.tests.harness.fake_cuda import FakeGpu, FakeMachine, fake_cuda, from_json, to_json

SETTINGS = Settings(device="cuda", case_budget_s=0.02)
PRODUCT = Case(make_op("gemm", m=2048, n=2048, k=2048, dtype="bf16"), "cublas", "warm")


def test_torch_shows_the_devices_and_forgets_them() -> None:
    before = torch.cuda.is_available()
    with fake_cuda(FakeGpu(name="Tesla T4", capability=(7, 5), units=40), FakeGpu()) as machine:
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 2
        assert torch.cuda.get_device_properties(0).multi_processor_count == 40
        made = torch.ones(4, 4, device="cuda") @ torch.ones(4, 4).to("cuda")
        assert made.sum() == 64.0
        assert machine.launches >= 2
    assert torch.cuda.is_available() == before


def test_a_campaign_case_takes_what_the_figures_say() -> None:
    with fake_cuda():
        row = outcome(PRODUCT, SETTINGS)
        flushed = outcome(
            Case(make_op("elementwise", numel=1 << 20, inputs=2, dtype="fp32", fn="arithmetic"), "torch", "cold"),
            SETTINGS,
        )
    assert row["status"] == flushed["status"] == "ok"
    assert row["timer"] == "cuda_graph"
    assert row["latency_us"] == pytest.approx(2 * 2048**3 / 800e6, rel=0.02)
    assert row["sm_clock_mhz"] == pytest.approx(1980.0)  # counted under load, where NVML's is of an idle moment
    assert row["clocks"] == "burst"


def test_a_device_without_bf16_refuses_it() -> None:
    with fake_cuda(FakeGpu(name="Tesla T4", capability=(7, 5), bf16=False)):
        assert outcome(PRODUCT, SETTINGS)["status"] == "unsupported"


def test_an_ill_context_stays_ill() -> None:
    with fake_cuda(ill_after=3):
        ones = [torch.ones(3, device="cuda") for _ in range(3)]
        with pytest.raises(RuntimeError, match="illegal memory access"):
            ones[0].sum()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            torch.cuda.synchronize()


def test_a_lost_device_and_an_old_driver_are_not_available() -> None:
    for trouble in ({"off_the_bus": True}, {"old_driver": True}):
        with fake_cuda(**trouble):
            assert not torch.cuda.is_available()


def test_without_nvml_clocks_are_unknown() -> None:
    with fake_cuda(nvml=False):
        assert environment.clocks("cuda") == environment.Clocks()


def test_a_machine_travels_to_a_child_process() -> None:
    machine = FakeMachine([FakeGpu(), FakeGpu(name="NVIDIA L4", capability=(8, 9))], exclusive=True, ill_after=7)
    assert from_json(to_json(machine)) == machine
