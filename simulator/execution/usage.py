"""Memory of a trace's tensors over time, and how unequal ranks are.

A storage is held from the first node that names one of its tensors to the last: what was there before the trace, and
what outlives it, is not known better. Nodes without times count in their order.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...datasets.traces.calls import plain_numbers
from ...datasets.traces.groups import RankedTraces
from ...datasets.traces.table import ExecutionTrace
from .analysis import RankAccount, recorded_times

CURVE_POINTS = 200  # of a curve


@dataclass(frozen=True)
class TraceMemory:
    """Bytes that a rank's tensors hold on a device. ``curve``: (us, or nodes where there are no times; bytes)."""

    rank: int
    device: str
    storages: int
    peak_bytes: int
    peak_node: int
    curve: tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class Imbalance:
    """How unequal ranks are in a class of work: mean and most of their microseconds, and the rank that has most."""

    name: str
    mean_us: float
    most_us: float
    rank: int

    @property
    def ratio(self) -> float:
        """Most over mean."""
        return self.most_us / self.mean_us if self.mean_us else 1.0


def trace_memory(run: RankedTraces) -> list[TraceMemory]:
    """The memory of each rank and device that its trace names tensors of; none where traces name no tensors."""
    return [device_memory for rank, trace in run.traces.items() for device_memory in rank_memory(trace, rank)]


def rank_memory(trace: ExecutionTrace, rank: int) -> list[TraceMemory]:
    """The memory of one rank by device."""
    start, end = recorded_times(trace)
    timed = bool(end.any())
    order = np.lexsort((trace.ids, start)) if timed else np.argsort(trace.ids, kind="stable")
    storages_of_word: dict[int, list[tuple[str, int, int]]] = {}
    lifetimes: dict[tuple[str, int], list[int]] = {}  # first and last place, bytes
    for position, row in enumerate(order.tolist()):
        for word in (int(trace.inputs[row, 0]), int(trace.outputs[row, 0])):
            if word < 0:
                continue
            if word not in storages_of_word:
                storages_of_word[word] = list(_storages(trace.words[word]))
            for device, storage, size in storages_of_word[word]:
                lifetime = lifetimes.setdefault((device, storage), [position, position, 0])
                lifetime[1], lifetime[2] = position, max(lifetime[2], size)
    begins = start[order] if timed else np.arange(len(order), dtype=np.float64)
    stops = end[order] if timed else begins + 1
    memories = []
    for device in sorted({key[0] for key in lifetimes}):
        spans = np.array([lifetime for key, lifetime in lifetimes.items() if key[0] == device], np.int64)
        change = np.zeros(len(order) + 1, np.int64)
        np.add.at(change, spans[:, 0], spans[:, 2])
        np.add.at(change, spans[:, 1] + 1, -spans[:, 2])
        level = np.cumsum(change[:-1])
        peak = int(np.argmax(level))
        curve_points = np.unique(np.append(np.linspace(0, len(level) - 1, CURVE_POINTS).astype(np.int64), peak))
        curve = tuple((float(begins[position]), int(level[position])) for position in curve_points.tolist())
        memories.append(TraceMemory(rank, device, len(spans), int(level[peak]), int(trace.ids[order[peak]]),
                                (*curve, (float(stops.max()), 0))))  # fmt: skip
    return memories


def _storages(text: str) -> list[tuple[str, int, int]]:
    """Device, storage and bytes up to the end of each tensor in a node's values; none for other values."""
    if "[" not in text[1:]:
        return []
    try:
        return list(_tensor_storages(ast.literal_eval(plain_numbers(text))))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return []


def _tensor_storages(values: Any) -> list[tuple[str, int, int]]:
    storages: list[tuple[str, int, int]] = []
    for value in values if isinstance(values, (list, tuple)) else ():
        if isinstance(value, (list, tuple)) and len(value) == 6 and isinstance(value[5], str):
            _, storage, offset, elements, width, device = value
            if all(isinstance(n, int) and 0 <= n < 1 << 62 for n in (storage, offset, elements, width)):
                storages.append((device, storage, min((offset + elements) * width, 1 << 62)))
        else:
            storages += _tensor_storages(value)
    return storages


def imbalances(accounts: Sequence[RankAccount]) -> list[Imbalance]:
    """Classes of work by how unequal the ranks are, the worst first; none for one rank."""
    if len(accounts) < 2:
        return []
    times: dict[str, dict[int, float]] = {}
    for account in accounts:
        for share in account.classes:
            if share.name not in ("gap", "metadata"):
                times.setdefault(share.name, {})[account.rank] = share.total_us
    imbalances = []
    for name, by_rank in times.items():
        slowest = max(by_rank, key=lambda rank: by_rank[rank])
        imbalances.append(Imbalance(name, sum(by_rank.values()) / len(accounts), by_rank[slowest], slowest))
    return sorted(imbalances, key=lambda imbalance: -(imbalance.most_us - imbalance.mean_us))
