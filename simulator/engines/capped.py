"""Answers of a device that may draw less than its data sheet says: ops whose power the cap holds back take longer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...datasets.devices import Device, DeviceError, load_device
from ...datasets.ops import KINDS
from ...models import power
from .answers import Answers, Columns, Engine

WITHOUT_POWER = ("collective", "expert_parallel", "host")


@dataclass(frozen=True)
class CappedEngine:
    """What ``engine`` answers for the ``usual`` device, slowed to ``cap_w`` by the law of power (``models/power.py``).

    Products of fp32 are left alone: the law of latency knows what power leaves of their clock.
    """

    engine: Engine
    usual: Device
    cap_w: float

    @property
    def name(self) -> str:
        return self.engine.name

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        """PowerError for a cap that an idle device exceeds."""
        answers = self.engine.answer(kind, columns, dtype, out_dtype, cache)
        family = KINDS[kind].family
        if family in WITHOUT_POWER or (family == "gemm" and dtype == "fp32"):
            return answers
        limits = power.Limits(self.cap_w)
        slower = power.drawn(None, kind, columns, dtype, out_dtype, self.usual, cache, limits).slower
        for values in (answers.latency_us, answers.low_us, answers.high_us):
            values *= slower
        answers.in_envelope &= slower == 1.0
        return answers


def capped(engine: Engine, device: Device) -> Engine:
    """The engine, slowed where the device's ``tdp_w`` is below that of the data sheet under its id."""
    try:
        known = load_device(device.id)
    except DeviceError:
        return engine
    if not 0.0 < device.tdp_w < known.tdp_w:
        return engine
    return CappedEngine(engine, replace(device, tdp_w=known.tdp_w), device.tdp_w)
