"""Watts come from the energy counter, over a time in which the device does one thing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from opcast.harness.energy import mean_power_w
from opcast.harness.measuring import outcome
from opcast.harness.plan import CampaignPlanError, Settings
from opcast.harness.sampler import Sampler
from opcast.tests.harness.fake_cuda import FakeGpu, fake_cuda
from opcast.tests.harness.test_fake_cuda import PRODUCT, SETTINGS


@dataclass
class Meter:
    """A device of so many watts on a clock of its own; its counter is renewed every ``step_s``."""

    watts: float
    step_s: float = 0.05
    now_s: float = 0.0

    def take(self, count: int) -> list[float]:
        self.now_s += count * 1e-3
        return [1000.0] * count

    def energy_j(self) -> float:
        return self.watts * (self.now_s // self.step_s) * self.step_s

    def now_ns(self) -> int:
        return round(self.now_s * 1e9)


@pytest.mark.parametrize("watts", [70.0, 700.0])
def test_a_second_is_long_enough_for_a_counter_that_jumps(watts: float) -> None:
    meter = Meter(watts)
    found = mean_power_w(Sampler(meter.take, 1, "cuda_graph", 10), meter.energy_j, 1.0, meter.now_ns)
    assert found == pytest.approx(watts, rel=0.06)
    assert meter.now_s == pytest.approx(1.1, abs=0.03)


def test_a_counter_that_does_not_answer_or_stands_still_gives_no_watts() -> None:
    meter = Meter(0.0)
    sampler = Sampler(meter.take, 1, "cuda_graph", 10)
    assert mean_power_w(sampler, lambda: None, 1.0, meter.now_ns) is None
    assert meter.now_s < 0.2  # nothing is repeated for it
    assert mean_power_w(sampler, meter.energy_j, 1.0, meter.now_ns) is None


def test_a_row_has_the_watts_of_its_op() -> None:
    gpu = FakeGpu()
    settings = dataclasses.replace(SETTINGS, energy_s=1.0)
    with fake_cuda(gpu):
        assert outcome(PRODUCT, settings)["power_w"] == pytest.approx(0.8 * gpu.power_limit_w, rel=0.1)
        assert outcome(PRODUCT, SETTINGS)["power_w"] is None
        assert outcome(dataclasses.replace(PRODUCT, cache="cold"), settings)["power_w"] is None
    with fake_cuda(gpu, old_nvml=True):
        assert outcome(PRODUCT, settings)["power_w"] is None


def test_too_short_a_time_is_refused() -> None:
    with pytest.raises(CampaignPlanError, match=r"settings.energy_s=0.2 is too short .* take 1 or more, or 0"):
        Settings.from_dict({"energy_s": 0.2})
