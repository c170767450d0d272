"""Watts of an op: what NVML's energy counter gains while a GPU does this op and nothing else.

The counter is renewed every 20 to 100 ms, so a run lasts a second or more; by then the clocks are also those that the
power limit leaves. A reading of the momentary power would not do: since Ampere it is the mean of the last second, most
of which is not the op (NVML, nvmlDeviceGetPowerUsage and nvmlDeviceGetTotalEnergyConsumption).
"""

from __future__ import annotations

from collections.abc import Callable

from .sampler import Clock, Sampler

LEAST_S = 1.0
Joules = Callable[[], float | None]


def mean_power_w(sampler: Sampler, energy_j: Joules, seconds: float, now_ns: Clock) -> float | None:
    """Watts of the device while samples are taken for so many seconds; None where ``energy_j`` does not answer.

    The first samples, for a tenth of the time, are not counted: the counter lags behind.
    """
    _repeat(sampler, seconds / 10, now_ns)
    before, start = energy_j(), now_ns()
    if before is None:
        return None
    _repeat(sampler, seconds, now_ns)
    after, end = energy_j(), now_ns()
    return None if after is None or after <= before else (after - before) / (end - start) * 1e9


def _repeat(sampler: Sampler, seconds: float, now_ns: Clock) -> None:
    deadline = now_ns() + round(seconds * 1e9)
    while now_ns() < deadline:
        sampler.take(sampler.batch)
