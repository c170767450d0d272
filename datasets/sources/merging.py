"""Repeats of one measurement in one file become one row: their median, and how far they spread."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..columns import group_keys, number_array, numbers
from ..ops import KINDS

SAME = ("dtype", "out_dtype", "device_id", "backend", "cache", "timer", "status", "source")
"""What makes two rows of one op repeats of each other."""
FEW = 0.05  # of the repeated ops: so many may be hiccups


UNLIKE = 1.2  # the slowest repeat over the fastest: more than clocks, caches and timers make of one kernel


def merged(kind_name: str, table: pa.Table) -> tuple[pa.Table, int, str]:
    """A table with one row per identity, in the order of first appearance, how many rows that took away, and what is
    odd about these ("" = nothing).

    Of repeats ``latency_us`` is the median; minimum, 10th and 90th percentile, mean and standard deviation are theirs
    and ``iterations`` counts them, so that the spread of repeats stays visible; power is their mean. Everything else
    is the first row's. A row without repeats is kept as it is.
    """
    _, first, group, counts = np.unique(
        group_keys(table, [*KINDS[kind_name].names, *SAME]), return_index=True, return_inverse=True, return_counts=True
    )
    if len(first) == len(table):
        return table, 0, ""
    order = np.argsort(first)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    first_rows = table.take(number_array(first[order]))
    spread = _spread(numbers(table["latency_us"]), rank[group.reshape(-1)], counts[order])
    spread["power_w"] = _mean(numbers(table["power_w"]), rank[group.reshape(-1)], len(order))
    repeated = counts[order] > 1
    for name, values in spread.items():
        first_rows = _put(first_rows, name, values, repeated)
    slowest = np.zeros(len(order))
    np.maximum.at(slowest, rank[group.reshape(-1)], numbers(table["latency_us"]))
    unlike = int((slowest[repeated] > UNLIKE * spread["latency_min_us"][repeated]).sum())
    odd = f"{unlike:,} of {int(repeated.sum()):,} ops that stand there several times differ by more than 20 %"
    return first_rows, len(table) - len(first), odd if unlike > FEW * repeated.sum() else ""


def _spread(latency: np.ndarray, group: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """Statistics of the latencies of each group [g]."""
    ordered = latency[np.lexsort((latency, group))]
    starts = np.r_[0, np.cumsum(counts)[:-1]]

    def quantile(share: float) -> np.ndarray:
        position = starts + (counts - 1) * share
        low = np.floor(position).astype(np.int64)
        high = np.minimum(low + 1, starts + counts - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    mean = np.bincount(group, latency) / counts
    variance = np.bincount(group, (latency - mean[group]) ** 2) / counts
    return {
        "latency_us": quantile(0.5),
        "latency_p10_us": quantile(0.1),
        "latency_p90_us": quantile(0.9),
        "latency_min_us": ordered[starts],
        "latency_mean_us": mean,
        "latency_std_us": np.sqrt(variance),
        "iterations": counts,
    }


def _mean(values: np.ndarray, group: np.ndarray, groups: int) -> np.ndarray:
    """Mean of each group's known values [groups]; NaN where none is known."""
    finite = np.isfinite(values)
    count = np.bincount(group[finite], minlength=groups)
    total = np.bincount(group[finite], values[finite], minlength=groups)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _put(table: pa.Table, name: str, values: np.ndarray, where: np.ndarray) -> pa.Table:
    """The table with some values of one column replaced; a NaN becomes empty."""
    index = table.schema.get_field_index(name)
    field = table.schema.field(index)
    new = pa.array(values, mask=np.isnan(values)).cast(field.type)
    return table.set_column(index, field, pc.if_else(pa.array(where), new, table[name]))
