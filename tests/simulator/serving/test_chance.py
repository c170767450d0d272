"""Chances of targets are what comes true: of many set-ups whose truth is drawn, in as many as was said."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from opcast.simulator.serving.confidence import OTHER_SEEDS, chance_of_p99
from opcast.simulator.serving.figures import Z90

SETUPS = 6000


def report(log_ms: float) -> Any:
    return SimpleNamespace(ttft_ms=SimpleNamespace(p99=math.exp(log_ms)))


@pytest.mark.parametrize(("of_seeds", "of_steps"), [(0.2, 0.0), (0.2, 0.05), (0.1, 0.3), (0.0, 0.2)])
def test_chances_of_the_99th_percentile_come_true(of_seeds: float, of_steps: float) -> None:
    random = np.random.default_rng(7)
    said, met = np.zeros(SETUPS), np.zeros(SETUPS)
    for index in range(SETUPS):
        logs = 4.0 + of_seeds * random.standard_normal(OTHER_SEEDS + 1)
        fast, slow = (report(logs[0] + z * of_steps) for z in (-Z90, Z90))
        target = 4.0 + 1.5 * math.hypot(of_seeds, of_steps) * random.standard_normal()
        true = 4.0 + of_seeds * random.standard_normal() + of_steps * random.standard_normal()
        said[index] = chance_of_p99([report(each) for each in logs], fast, slow, math.exp(target))
        met[index] = true <= target
    for low, high in ((0.02, 0.1), (0.1, 0.3), (0.3, 0.7), (0.7, 0.9), (0.9, 0.98)):
        among = (said >= low) & (said < high)
        error = math.sqrt(0.25 / among.sum())
        assert met[among].mean() == pytest.approx(said[among].mean(), abs=0.02 + 2 * error)
    sure = said >= 0.98
    assert met[sure].mean() > 0.96
