"""Many ops of one kind and format at once: columns of dims in, columns of predictions out, no op made of any row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...datasets.devices import Device, DeviceError
from ...datasets.ops import KINDS
from ...datasets.vocabulary import OpColumns
from ...models import analytical, power
from ..engines.answers import Engine
from ..engines.coverage import COVERAGE, above_roofline
from ..timing.cold_products import bound_asked_products


@dataclass(frozen=True)
class Predicted:
    """Predictions of n ops, an array each; the fields are those of ``OpPrediction``. Watts are NaN where unknown.

    ``bound`` are places in :data:`....models.analytical.BOUNDS`.
    """

    latency_us: np.ndarray
    low_us: np.ndarray
    high_us: np.ndarray
    coverage: np.ndarray
    engine: np.ndarray
    predictor: np.ndarray
    in_envelope: np.ndarray
    roofline_us: np.ndarray
    bound: np.ndarray
    clause: np.ndarray
    source: np.ndarray
    power_w: np.ndarray
    energy_mj: np.ndarray
    energy_in_envelope: np.ndarray


def check_format(kind: str, dtype: str, device: Device) -> None:
    """DeviceError when the device lacks the units for ops of a kind and format."""
    if KINDS[kind].family in ("gemm", "attention") and not device.supports(dtype):
        raise DeviceError(f"{device.name} has no {dtype} matrix units; it has {', '.join(device.tensor_tflops)}")


def predict_columns(
    query: OpColumns,
    device: Device,
    engine: Engine,
    registries: Sequence[Path] = (),
    limits: power.Limits | None = None,
    backend: str | None = None,
) -> Predicted:
    """The predictions of n ops of one kind, whose dims are int64.

    As :func:`.ops.predict_ops` and :func:`.ops.with_power` answer them one by one. DeviceError when the device lacks
    the format, PowerError for ``limits`` that cannot be held.
    """
    check_format(query.kind, query.dtype, device)
    answer = engine.answer(query.kind, query.columns, query.dtype, query.out_dtype or query.dtype, query.cache)
    if query.cache == "cold":
        answer = bound_asked_products(engine, query, answer, device)
    roofline, bound = analytical.limits(replace(query, cache="warm"), device)
    latency, high, inside = answer.latency_us, answer.high_us, answer.in_envelope
    low = above_roofline(latency, answer.low_us, roofline, answer.engine)
    watts, energy, power_known = (
        np.full(len(latency), np.nan),
        np.full(len(latency), np.nan),
        np.zeros(len(latency), bool),
    )
    limits = (limits or power.Limits()).of(device)
    model = power.find(registries, query.kind, device.id, backend)
    if power.answers(query.kind, device, limits):
        demand = power.drawn(model, query, device, limits, latency)
        power_known = demand.in_envelope & inside & (demand.slower == 1.0)
        latency, low, high = latency * demand.slower, low * demand.slower, high * demand.slower
        inside = inside & (demand.slower == 1.0)
        watts, energy = demand.power_w, demand.power_w * latency * 1e-3
    return Predicted(
        latency,
        low,
        high,
        np.full(len(latency), COVERAGE),
        answer.engine,
        answer.predictor,
        inside,
        roofline,
        bound,
        answer.clause,
        answer.source,
        watts,
        energy,
        power_known,
    )
