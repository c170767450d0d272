"""The phases of a chunk as programs for one device's streams, and how long each takes.

A micro-batch runs a chunk's ``forward`` and its ``backward`` (with what is recomputed); ``weight`` is the part of the
backward that only makes gradients of weights and may be put off; ``paired`` is a forward and a backward that run at
the same time, each hiding the other's communication (DualPipe); ``optimizer`` ends the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..datasets.devices import Device
from ..datasets.ops import KINDS
from .costs import Costs
from .graph import ROLES, Node
from .plan import Plan


@dataclass(frozen=True)
class PhaseTime:
    """How long one phase takes and what of that is not compute, in microseconds.

    ``exposed_us`` is communication by process group during which nothing computes, ``host_us`` waiting for the host.
    """

    total_us: float
    exposed_us: Mapping[str, float] = field(default_factory=dict)
    host_us: float = 0.0

    @property
    def compute_us(self) -> float:
        """Time in which something computes."""
        return self.total_us - sum(self.exposed_us.values()) - self.host_us
