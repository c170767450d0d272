"""Clocks and conditions of a device at one moment, whoever tells them."""

from __future__ import annotations

from dataclasses import dataclass

# The power cap is where a large matrix product lives on a modern GPU: a state of the device, not a disturbance.
DISTURBANCES = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "power_brake"})


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks and conditions at one moment; None where the machine does not tell."""

    sm_clock_mhz: float | None = None
    mem_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    reasons: tuple[str, ...] | None = None  # why the clock is where it is, names of CLOCK_REASONS

    @property
    def throttled(self) -> bool | None:
        """Whether heat or a failing supply slows the device; None when unknown. The power cap does not count."""
        return None if self.reasons is None else bool(DISTURBANCES.intersection(self.reasons))
