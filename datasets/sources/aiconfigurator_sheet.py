"""One of aiconfigurator's tables: where it is from, and its columns as numbers and texts in opcast's terms."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from ..columns import codes, number_array, numbers, text_array
from ..device_names import cuda_device_id
from ..devices import load_device
from ..schema import CLOCKS
from .tables import SourceError

DTYPES = {
    "bfloat16": "bf16",
    "half": "fp16",
    "float16": "fp16",
    "float": "fp32",
    "sq": "int8",
    "int8_wo": "w8a16",
    "int4_wo": "w4a16",
    "w4afp8": "w4a8",
    "w4a16_mxfp4": "mxfp4a16",
    "w4a8_mxfp4_mxfp8": "mxfp4a8",
}

# With watts the collector replays a call for a second, but 3,000 times at most, and takes the mean of NVML's counter,
# which is itself a mean over a second (collector/helper.py; NVML's reference on nvmlDeviceGetPowerUsage). So watts of
# shorter runs are for the most part those of what ran before: products at one rate read 220 W in 0.2 s, 690 W in 1 s.
MOST_REPLAYS, AVERAGED_US = 3000.0, 1e6
WEIGHT_BYTES = {"bfloat16": 2.0, "nvfp4": 0.5}  # of an element, elsewhere one


@dataclass(frozen=True)
class Origin:
    """Where a table is from."""

    system: str
    table: str
    framework: str
    version: str
    reference: str
    measured_at: datetime


class Sheet:
    """One table: its columns by name, as numbers or by distinct text."""

    def __init__(self, table: pa.Table, origin: Origin) -> None:
        self.table, self.origin = table, origin

    def __len__(self) -> int:
        return len(self.table)

    def number(self, name: str, default: int | None = None) -> np.ndarray:
        """A column of numbers [n]; SourceError when it is missing and has no default."""
        if name not in self.table.column_names:
            if default is None:
                raise SourceError(f"table {self.origin.table} lacks the column {name!r}")
            return np.full(len(self), default)
        column = self.table[name]
        if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            raise SourceError(f"column {name!r} of table {self.origin.table} holds {column.type}, not numbers")
        integral = pa.types.is_integer(column.type) and not column.null_count
        return numbers(column.cast(pa.int64() if integral else pa.float64()))

    def each(self, function: Callable[..., Any], *names: str) -> tuple[np.ndarray, list[Any]]:
        """``function`` of every distinct combination of text columns, and each row's place [n] among them.

        A missing column counts as empty text.
        """
        code = np.zeros(len(self), dtype=np.int64)
        combinations: list[tuple[str, ...]] = [()]
        for name in names:
            if name not in self.table.column_names:
                combinations = [(*before, "") for before in combinations]
                continue
            column, texts = codes(self.table[name].cast(pa.string()))
            texts = [*texts, ""]  # a missing value's code is -1: the last
            code = code * len(texts) + column % len(texts)
            combinations = [(*before, text) for before in combinations for text in texts]
        used, row_of = np.unique(code, return_inverse=True)
        return row_of.reshape(-1), [function(*combinations[one]) for one in used]

    def text(self, function: Callable[..., str], *names: str) -> pa.Array:
        """``function`` of text columns, for every row."""
        row_of, texts = self.each(function, *names)
        return text_array(texts).take(number_array(row_of))

    def integer(self, function: Callable[..., int], *names: str) -> np.ndarray:
        """``function`` of text columns, for every row [n]."""
        row_of, integers = self.each(function, *names)
        return np.array(integers, dtype=np.int64)[row_of] if integers else np.zeros(0, dtype=np.int64)

    def dtype(self, name: str) -> pa.Array:
        """A column of number formats by opcast's names; an unknown one stays as it is."""
        return self.text(canonical, name)

    def backend(self, suffix: Callable[..., str] = lambda *_: "", *names: str) -> pa.Array:
        """Framework, version and kernel source, with what ``suffix`` makes of the named columns."""

        def label(framework: str, version: str, kernel: str, *values: str) -> str:
            ours = "nccl" if self.origin.table == "nccl" and version else ""  # then it is NCCL's version
            by = ours or framework.lower() or self.origin.framework
            backend = f"{by}-{version or self.origin.version}:{readable(kernel)}{suffix(*values)}"
            return re.sub(r"[^A-Za-z0-9._:+-]", "_", backend)

        return self.text(label, "framework", "version", "kernel_source", *names)

    @cached_property
    def device_id(self) -> pa.Array:
        return self.text(lambda name: cuda_device_id(name) if name else system_device(self.origin.system), "device")

    @cached_property
    def shared(self) -> dict[str, Any]:
        """Columns that every table has."""
        columns = {
            "device_id": self.device_id,
            "device_name": self.text(str, "device"),
            "measured_at": self.origin.measured_at,
            "source_ref": self.origin.reference,
            "license": "Apache-2.0",
        }
        for theirs, ours in (("power", "power_w"), ("power_limit", "power_limit_w")):
            if theirs in self.table.column_names:
                watts = self.number(theirs).astype(np.float64)
                columns[ours] = np.where(watts > 0, watts, np.nan)
        steady = np.isfinite(columns.get("power_w", np.full(len(self), np.nan)))
        columns["clocks"] = text_array(CLOCKS).take(number_array(steady.astype(np.int64)))
        if steady.any():
            followed = self.milliseconds() * self.calls_of_a_replay() * MOST_REPLAYS >= AVERAGED_US
            columns["power_w"] = np.where(followed, columns["power_w"], np.nan)
        return columns

    def calls_of_a_replay(self) -> np.ndarray:
        """How many calls the collector puts into one replay of its graph [n] (``collector/*/collect_*.py``)."""
        if self.origin.table in ("computescale", "scale_matrix"):
            return np.full(len(self), 5.0)
        if self.origin.table == "moe":
            return np.where(self.integer(lambda name: int(name.startswith("power_law")), "distribution") == 1, 5.0, 1.0)
        if self.origin.table == "gemm" and self.origin.framework == "vllm":
            return np.where(self.integer(lambda name: int(name in ("bfloat16", "fp8")), "gemm_dtype") == 1, 6.0, 1.0)
        if self.origin.table == "gemm" and self.origin.framework == "trtllm":  # as many as fill the cache, at most 5
            cache = load_device(system_device(self.origin.system)).l2_mib * 2**20
            row_of, sizes = self.each(lambda name: WEIGHT_BYTES.get(name, 1.0), "gemm_dtype")
            weights = self.number("n") * self.number("k") * np.array(sizes, dtype=np.float64)[row_of]
            return np.clip(np.ceil(cache / weights), 1.0, 5.0)
        return np.ones(len(self))

    def milliseconds(self) -> np.ndarray:
        """The column of milliseconds as microseconds [n]."""
        return self.number("latency") * 1e3

    def numbers(self, **names: str) -> dict[str, np.ndarray]:
        """Columns of numbers, under our names."""
        return {ours: self.number(theirs) for ours, theirs in names.items()}

    def timed(self, dtype: str, backend: pa.Array | None = None) -> dict[str, Any]:
        """The columns of an op's format, with 16-bit results, of its backend and of its time."""
        backend = self.backend() if backend is None else backend
        return {"dtype": self.dtype(dtype), "out_dtype": "bf16", "backend": backend, "latency_us": self.milliseconds()}

    def where(self, rows: np.ndarray) -> Sheet:
        """Some of its rows."""
        return Sheet(self.table.take(number_array(np.flatnonzero(rows))), self.origin)


def system_device(system: str) -> str:
    """opcast's name of a system; the A100 ones have 80 GB, as their rows say where they name a device."""
    return {"a100_sxm": "a100_sxm_80gb"}.get(system, system)


def canonical(name: str) -> str:
    """opcast's name of a number format; one that it does not know as it stands."""
    return DTYPES.get(name, name)


def readable(kernel: str) -> str:
    """A kernel source without what varies between builds: paths, layer numbers, plugin prefixes."""
    if kernel in ("", "NCCL", "TRTLLM"):
        return {"NCCL": "nccl", "TRTLLM": "custom_allreduce"}.get(kernel, "default")
    first, *_, last = (kernel + "/").rstrip("/").split("/") if "/" in kernel else (kernel, "")
    return f"{first}{re.sub(r'^PLUGIN_V[0-9]+_|_[0-9]+$', '', last)}"
