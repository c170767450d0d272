"""Nodes beside each other: which one measures unlike the others, and what its device says that may be why.

Every part of a campaign times the same canaries (:mod:`.parts`). A node's figure is the median over canaries of its
time over the median of the nodes. A node is an outlier when that is further from 1 than ``FAR`` and than what the other
nodes' spread allows (five robust standard deviations). Its rows are facts and stay; the store is told not to hand them
out (``Store.set_aside``), so that they are neither learned nor answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets.columns import values
from ..datasets.ops import KINDS
from .sessions import sessions

if TYPE_CHECKING:
    from ..datasets.store import Store

FAR = 0.03
SPREADS = 5.0
FEWEST_NODES = 3  # of two that differ nobody knows which is wrong


@dataclass(frozen=True)
class NodeReport:
    """A node against the others of its device: ``ratio`` of times (above 1: slower), and odd facts of its GPU."""

    node: str
    gpu: str | None
    device_id: str
    ratio: float
    canaries: int
    outlier: bool
    odd: tuple[str, ...]


def compare(store: Store) -> list[NodeReport]:
    """Every node (each GPU of it) that timed canaries of a device which others timed too, the odd ones first."""
    reports: list[NodeReport] = []
    facts = health_of(store)
    for device_id, times in canaries(store).items():
        ratios = ratios_of(times)
        if len(ratios) < 2:
            continue
        wrong = outliers({gpu_at: ratio for gpu_at, (ratio, _) in ratios.items()})
        odd = oddities({gpu_at: facts.get(gpu_at, {}) for gpu_at in ratios})
        for gpu_at, (ratio, count) in ratios.items():
            reports.append(NodeReport(*gpu_at, device_id, ratio, count, gpu_at in wrong, odd.get(gpu_at, ())))
    return sorted(reports, key=lambda report: (not report.outlier, -abs(report.ratio - 1.0)))


Place = tuple[str, str | None]
Times = Mapping[Any, Mapping[Place, float]]


def canaries(store: Store) -> dict[str, dict[Any, dict[Place, float]]]:
    """Median latency in microseconds by device, canary, and node with GPU."""
    latencies: dict[str, dict[Any, dict[Place, list[float]]]] = {}
    for kind_name in set(store.kinds()) & set(KINDS):
        names = [*KINDS[kind_name].names, "dtype", "out_dtype", "backend", "cache"]
        rows = store.read(
            kind_name,
            newest=False,
            columns=[*names, "run_id", "node", "gpu", "device_id", "latency_us"],
            all_nodes=True,
        )
        columns = [values(rows[name]) for name in (*names, "run_id", "node", "gpu", "device_id", "latency_us")]
        for row in zip(*columns, strict=True):
            *op, run_id, node, gpu, device_id, latency = row
            if str(run_id).startswith("canary"):
                by_place = latencies.setdefault(str(device_id), {}).setdefault((kind_name, *op), {})
                by_place.setdefault((str(node), gpu), []).append(float(latency))
    return {
        device: {
            op: {gpu_at: float(np.median(samples)) for gpu_at, samples in places.items()} for op, places in ops.items()
        }
        for device, ops in latencies.items()
    }


def ratios_of(times: Times) -> dict[Place, tuple[float, int]]:
    """Each place's median ratio to the middle of all, and over how many canaries."""
    ratios: dict[Place, list[float]] = {}
    for places in times.values():
        if len(places) < 2:
            continue
        middle = float(np.median(list(places.values())))
        for gpu_at, latency in places.items():
            ratios.setdefault(gpu_at, []).append(latency / middle)
    return {gpu_at: (float(np.median(place_ratios)), len(place_ratios)) for gpu_at, place_ratios in ratios.items()}


def outliers(ratios: Mapping[Place, float]) -> set[Place]:
    """Places whose ratio the spread of the others does not explain; none among fewer than three."""
    if len(ratios) < FEWEST_NODES:
        return set()
    outlying = set()
    for gpu_at, ratio in ratios.items():
        others = np.array([other_ratio for other, other_ratio in ratios.items() if other != gpu_at])
        spread = 1.4826 * float(np.median(np.abs(others - np.median(others))))
        if abs(ratio / float(np.median(others)) - 1.0) > max(FAR, SPREADS * spread):
            outlying.add(gpu_at)
    return outlying


def health_of(store: Store) -> dict[Place, Mapping[str, Any]]:
    """What the GPU of each place last said of itself (:func:`.provenance.health`)."""
    latest = sorted(sessions(Path(store.path)).values(), key=lambda session: session.at)
    return {(session.node, session.gpu): session.health for session in latest if session.health}


def oddities(facts: Mapping[Place, Mapping[str, Any]]) -> dict[Place, tuple[str, ...]]:
    """What is wrong with a GPU by itself (memory errors, a PCIe link below its best), or unlike most others."""
    odd: dict[Place, list[str]] = {}
    for gpu_at, health in facts.items():
        if health.get("ecc_errors"):
            odd.setdefault(gpu_at, []).append(f"{health['ecc_errors']:g} uncorrected memory errors")
        for name in ("pcie_gen", "pcie_width"):
            if health.get(name) and health.get(f"{name}_max") and health[name] < health[f"{name}_max"]:
                words = name.replace("_", " ")
                odd.setdefault(gpu_at, []).append(f"{words} {health[name]:g} of {health[f'{name}_max']:g}")
    for name in ("power_limit_w", "clock_max_mhz", "ecc"):
        usual = Counter(fact[name] for fact in facts.values() if fact.get(name) is not None).most_common(1)
        for gpu_at, health in facts.items():
            if usual and health.get(name) is not None and health[name] != usual[0][0] and len(facts) >= FEWEST_NODES:
                odd.setdefault(gpu_at, []).append(f"{name} {health[name]} where others have {usual[0][0]}")
    return {gpu_at: tuple(texts) for gpu_at, texts in odd.items()}


def set_aside(store: Store, reports: Sequence[NodeReport]) -> list[str]:
    """Tell the store of the outliers among some reports; a line for each that is new."""
    lines = []
    for report in reports:
        if report.outlier:
            why = f"{report.node} takes {report.ratio:.3f} times the others' time on {report.canaries} canaries"
            why += f" ({'; '.join(report.odd)})" if report.odd else ""
            if store.set_aside(report.node, report.gpu, report.device_id, why):
                lines.append(why)
    return lines
