"""Products as frameworks that train run them: cuBLAS called by PyTorch, whichever table timed that.

Tables of serving engines time one kernel under several names: what PyTorch calls for a 16-bit product is the same in
each of them, other machine, data and release. Each is a reading of one thing; their geometric mean answers, and how far
they are apart is in its interval. Kernels of an engine's own (CUTLASS, DeepGEMM) are no reading of it.

A machine that lowered its clocks while it timed is no reading of it either: vLLM's table of GB200 falls to half the
rate from 1.2 ms on, at whatever shape, where TensorRT-LLM's of the same call on the same chip does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...datasets.backends import framework
from ...datasets.devices import Device
from ...models.choice import LIBRARY, OWN_ROWS, THROTTLED, is_own, ranked, sources_of
from ...models.features import alike
from ...models.predictor import Prediction, Predictor
from ...models.registry import Registry
from .answers import Answers, Columns, Engine
from .coverage import apart, rescale_bounds, widen_for_labs

TORCH_CALL = "torch"  # in the name of a kernel: what PyTorch calls
NORMAL_QUANTILE_95 = 1.645  # standard deviations that 90 % of cases are within
LONG_US = 1000.0  # of a product that draws a chip's whole power: GB200's table falls from 1.2 ms on, H100's never
THROTTLED_AT = 1.5  # times another reading: those of H100, H200, B200, B300 and GB300 are within 1.4. A judgement


@dataclass(frozen=True)
class LibraryEngine:
    """Answers products of one matrix by the tables of all frameworks that time PyTorch's own call; declines others."""

    device: Device
    registries: Sequence[Registry]
    name: str = "learned"
    _found: dict[str, tuple[Predictor, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        predictors = self.readings(dtype) if kind == "gemm" else ()
        if not predictors:
            return answers
        predictions = [
            predictor.predict(columns, dtype, out_dtype, device_for(self.device, predictor), cache)
            for predictor in predictors
        ]
        latency, low, high = combine_readings(predictions, [predictor.coverage for predictor in predictors])
        low, high = widen_for_labs(latency, low, high, apart("gemm", predictors[0].card, latency))
        single = columns["batch"] == 1
        answers.latency_us[:], answers.low_us[:], answers.high_us[:] = (
            np.where(single, bound, np.nan) for bound in (latency, low, high)
        )
        answers.in_envelope[:] = np.all([prediction.in_envelope for prediction in predictions], axis=0)
        answers.engine[:] = self.name
        answers.predictor[:] = ", ".join(f"{predictor.name}@{predictor.version}" for predictor in predictors)
        answers.clause[:], answers.source[:] = LIBRARY, row_sources(*predictors)
        return answers

    def readings(self, dtype: str) -> tuple[Predictor, ...]:
        """The predictors that have learned PyTorch's call in a format, one of each framework."""
        if dtype not in self._found:
            self._found[dtype] = self._find_readings(dtype)
        return self._found[dtype]

    def _find_readings(self, dtype: str) -> tuple[Predictor, ...]:
        for device_id in filter(None, (self.device.id, self.device.variant_of)):
            for registry in self.registries:
                rows: dict[str, dict[str, int]] = {}
                for backend in registry.backends("gemm", device_id):
                    predictor = registry.find("gemm", device_id, backend) if calls_library(backend) else None
                    if predictor is not None and alike(dtype) in map(alike, predictor.card.get("dtypes", ())):
                        rows.setdefault(framework(backend), {})[backend] = predictor.card.get("n", 0)
                best = [ranked(row_counts, None, (), "gemm")[0] for _, row_counts in sorted(rows.items())]
                predictors = [registry.find("gemm", device_id, backend) for backend in best]
                if predictors:
                    return tuple(predictor for predictor in predictors if predictor is not None)
        return ()


@dataclass(frozen=True)
class ThrottledEngine:
    """Answers by ``library`` where a ``table`` of that very call throttled; declines others."""

    library: LibraryEngine
    table: Engine
    name: str = "learned"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        readings = self.library.readings(dtype) if kind == "gemm" else ()
        if len(readings) < 2:
            return answers
        of_table = self.table.answer(kind, columns, dtype, out_dtype, cache)
        names = {f"{predictor.name}@{predictor.version}" for predictor in readings}
        is_reading = np.isin(of_table.predictor.astype(str), list(names))
        of_library = self.library.answer(kind, columns, dtype, out_dtype, cache)
        with np.errstate(invalid="ignore"):
            at = np.flatnonzero(is_reading & throttled(of_table.latency_us, of_library.latency_us))
        if len(at):
            chosen = of_library.take(at)
            answers.put(at, chosen.by(THROTTLED, str(chosen.source[0])))
        return answers


def throttled(read_us: np.ndarray, least_us: np.ndarray) -> np.ndarray:
    """Whether readings are of a machine that throttled, next to the least of others."""
    return np.asarray((read_us > THROTTLED_AT * least_us) & (least_us > LONG_US))


def calls_library(backend: str) -> bool:
    """Whether a backend's name says that PyTorch called its product."""
    return TORCH_CALL in backend.partition(":")[2]


def row_sources(*predictors: Predictor) -> str:
    """Whose rows predictors learned from."""
    sources = [sources_of(predictor.card) for predictor in predictors]
    return OWN_ROWS if any(map(is_own, sources)) else ", ".join(sorted({name for labs in sources for name in labs}))


def device_for(device: Device, predictor: Predictor) -> Device:
    """The device as a predictor knows it: a variant goes by the name of what it varies."""
    return replace(device, id=predictor.device_id) if predictor.device_id == device.variant_of else device


def combine_readings(
    predictions: Sequence[Prediction], coverages: Sequence[float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The geometric mean of several readings [n] and its bounds: their mean width, and how far they are apart.

    Those of machines that throttled do not count.
    """
    read_us = np.array([prediction.latency_us for prediction in predictions])
    weights = ~throttled(read_us, read_us.min(axis=0)) / 1.0
    weights /= weights.sum(axis=0)
    logs = np.log(read_us)
    mean = (weights * logs).sum(axis=0)
    latency = np.exp(mean)
    freedom = np.maximum(1.0 - (weights**2).sum(axis=0), 1e-9)  # 1 - 1/N of N readings
    apart = NORMAL_QUANTILE_95 * np.sqrt((weights * (logs - mean) ** 2).sum(axis=0) / freedom)
    bounds = []
    for name in ("low_us", "high_us"):
        sides = [
            np.log(
                rescale_bounds(prediction.latency_us, prediction.low_us, prediction.high_us, coverage)[
                    name == "high_us"
                ]
            )
            - log
            for prediction, coverage, log in zip(predictions, coverages, logs, strict=True)
        ]
        mean_width = (weights * np.array(sides)).sum(axis=0)
        bounds.append(latency * np.exp((1.0 if name == "high_us" else -1.0) * np.hypot(mean_width, apart)))
    return latency, bounds[0], bounds[1]
