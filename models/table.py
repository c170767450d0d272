"""Measurements of one kind on one device with one backend, as columns: what a predictor is trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..datasets.backends import DEFAULT_BACKEND
from ..datasets.columns import number_array
from ..datasets.devices import Device
from ..datasets.row_clocks import burst_mhz, relative_clocks
from ..datasets.vocabulary import KINDS, OpColumns, kind
from .choice import ranked
from .clocks import at_boost
from .features import Frame, feature_names, frame
from .intervals import PERCENTILES, wider
from .splits import combined

if TYPE_CHECKING:
    import pyarrow as pa

ORIGIN = ("source", "source_ref", "license", "torch", "cuda", "driver", "clocks")  # what a card says of the data
EAGER = "eager"  # the timer of rows whose figure includes the host's dispatch


class TrainingError(ValueError):
    """A table that cannot be learned from; the message says why and what to do."""


class MeasurementStore(Protocol):
    """What training and transfer need of a measurement store."""

    def kinds(self) -> Iterable[str]: ...

    def devices(self, kind_name: str | None = None, /) -> list[str]: ...

    def read(self, kind: str, device: str | None = None, /) -> pa.Table: ...

    def device(self, device_id: str, /) -> Device | None: ...

    def fingerprint(self, kind: str, device: str, /) -> str: ...


@dataclass(frozen=True, eq=False)
class MeasurementTable:
    """Measurements of one kind, device and backend as columns of n rows each."""

    kind: str
    device: Device
    backend: str
    columns: Mapping[str, np.ndarray]  # int64, by dimension
    dtype: np.ndarray
    out_dtype: np.ndarray
    cache: np.ndarray
    latency_us: np.ndarray
    fingerprint: str = ""
    sources: Mapping[str, Any] = field(default_factory=dict)
    noise: np.ndarray | None = None  # half of what holds most samples of a row, in ln units; NaN where none is known
    hidden_us: float = 0.0  # nothing faster is known: rows whose time includes the host's dispatch were left out
    site: np.ndarray | None = None  # who measured a row: the harness here, another site, a source of foreign rows

    def __len__(self) -> int:
        return len(self.latency_us)

    def take(self, rows: np.ndarray) -> MeasurementTable:
        """The same table with some of its rows."""
        return dataclasses.replace(
            self,
            columns={name: values[rows] for name, values in self.columns.items()},
            dtype=self.dtype[rows],
            out_dtype=self.out_dtype[rows],
            cache=self.cache[rows],
            latency_us=self.latency_us[rows],
            noise=None if self.noise is None else self.noise[rows],
            site=None if self.site is None else self.site[rows],
        )

    def groups(self) -> Iterator[tuple[np.ndarray, OpColumns]]:
        """Rows of one dtype and cache state at a time, int64, and their ops."""
        codes = combined([self.dtype.astype(str), self.out_dtype.astype(str), self.cache.astype(str)])
        for code, first in zip(*np.unique(codes, return_index=True), strict=True):
            rows = np.flatnonzero(codes == code)
            columns = {name: values[rows] for name, values in self.columns.items()}
            state = (str(values[first]) for values in (self.dtype, self.out_dtype, self.cache))
            yield rows, OpColumns(self.kind, columns, *state)

    def frame(self) -> Frame:
        """Features and analytical times of all rows, computed per dtype and cache state."""
        matrix = np.empty((len(self), len(feature_names(self.kind))), dtype=np.float32)
        analytical, roofline = np.empty(len(self)), np.empty(len(self))
        for rows, ops in self.groups():
            features = frame(ops, self.device)
            matrix[rows] = features.matrix
            analytical[rows], roofline[rows] = features.analytical_us, features.roofline_us
        return Frame(matrix, analytical, roofline)


def take(ops: Frame, rows: np.ndarray) -> Frame:
    """Some rows of a frame."""
    return Frame(ops.matrix[rows], ops.analytical_us[rows], ops.roofline_us[rows])


def tables(
    kind_name: str, rows: pa.Table, device: Device, fingerprint: str = "", eager: bool = False
) -> list[MeasurementTable]:
    """One per backend of an Arrow table with the dims of the kind, ``dtype``, ``latency_us``, …

    ``out_dtype`` (default: dtype), ``backend`` (``torch``), ``cache`` (``warm``) and ``timer`` may be missing; rows
    whose latency is no positive number, whose dtype the device cannot run, that were taken on a throttled device or,
    unless ``eager``, whose time includes the host's dispatch are left out. Products timed at the clocks that a power
    limit leaves are brought to boost clocks, from which a step slows them. TrainingError for a column that is missing.
    """
    for name in (*kind(kind_name).names, "dtype", "latency_us"):
        if name not in rows.column_names:
            raise TrainingError(f"the {kind_name} table lacks column {name!r}; it has {', '.join(rows.column_names)}")
    dtype = _column(rows, "dtype").astype(str)
    out_dtype, cache = _column(rows, "out_dtype", dtype).astype(str), _column(rows, "cache", "warm").astype(str)
    latency = _at_boost(kind_name, rows, _latency(rows, device), (dtype, out_dtype, cache), device)
    keep = np.isfinite(latency) & (latency > 0)
    if KINDS[kind_name].family in ("gemm", "attention"):
        keep &= np.isin(dtype, [name for name in np.unique(dtype) if device.supports(str(name))])
    keep &= ~throttled(rows)
    hidden = keep & (_column(rows, "timer", "").astype(str) == EAGER) & (not eager)
    keep &= ~hidden
    backend = _column(rows, "backend", DEFAULT_BACKEND).astype(str)
    origin = rows.select([name for name in ORIGIN if name in rows.column_names])
    noise, site = _noise(rows, latency), _column(rows, "source", "").astype(str)
    result = []
    for name in np.unique(backend[keep]):
        chosen = np.flatnonzero(keep & (backend == name))
        columns = {dim: _column(rows, dim)[chosen].astype(np.int64) for dim in KINDS[kind_name].names}
        texts = dtype[chosen], out_dtype[chosen], cache[chosen]
        origin_of_rows = origin.take(number_array(chosen))
        sources = {column_name: _distinct(origin_of_rows, column_name) for column_name in ORIGIN}
        table = MeasurementTable(kind_name, device, str(name), columns, *texts, latency[chosen], fingerprint, sources)
        least = float(latency[chosen].min()) if np.any(hidden & (backend == name)) else 0.0
        result.append(dataclasses.replace(table, noise=noise[chosen], site=site[chosen], hidden_us=least))
    return result


def _at_boost(
    kind_name: str, rows: pa.Table, latency_us: np.ndarray, states: Sequence[np.ndarray], device: Device
) -> np.ndarray:
    """The times of rows [n] at boost clock; ``states`` are their dtype, out_dtype and cache [n]."""
    if not {"clocks", "sm_clock_mhz"} <= set(rows.column_names):
        return latency_us
    clocks, mhz = _column(rows, "clocks").astype(object), _column(rows, "sm_clock_mhz").astype(np.float64)
    clock = relative_clocks(clocks, mhz, burst_mhz(clocks, mhz, device.clock_mhz))
    boosted = latency_us.copy()
    slowed = np.flatnonzero(clock < 1.0)
    keys = np.stack([values[slowed] for values in states], axis=1)
    for state in sorted({tuple(values) for values in keys}):
        at = slowed[(keys == state).all(axis=1)]
        columns = {name: _column(rows, name)[at] for name in KINDS[kind_name].names}
        dtype, out_dtype, cache = state
        if device.supports(dtype):
            boosted[at] = at_boost(
                OpColumns(kind_name, columns, dtype, out_dtype, cache), device, latency_us[at], clock[at]
            )
    return boosted


def throttled(rows: pa.Table) -> np.ndarray:
    """Which rows were taken on a device that heat or a failing supply slowed down [n]: nothing is learned of them."""
    return _column(rows, "throttled", False).astype(object) == True  # noqa: E712 - None is unknown


def default_backend(backends: list[MeasurementTable]) -> str | None:
    """The backend that answers when none is named, as in :meth:`.registry.Registry.default_backend`."""
    kind_name = backends[0].kind if backends else ""
    return next(iter(ranked({table.backend: len(table) for table in backends}, None, (), kind_name)), None)


def _column(rows: pa.Table, name: str, default: Any = None) -> np.ndarray:
    if name in rows.column_names:
        return np.asarray(rows.column(name).to_numpy(zero_copy_only=False))
    if isinstance(default, np.ndarray):
        return default
    return np.full(rows.num_rows, default)


def _latency(rows: pa.Table, device: Device) -> np.ndarray:
    """Microseconds of each row [n]: the median; on a CPU the mean, as far as it is below the 90th percentile.

    Other work on a machine lengthens some calls by much. A step adds up many, so it is their mean that adds up.
    """
    median = _column(rows, "latency_us").astype(np.float64)
    if not device.synchronous or not {"latency_mean_us", "latency_p90_us"} <= set(rows.column_names):
        return median
    mean, most = (_column(rows, name).astype(np.float64) for name in ("latency_mean_us", "latency_p90_us"))
    typical = np.fmax(np.minimum(mean, most), median)
    return np.where(np.isfinite(median), typical, median)


def _noise(rows: pa.Table, latency_us: np.ndarray) -> np.ndarray:
    """Half-widths in ln units of the intervals that hold most samples of each row [n]; NaN where none were kept."""
    if not {"latency_p10_us", "latency_p90_us"} <= set(rows.column_names):
        return np.full(len(latency_us), np.nan)
    low, high = (_column(rows, name).astype(np.float64) for name in ("latency_p10_us", "latency_p90_us"))
    with np.errstate(divide="ignore", invalid="ignore"):
        half = np.maximum(np.log(high / latency_us), np.log(latency_us / low))
    return np.where(half > 0, half * wider(PERCENTILES), np.nan)


def _distinct(rows: pa.Table, name: str) -> list[str]:
    if name not in rows.column_names:
        return []
    return sorted({str(value) for value in rows.column(name).unique().to_pylist() if value is not None})[:20]
