"""A synthetic H100 that takes 1.4 times as long as the tables that ship say, and rows as a campaign makes them of it.

A kernel takes that time, operators one by one twice that and 3 us for each
of their kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache

import numpy as np

from opcast.datasets.devices import Device, load_device
from opcast.datasets.kernels import is_eager, kernels
from opcast.datasets.ops import KINDS, Op
from opcast.datasets.schema import Measurement
from opcast.simulator.engines import Answers, FusedEngine, ask, build_engine
from opcast.simulator.engines.answers import Columns
from opcast.simulator.workbench import SHIPPED_PREDICTORS

H100 = load_device("h100_sxm")
SLOWER = 1.4


@cache
def shipped() -> FusedEngine:
    """What opcast says where nobody has measured anything."""
    return build_engine(H100, [], [SHIPPED_PREDICTORS])


def truth(ops: Sequence[Op], state: str) -> np.ndarray:
    """Microseconds that single kernels for the ops take [n]."""
    return SLOWER * ask(shipped(), ops, state).latency_us


def measured(op: Op, backend: str, state: str, kernel_us: float, source: str = "harness") -> Measurement:
    """The row of a case whose single kernel takes so long."""
    us = 2 * kernel_us + 3 * kernels(op.kind, backend) if is_eager(op.kind, backend) else kernel_us
    return Measurement(
        op=op,
        device_id=H100.id,
        run_id="r",
        measured_at=datetime(2026, 1, 1, tzinfo=UTC),
        backend=backend,
        cache=state,
        source=source,
        timer="cuda_graph",
        latency_us=us,
        latency_p10_us=0.99 * us,
        latency_p90_us=1.01 * us,
    )


class SyntheticH100:
    """The device as an engine; what leaves a node is left to others."""

    name = "truth"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        found = shipped().answer(kind, columns, dtype, out_dtype, cache)
        family = KINDS[kind].family
        latency = found.latency_us * (1.0 if family == "host" else SLOWER)
        if family in ("collective", "expert_parallel"):
            latency = np.where(columns["ranks"] > columns["ranks_per_node"], np.nan, latency)
        return Answers(latency, latency, latency, found.engine, found.predictor, found.in_envelope)


def make(device: Device) -> SyntheticH100:
    """As ``engine.order=[opcast.tests.simulator.synthetic_h100:make]`` wants it."""
    return SyntheticH100()
