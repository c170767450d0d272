"""Power, energy and price of a step: an estimate from what devices do while it runs.

Where a power model was trained it says what an op draws; else a device draws a share of its TDP by what holds it
back. The shares are stated, not fitted: published steps give time, rarely watts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...datasets.devices import Device

# Share of TDP: matrix units at work; HBM at work; waiting for the network or a bubble.
COMPUTING, MEMORY, WAITING = 0.92, 0.65, 0.35


@dataclass(frozen=True)
class Energy:
    """Mean watts of one device and joules of all of them for one step; None where the TDP is unknown."""

    power_w: float | None
    energy_j: float | None


def energy(device: Device, devices: int, computing_s: float, memory_s: float, step_s: float) -> Energy:
    """Of ``devices`` that spend ``computing_s`` in products, ``memory_s`` in other kernels, and wait for the rest."""
    if not device.tdp_w or step_s <= 0.0:
        return Energy(None, None)
    waiting_s = max(step_s - computing_s - memory_s, 0.0)
    joules = device.tdp_w * (COMPUTING * computing_s + MEMORY * memory_s + WAITING * waiting_s)
    return Energy(joules / step_s, joules * devices)


def cost(price_per_device_hour: float, devices: int, seconds: float) -> float | None:
    """Price of ``seconds`` on ``devices``; None without a price."""
    return price_per_device_hour * devices * seconds / 3600.0 if price_per_device_hour else None
