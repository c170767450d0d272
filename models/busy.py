"""What an op does with its time by the analytical law: compute, memory, and what neither of them hides.

Only what computes follows the clock of compute units. So a lower clock lengthens an op by less than it is lower.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..datasets.devices import Device
from ..datasets.vocabulary import OpColumns
from . import analytical


@dataclass(frozen=True)
class Parts:
    """What n ops do with their time, in us: compute follows the clock; memory overlaps it; ``rest`` adds up."""

    compute: np.ndarray
    memory: np.ndarray
    rest: np.ndarray
    flops: np.ndarray

    @property
    def whole(self) -> np.ndarray:
        return np.maximum(self.rest + np.maximum(self.compute, self.memory), 1e-9)

    def slower(self, clock: np.ndarray | float) -> np.ndarray:
        """Latency over latency at full clock, for a relative ``clock`` in (0, 1]: never below 1."""
        return np.asarray((self.rest + np.maximum(self.compute / clock, self.memory)) / self.whole)

    def tflops(self, latency_us: np.ndarray) -> np.ndarray:
        """The rate of ops that take so long, while they compute or read: without launches and what else adds up."""
        return np.asarray(self.flops / (latency_us * (1.0 - self.rest / self.whole) * 1e6))


def parts(ops: OpColumns, device: Device) -> Parts:
    """The analytical law's terms as power sees them."""
    result = []
    for latency, _, law, _, setting in analytical.terms(ops, device):
        of_law = (law.compute, law.memory, setting.cost.flops)
        compute, memory, flops = (np.broadcast_to(np.asarray(values, dtype=float), latency.shape) for values in of_law)
        result.append((compute, memory, np.maximum(latency - np.maximum(compute, memory), 0.0), flops))
    return Parts(*(np.concatenate(values) for values in zip(*result, strict=True)))
