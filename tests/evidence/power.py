"""Watts of ops that were measured, beside what opcast estimates of them: ``python tests/evidence/power.py STORE``.

STORE holds NVIDIA's tables with watts (``opcast import source=aiconfigurator store=STORE``), of runs that lasted as
long as the counter averages. No power model is asked: this is the estimate for chips and kinds that nobody measured.
Whole sources (a chip under a framework) are left out: the costs are sought again on the others, by the mean error of
their logarithms, and asked about the one.
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
from opcast.models import power

KINDS_ASKED = ("gemm", "fused_moe", "attention_prefill", "attention_decode", "mla_prefill", "mla_decode", "quantize")
MOST_ROWS = 6000  # of a kind on a chip
MOST_OF_MEMORY = (
    1.05  # of the bandwidth: what is read faster comes from the cache, because the table's calls share data
)
FEWEST = 40
FEW_ROWS = 64  # of a product: those of decoding, which wait for memory
BYTE_PJ = (60.0, 80.0, 100.0, 120.0)
PAIR_PJ = (0.0, 200.0, 300.0, 400.0, 500.0)
SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)  # of the limit, of kernels other than plain products
MOST_MEMORY = (0.4, 0.5, 0.6, 1.0)  # of the limit


@dataclass(frozen=True)
class PowerRows:
    """Measured watts [n] of a kind and format in one source, and what goes into the estimate."""

    source: str
    kind: str
    dtype: str
    device: Device
    watts: np.ndarray
    busy: power.Activity

    def estimate(self, costs: power.EnergyCosts | None = None) -> np.ndarray:
        """Estimated watts [n], with the costs that ship where none are given."""
        return power.drawn_w(self.busy, self.device, costs)

    def error(self, costs: power.EnergyCosts) -> float:
        """Mean of |ln(estimate / measured)|."""
        return float(np.mean(np.abs(np.log(self.estimate(costs) / self.watts))))


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
            usable = np.flatnonzero(np.nan_to_num(watts) > 0)
            chosen = np.random.default_rng(0).permutation(usable)[:MOST_ROWS]
            columns = {name: numbers(table[name]) for name in KINDS[kind].names}
            few = columns["m"] <= FEW_ROWS if kind == "gemm" else np.zeros(len(watts), dtype=bool)
            for source, formats_of, small in sorted({(sources[at], formats[at], few[at]) for at in chosen}):
                at = chosen[(sources[chosen] == source) & (formats[chosen] == formats_of) & (few[chosen] == small)]
                if len(at) < FEWEST:
                    continue
                dtype, out_dtype = formats_of.split()
                asked = OpColumns(
                    kind, {name: each[at].astype(np.int64) for name, each in columns.items()}, dtype, out_dtype
                )
                yield from group(f"{device_id} {source}", asked, device, latency[at], watts[at], small)


def group(
    source: str, asked: OpColumns, device: Device, latency_us: np.ndarray, watts: np.ndarray, few: bool
) -> Iterator[PowerRows]:
    """Measured rows whose bytes are memory's, with what they keep busy; none where they are too few."""
    busy = power.activity(asked, device, latency_us)
    of_memory = np.asarray(asked.cost.bytes) / latency_us * 1e-3 <= MOST_OF_MEMORY * device.memory_gbps
    if of_memory.sum() >= FEWEST:
        pairs = np.broadcast_to(busy.pairs, watts.shape)[of_memory]
        chosen = power.Activity(busy.gbps[of_memory], busy.core[of_memory], pairs, busy.units)
        kind = f"{asked.kind}, few rows" if few else asked.kind
        yield PowerRows(source, kind, asked.dtype, device, watts[of_memory], chosen)


def best_costs(groups: Sequence[PowerRows]) -> power.EnergyCosts:
    """The costs with the least mean error over groups."""
    tried = (power.EnergyCosts(*four) for four in itertools.product(BYTE_PJ, PAIR_PJ, SHARES, MOST_MEMORY))
    return min(tried, key=lambda costs: float(np.mean([each.error(costs) for each in groups])))


def percent(estimate: np.ndarray, watts: np.ndarray) -> str:
    """The median error, and how far the mean is off."""
    return f"{100 * np.median(np.abs(estimate / watts - 1)):.0f} / {100 * (estimate.mean() / watts.mean() - 1):+.0f}"


def mean_off(groups: Sequence[PowerRows], costs: power.EnergyCosts | None = None) -> str:
    """How far the mean watts are off in percent, in the mean of groups."""
    ratios = [np.mean(each.estimate(costs)) / np.mean(each.watts) for each in groups]
    return f"{100 * np.mean(np.abs(np.array(ratios) - 1)):.0f}"


def told(costs: power.EnergyCosts) -> str:
    """Costs in words."""
    shares = f"share {costs.active_share:g}, memory {costs.most_memory_share:g}"
    return f"{costs.byte_pj:g} pJ a byte, {costs.pair_pj:g} pJ a pair, {shares}"


def lines(groups: Sequence[PowerRows]) -> Iterator[str]:
    """The table as Markdown."""
    yield "| source | kind | dtype | rows | mean W | median error / mean, % | costs of the others, % |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for source in sorted({each.source for each in groups}):
        of_source = [each for each in groups if each.source == source]
        costs = best_costs([each for each in groups if each.source != source])
        for each in of_source:
            shown = percent(each.estimate(), each.watts), percent(each.estimate(costs), each.watts)
            cells = source, each.kind, each.dtype, str(len(each.watts)), f"{each.watts.mean():.0f}", *shown
            yield f"| {' | '.join(cells)} |"
        means = f"{mean_off(of_source)} | {mean_off(of_source, costs)} ({told(costs)})"
        yield f"| **{source}** | mean of kinds | | | | {means} |"
    yield f"All sources together: {told(best_costs(groups))}."


if __name__ == "__main__":
    print("\n".join(lines(list(rows_of(Store(Path(sys.argv[1])))))))
