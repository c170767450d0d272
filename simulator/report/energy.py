"""Power, energy and price of a step: an estimate from what devices do while it runs.

A device draws a share of its TDP by what holds each op back: a product of few rows waits for memory and draws what
memory does. The shares are stated, not fitted: published steps give time, rarely watts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...datasets.devices import Device
from ...datasets.ops import Op, iterate_groups
from ...models import analytical

# Share of TDP: matrix units at work; HBM at work; waiting for the network or a bubble.
COMPUTING, MEMORY, WAITING = 0.92, 0.65, 0.35
MOST_KNOWN = 10_000  # ops of a device whose bounds are kept


@dataclass(frozen=True)
class Energy:
    """Mean watts of one device and joules of all of them for one step; None where the TDP is unknown."""

    power_w: float | None
    energy_j: float | None


def energy(device: Device, devices: int, computing_s: float, memory_s: float, step_s: float) -> Energy:
    """Of ``devices`` that compute holds back for ``computing_s``, memory for ``memory_s``, and which wait for the rest.

    No more than the TDP.
    """
    if not device.tdp_w or step_s <= 0.0:
        return Energy(None, None)
    waiting_s = max(step_s - computing_s - memory_s, 0.0)
    joules = device.tdp_w * (COMPUTING * computing_s + MEMORY * memory_s + WAITING * waiting_s)
    return Energy(joules / step_s, joules * devices)


def bounds_of(ops: Sequence[Op | None], device: Device) -> list[str]:
    """What holds each op back: compute, memory, latency, network or host; memory where an operator has no kind."""
    found = _known(repr(device))
    if len(found) > MOST_KNOWN:
        found.clear()
    distinct = [op for op in dict.fromkeys(ops) if op is not None and op not in found]
    for kind, dtype, out_dtype, positions, columns in iterate_groups(distinct):
        bounds = analytical.bound(kind, columns, dtype, out_dtype, device)
        found.update((distinct[at], str(bound)) for at, bound in zip(positions.tolist(), bounds, strict=True))
    return ["memory" if op is None else found[op] for op in ops]


@lru_cache(maxsize=8)
def _known(device: str) -> dict[Op, str]:
    """What was found out about ops on a device, for the next question."""
    return {}


def cost(price_per_device_hour: float, devices: int, seconds: float) -> float | None:
    """Price of ``seconds`` on ``devices``; None without a price."""
    return price_per_device_hour * devices * seconds / 3600.0 if price_per_device_hour else None
