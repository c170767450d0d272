"""What takes samples, and the warm-up before them: for the host's clock and CUDA's alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Clock = Callable[[], int]
Take = Callable[[int], list[float]]

WARMUP_CALLS = 3


class SpinClock(Protocol):
    """The clock of a device, measured by a kernel that counts its cycles."""

    fastest_mhz: float  # before the load of this case

    def mhz(self) -> float:
        """The clock now."""


@dataclass(frozen=True)
class Sampler:
    """``take(n)`` returns n samples, each the mean of ``calls`` calls in microseconds; ``batch`` is the least n.

    ``overhead_us`` is what was taken off each of them.
    """

    take: Take
    calls: int
    timer: str
    batch: int = 1
    overhead_us: float | None = None


def warm_up(run: Callable[[], object], seconds: float, now_ns: Clock) -> float:
    """Call ``run`` for that long, :data:`WARMUP_CALLS` times at least unless one lasts longer; the shortest in µs."""
    deadline = now_ns() + round(seconds * 1e9)
    shortest = math.inf
    calls = 0
    while True:
        start = now_ns()
        run()
        end = now_ns()
        shortest, calls = min(shortest, (end - start) / 1e3), calls + 1
        if end >= deadline and (calls >= WARMUP_CALLS or shortest > 1e6 * seconds):
            return shortest
