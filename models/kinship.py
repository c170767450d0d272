"""Answers for a device that nobody measured, from the predictors of its nearest kin.

What a predictor knows is how far a kernel falls short of physics, from features that are relative to the device: waves,
tiles, intensity, what the cache holds. Asked with the features of another device, that shortfall times the other
device's analytical time is an answer. Kin are the nearest there are: devices of the same die, else of the same
generation, else all of the vendor, each generation one voice that counts less the further its units are from the
device's in FLOPs a clock.

Intervals come from the same answers to measured devices, each left out in turn (``tests/benchmarks/transfer.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..datasets.devices import Device, DeviceError, load_device
from ..datasets.dtypes import BITS
from ..datasets.row_checks import unit_of
from ..datasets.vocabulary import KINDS, OpColumns
from .analytical import BOUNDS, latency_us, limits, roofline_us
from .analytical.setting import SUSTAINED_TENSOR, whole_rate
from .clocks import PRODUCTS
from .donors import Donor
from .envelope import UNSEEN_CODE
from .features import Frame, alike, frame
from .intervals import COVERAGE, Intervals, partly_physics
from .predictor import Prediction, Predictor, in_parts

OWN = "own"  # the device itself, of which another kind is known
TIERS = ("die", "generation", "vendor")  # nearest first
SAME_UNITS = (
    0.5  # octaves in FLOPs a clock and unit within which devices of one die are alike: H20 has a quarter of H100's
)
REACH = 0.5  # octaves over which the voice of another generation falls by e
ORDERED = ("memory_gbps", "vector_tflops", "l2_mib", "l2_gbps", "compute_units", "tdp_w")
# Watts that saturating 8-bit products ask for at boost clock, for each TFLOP/s of peak: fp8 products of MI300X reach
# 0.78 of the share of peak that those of the same die with a quarter of the units do (MI308X; aiter's 128x128 blocks),
# and watts grow as clock to the power ``Device.alpha``. CDNA 4 taken to be alike. 16 bits ask for twice as much.
FULL_W = {"cdna3": 0.47, "cdna4": 0.47}
# GB/s that a compute unit draws from memory at most: the 80 of MI308X read weights at up to 3.46 of 5.3 TB/s (aiter's
# tuned fp8 products of up to 16 rows), where chips with all units are bound by memory
UNIT_GBPS = {"cdna3": 43.0}
ERRORS = Path(__file__).parent / "shipped" / "kinship.json"


@dataclass(frozen=True)
class Kin:
    """Predictors of ``tier`` with a voice each (the sum is 1) for ops in ``dtype``, and what their answers missed.

    With a ``donor`` they have learned its kind, and answer for ``kind`` by how far that falls short of physics.
    """

    tier: str
    predictors: Sequence[Predictor]
    voices: Sequence[float]
    dtype: str
    intervals: Intervals
    donor: Donor | None = None
    kind: str = ""

    @property
    def name(self) -> str:
        """Who they are, the loudest first."""
        order = sorted(zip(self.voices, self.predictors, strict=True), key=lambda pair: -pair[0])
        return " + ".join(f"{predictor.name}@{predictor.version}" for _, predictor in order)

    def predict(
        self, columns: Mapping[str, np.ndarray], dtype: str, out_dtype: str, device: Device, cache: str = "warm"
    ) -> Prediction:
        """Latency of n ops on ``device``; a format without predictors has the shortfall of ``self.dtype``."""
        if self.donor is not None:
            return self._recast(self.donor, columns, dtype, out_dtype, device, cache)
        kind_name = self.predictors[0].kind
        growth = max(relative.intervals.growth for relative in self.predictors)
        intervals = replace(self.intervals, growth=growth)

        uncut_device = uncut(device)

        def answer(chunk: Mapping[str, np.ndarray]) -> Prediction:
            output = self.dtype if out_dtype == dtype else out_dtype
            query, learned = (
                OpColumns(kind_name, chunk, *f, cache) for f in ((dtype, out_dtype), (self.dtype, output))
            )
            ops = frame(learned, uncut_device)
            analytical, least = ops.analytical_us, np.zeros(1)
            if dtype != self.dtype:
                analytical, least = latency_us(query, uncut_device), roofline_us(query, device)
            if uncut_device is not device:
                least = least_of_cut(query, device)
            laws = self.laws(ops, learned)
            latency = np.maximum(analytical * np.exp(self.correction(ops, laws, learned, uncut_device)), least)
            slower = self._held(query, device)
            latency = np.maximum(latency * slower, np.minimum(latency, ops.roofline_us))
            for relative in self.predictors if self.tier != TIERS[-1] and dtype == self.dtype else ():
                if no_less(relative.device, device) and not no_less(device, relative.device):
                    latency = np.maximum(latency, relative.predict(chunk, self.dtype, output, cache=cache).latency_us)
            excess = np.min([relative.envelope.excess(ops.matrix) for relative in self.predictors], axis=0)
            if KINDS[kind_name].family in PRODUCTS and alike(dtype) != alike(self.dtype):
                excess = excess + UNSEEN_CODE  # as on a device that has learned the other format alone
            widths = intervals.widths(analytical, excess, np.zeros(len(latency)))
            spread = np.exp(np.hypot(partly_physics(widths, self.seen(laws)), np.log(slower)))
            return Prediction(latency, latency / spread, latency * spread, excess <= 0.0)

        return in_parts(columns, answer, [relative.correction for relative in self.predictors])

    def _held(self, query: OpColumns, device: Device) -> np.ndarray:
        """How many times as long products take [n] as kin say, which have other watts and other units.

        Where compute bounds them, by watts for each FLOP; where memory does, by what so many units draw.
        """
        if self.tier == "vendor" or KINDS[query.kind].family not in PRODUCTS:
            return np.ones(len(next(iter(query.columns.values()))))
        shares = [clock_share(predictor.device, self.dtype) for predictor in self.predictors]
        clocks = float(np.average(shares, weights=self.voices)) / clock_share(device, query.dtype)
        watts_shares = [drawn_share(predictor.device) for predictor in self.predictors]
        reads = float(np.average(watts_shares, weights=self.voices)) / drawn_share(device)
        bound = limits(query, device)[1]
        return np.select([bound == BOUNDS.index("compute"), bound == BOUNDS.index("memory")], [clocks, reads], 1.0)

    def _recast(
        self, donor: Donor, columns: Mapping[str, np.ndarray], dtype: str, out_dtype: str, device: Device, cache: str
    ) -> Prediction:
        """The same for ops of another kind than the predictors'."""
        uncut_device = uncut(device)

        def answer(chunk: Mapping[str, np.ndarray]) -> Prediction:
            query = OpColumns(self.kind, chunk, dtype, out_dtype, cache)
            output = donor.out_dtype or (out_dtype if donor.units else self.dtype)
            learned = OpColumns(donor.kind, donor.recast(query, self.dtype), self.dtype, output, cache)
            ops, law = frame(learned, uncut_device), latency_us(query, uncut_device)
            laws = self.laws(ops, learned)
            shortfall = donor.share * self.correction(ops, laws, learned, uncut_device)
            least = (roofline_us if uncut_device is device else least_of_cut)(query, device)
            latency = np.maximum(law * np.exp(shortfall), least)
            inside = np.max([predictor.envelope.excess(ops.matrix) <= 0.0 for predictor in self.predictors], axis=0)
            widths = self.intervals.widths(ops.analytical_us, np.zeros(len(law)), np.zeros(len(law)))
            spread = np.exp(partly_physics(widths, self.seen(laws)))
            return Prediction(latency, latency / spread, latency * spread, inside)

        return in_parts(columns, answer, [predictor.correction for predictor in self.predictors])

    def laws(self, ops: Frame, learned: OpColumns) -> list[np.ndarray]:
        """Microseconds by physics of ``learned`` ops [n], by predictor: on its own device if that counts."""
        return [
            latency_us(learned, predictor.device) if predictor.hidden_us else ops.analytical_us
            for predictor in self.predictors
        ]

    def seen(self, laws: Sequence[np.ndarray]) -> np.ndarray:
        """How much of an answer was learned [n]: the mean of all by their voices."""
        parts = [predictor.seen(law_us) for predictor, law_us in zip(self.predictors, laws, strict=True)]
        return np.asarray(np.average(parts, axis=0, weights=self.voices))

    def correction(self, ops: Frame, laws: Sequence[np.ndarray], learned: OpColumns, device: Device) -> np.ndarray:
        """ln(latency / analytical) of n ops: the mean of all by their voices, nowhere below the device's roofline."""
        parts = [
            predictor.shortfall(self._as_known(predictor, ops, learned, device), law_us)
            for predictor, law_us in zip(self.predictors, laws, strict=True)
        ]
        mean = np.average(parts, axis=0, weights=self.voices)
        with np.errstate(divide="ignore"):  # what moves nothing has no roofline
            return np.asarray(np.maximum(mean, np.log(ops.roofline_us / ops.analytical_us)))

    def _as_known(self, predictor: Predictor, ops: Frame, learned: OpColumns, device: Device) -> Frame:
        """Ops of matrix units with the features of the predictor's own device where memory bounds them on both.

        There, what they take of arithmetic is no matter: a card with half of the FLOPs reads as well.
        """
        if unit_of(self.predictors[0].kind) != "tensor":
            return ops
        both = memory_bound(learned, device) & memory_bound(learned, predictor.device)
        if not both.any():
            return ops
        matrix = ops.matrix.copy(order="F")
        matrix[both] = frame(learned.take(both), predictor.device).matrix
        return replace(ops, matrix=matrix)


def memory_bound(ops: OpColumns, device: Device) -> np.ndarray:
    """Which of n ops a device waits for memory in, by physics [n]."""
    return np.asarray(limits(ops, device)[1] == BOUNDS.index("memory"))


def tier(device: Device, other: Device, dtype: str) -> str | None:
    """How near another device is; None for the device itself, a CPU or another vendor's."""
    if other.id == device.id or other.vendor != device.vendor or device.synchronous:
        return None
    if device.die and device.die == other.die and units_apart(device, other, dtype) < SAME_UNITS:
        return "die"
    return "generation" if generation(device) == generation(other) else "vendor"


def is_kin(device: Device, device_id: str, tiers: Sequence[str] = TIERS) -> bool:
    """Whether predictors of another device may answer for a device, from one of some tiers."""
    try:
        return tier(device, load_device(device_id), "bf16") in tiers
    except DeviceError:  # measured by the user, or learned from several
        return False


def no_less(device: Device, other: Device) -> bool:
    """Whether a device has no less of anything than another one: no kernel of both is slower on it."""
    rates = all(device.tensor_tflops.get(name, 0.0) >= rate for name, rate in other.tensor_tflops.items())
    return rates and all(getattr(device, name) >= getattr(other, name) for name in ORDERED)


def clock_share(device: Device, dtype: str) -> float:
    """The share of its boost clock that a device's power limit leaves to saturating products; 1 where nobody knows."""
    full_w = FULL_W.get(device.architecture, 0.0) * BITS[dtype] / 8.0
    if not full_w or not device.tdp_w or not device.supports(dtype):
        return 1.0
    return float(min(1.0, (device.tdp_w / (device.tensor_rate(dtype) * full_w)) ** (1.0 / device.alpha)))


def drawn_share(device: Device) -> float:
    """The share of its memory's bandwidth that a device's compute units can draw; 1 where nobody knows."""
    drawn_gbps = UNIT_GBPS.get(device.architecture, 0.0) * device.compute_units
    return min(1.0, drawn_gbps / device.memory_gbps) if drawn_gbps else 1.0


def uncut(device: Device) -> Device:
    """A device with the matrix units that its chip has; itself where none are cut.

    How far a kernel falls short of those is what kin know. Units that are cut take longer than that, or hide behind it.
    """
    rates = {name: whole_rate(device, name) for name in device.tensor_tflops}
    return device if rates == dict(device.tensor_tflops) else replace(device, tensor_tflops=rates)


def least_of_cut(ops: OpColumns, device: Device) -> np.ndarray:
    """What ops take [n] where matrix units that are cut decide, in us.

    All else of a product hides behind those. In attention exponentials take turns with products: units get no further
    than whole ones.
    """
    if KINDS[ops.kind].family in PRODUCTS or unit_of(ops.kind) != "tensor":
        return latency_us(ops, device)
    return roofline_us(ops, device) / SUSTAINED_TENSOR


def generation(device: Device) -> tuple[str, int]:
    """Devices that run the same kernels: of one architecture and one major compute capability."""
    return device.architecture, int(device.sm)


def units_apart(device: Device, other: Device, dtype: str) -> float:
    """Octaves between the FLOPs a clock of two devices' units; 0 in fp32, whose lanes and kernels are alike on all."""
    if dtype == "fp32":
        return 0.0
    mine, theirs = (_per_clock(chip, dtype) for chip in (device, other))
    return abs(math.log2(mine / theirs))


def voices(device: Device, others: Sequence[Device], dtype: str, least: str = TIERS[0]) -> tuple[str, dict[str, float]]:
    """The nearest tier, of ``least`` or further, that any of ``others`` is in, and the voice of each device in it.

    Empty where none is kin.
    """
    near = {
        relative.id: TIERS.index(name_of_tier)
        for relative in others
        if (name_of_tier := tier(device, relative, dtype)) is not None
    }
    near = {name: max(tier_number, TIERS.index(least)) for name, tier_number in near.items()}
    nearest = min(near.values(), default=0)
    kin = [relative for relative in others if near.get(relative.id) == nearest]
    groups: dict[tuple[str, int], list[Device]] = {}
    for relative in kin:
        groups.setdefault(generation(relative), []).append(relative)
    weights = {
        relative.id: math.exp(-units_apart(device, relative, dtype) / REACH) / len(members)
        for members in groups.values()
        for relative in members
    }
    total = sum(weights.values())
    return TIERS[nearest], {name: voice / total for name, voice in weights.items()}


@lru_cache
def errors() -> dict[str, dict[str, Intervals]]:
    """Intervals of transferred answers by kind and tier: those tiers that are nearer to the truth than physics."""
    return {
        kind_name: {name: _intervals(entry["intervals"]) for name, entry in tiers.items() if "intervals" in entry}
        for kind_name, tiers in _shipped()["kinds"].items()
    }


@lru_cache
def median_error(kind_name: str, tier_name: str) -> float | None:
    """Percent that answers from a tier missed in the median, of the devices that were left out; None for no such."""
    entry: dict[str, Any] = _shipped()["kinds"].get(kind_name, {}).get(tier_name, {})
    devices = entry.get("devices", {}).values()
    return float(np.median([device["median"] for device in devices])) if devices else None


@lru_cache
def recast_widths(kind_name: str, group: str) -> dict[str, float]:
    """Half-widths in ln units of what ops of a kind missed that were recast, by donor, on one device.

    Where nobody timed the kind, those of its ``group``; donors alone that were nearer to the truth than physics.
    """
    donors = _shipped()["donors"]
    by_donor = {**donors.get(group, {}), **donors.get(kind_name, {})}
    return {donor: entry["half_width"] for donor, entry in by_donor.items() if "half_width" in entry}


@lru_cache
def recast_share(kind_name: str, donor: Donor) -> float:
    """The part of a donor's shortfall that carries over to a kind: all of it, but where published figures say less."""
    return float(_shipped()["donors"].get(kind_name, {}).get(donor.kind, {}).get("share", donor.share))


@lru_cache
def _shipped() -> dict[str, dict[str, Any]]:
    """What is told of devices and donors that were left out: ``kinds`` by tier, ``donors`` by kind."""
    return json.loads(ERRORS.read_text("utf-8"))


def constant(half_width: float) -> Intervals:
    """The same half-width in ln units for all ops."""
    return Intervals(COVERAGE, np.zeros(0), np.zeros((1, 0)), np.full((1, 1), half_width))


def wider(intervals: Intervals, half_width: float) -> Intervals:
    """Intervals of answers that miss by as much again, independently."""
    return replace(intervals, half_width=np.hypot(intervals.half_width, half_width))


def _intervals(values: Mapping[str, Any]) -> Intervals:
    arrays = {name: np.asarray(value, dtype=np.float64) for name, value in values.items()}
    return Intervals.from_arrays({"classes": np.zeros(0), "growth": np.array(1.0), **arrays})


def _per_clock(device: Device, dtype: str) -> float:
    rate = whole_rate(device, dtype) if device.supports(dtype) else device.vector_tflops
    return rate / device.clock_mhz / device.compute_units
