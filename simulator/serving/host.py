"""What the host adds: to a step where it works in front of the GPU, and to the first token.

A scheduler that is a step ahead works beside the GPU, and the longer of the two counts; else both add up. Launches of a
prompt, HTTP and the tokeniser delay the first token and no other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .engines import HostRule

NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class HostTime:
    """Microseconds of a step and of each sequence in it, whether they run ``overlapped``, and of a first token."""

    step_us: float = 0.0
    seq_us: float = 0.0
    overlapped: bool = True
    ttft_us: float = 0.0

    def iteration_us(self, gpu_us: float, sequences: int) -> float:
        """Microseconds of an iteration that takes ``gpu_us`` on the GPU."""
        own = self.step_us + self.seq_us * sequences
        return max(gpu_us, own) if self.overlapped else gpu_us + own


def host_time(rule: HostRule, version: str = "", overlapped: bool | None = None) -> HostTime:
    """The host of an engine's version, of the newest where none is said; ``overlapped`` goes before its usual way."""
    beside = overlapped
    if beside is None:
        beside = not version or not rule.overlapped_from or _numbers(version) >= _numbers(rule.overlapped_from)
    figures = rule.overlapped if beside else rule.serial
    return HostTime(figures.step_us, figures.seq_us, beside, rule.ttft_ms * 1e3)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in NUMBERS.findall(version)[:2])
