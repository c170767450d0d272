"""Watts of ops that were measured, beside what opcast estimates of them: ``python tests/evidence/power.py STORE``.

STORE holds NVIDIA's tables with watts (``opcast import source=aiconfigurator store=STORE``). No power model is asked:
this is the estimate for chips and kinds that nobody measured. Whole sources (a chip under a framework) are left out:
the constants are sought again on the others, by the mean error of their logarithms, and asked about the one.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from opcast.datasets.columns import numbers, values
from opcast.datasets.devices import Device
from opcast.datasets.ops import KINDS
from opcast.datasets.store import Store
from opcast.datasets.vocabulary import OpColumns
from opcast.models import clocks, power

KINDS_ASKED = ("gemm", "fused_moe", "attention_prefill", "attention_decode", "quantize")
MOST_ROWS = 6000  # of a kind on a chip
LEAST_US = 20.0  # NVML's counter of shorter calls is that of what runs around them, too
FEWEST = 40
PICOJOULES = (60.0, 80.0, 100.0, 120.0, 140.0)  # a byte
SHARES = (0.0, 0.05, 0.1, 0.15, 0.2)  # of the limit, of kernels other than plain products
MOST_MEMORY = (0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 1.0)  # of the limit, of memory


@dataclass(frozen=True)
class PowerRows:
    """Measured watts [n] of a kind and format in one source, and what goes into the estimate."""

    source: str
    kind: str
    dtype: str
    device: Device
    watts: np.ndarray
    estimate: np.ndarray
    gbps: np.ndarray
    core: np.ndarray

    def refit(self, picojoules: float, share: float, most: float) -> np.ndarray:
        """The estimate with other constants."""
        active = 0.0 if KINDS[self.kind].family == "gemm" else share
        memory = picojoules * 1e-3 * np.minimum(self.gbps, self.device.memory_gbps)
        memory = np.minimum(memory, most * self.device.tdp_w)
        watts = clocks.idle_w(self.device) + active * self.device.tdp_w + memory + self.core
        return np.asarray(np.minimum(watts, self.device.tdp_w))

    def error(self, watts: np.ndarray) -> float:
        """Mean of |ln(estimate / measured)|."""
        return float(np.mean(np.abs(np.log(watts / self.watts))))


def rows_of(store: Store) -> Iterator[PowerRows]:
    """All groups of a store that have watts."""
    for kind in KINDS_ASKED:
        for device_id in store.devices(kind) if kind in store.kinds() else ():
            table, device = store.read(kind, device_id), store.known_device(device_id)
            watts, latency = numbers(table["power_w"]), numbers(table["latency_us"])
            sources = np.array([name.partition("-")[0] for name in values(table["backend"])])
            formats = np.array(
                [f"{a} {b}" for a, b in zip(*(values(table[n]) for n in ("dtype", "out_dtype")), strict=True)]
            )
            usable = np.flatnonzero((np.nan_to_num(watts) > 0) & (latency >= LEAST_US))
            chosen = np.random.default_rng(0).permutation(usable)[:MOST_ROWS]
            columns = {name: numbers(table[name]) for name in KINDS[kind].names}
            for source, formats_of in sorted({(sources[at], formats[at]) for at in chosen}):
                at = chosen[(sources[chosen] == source) & (formats[chosen] == formats_of)]
                if len(at) < FEWEST:
                    continue
                dtype, out_dtype = formats_of.split()
                asked = OpColumns(
                    kind, {name: each[at].astype(np.int64) for name, each in columns.items()}, dtype, out_dtype
                )
                yield group(f"{device_id} {source}", asked, device, latency[at], watts[at])


def group(source: str, asked: OpColumns, device: Device, latency_us: np.ndarray, watts: np.ndarray) -> PowerRows:
    """Measured rows with their estimate, and its parts."""
    estimate = power.estimated_w(asked, device, latency_us)
    moved_gbps, core_w = power.demands(asked, device, latency_us)
    return PowerRows(source, asked.kind, asked.dtype, device, watts, estimate, moved_gbps, core_w)


def best_constants(groups: Sequence[PowerRows]) -> tuple[float, float, float]:
    """The constants with the least mean error over groups."""
    tried = itertools.product(PICOJOULES, SHARES, MOST_MEMORY)
    return min(tried, key=lambda three: float(np.mean([each.error(each.refit(*three)) for each in groups])))


def percent(estimate: np.ndarray, watts: np.ndarray) -> str:
    """The median error, and how far the mean is off."""
    return f"{100 * np.median(np.abs(estimate / watts - 1)):.0f} / {100 * (estimate.mean() / watts.mean() - 1):+.0f}"


def lines(groups: Sequence[PowerRows]) -> Iterator[str]:
    """The table as Markdown."""
    yield "| source | kind | dtype | rows | mean W | median error / mean, % | constants of the others, % |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for source in sorted({each.source for each in groups}):
        constants = best_constants([each for each in groups if each.source != source])
        for each in (each for each in groups if each.source == source):
            shown = percent(each.estimate, each.watts), percent(each.refit(*constants), each.watts)
            cells = source, each.kind, each.dtype, str(len(each.watts)), f"{each.watts.mean():.0f}", *shown
            yield f"| {' | '.join(cells)} |"
        of_source = [each for each in groups if each.source == source]
        ratios = [np.mean(each.estimate) / np.mean(each.watts) for each in of_source]
        others = [np.mean(each.refit(*constants)) / np.mean(each.watts) for each in of_source]
        spread = [f"{100 * np.mean(np.abs(np.array(found) - 1)):.0f}" for found in (ratios, others)]
        yield (
            f"| **{source}** | mean of kinds | | | | {spread[0]} | {spread[1]} "
            f"({constants[0]:g} pJ a byte, share {constants[1]:g}, memory {constants[2]:g}) |"
        )


if __name__ == "__main__":
    print("\n".join(lines(list(rows_of(Store(Path(sys.argv[1])))))))
