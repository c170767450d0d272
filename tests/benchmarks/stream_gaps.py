"""What passes between two kernels of one stream while the host is far ahead, in the profiler's traces of real steps.

    python tests/benchmarks/stream_gaps.py [FOLDER] [--lead 20] [--least 50]

Of each trace are printed the kernels whose launch had returned ``--lead`` microseconds before the kernel before them
ended (so that the host held up nothing), and the gaps in front of them: 5th percentile, median, mean, 95th percentile.
Traces with fewer than ``--least`` such kernels are bound by their host and left out of the mean.

A row of a store has a gap in it already, that of a CUDA graph, whose replay was timed: it is read off the shortest
fills, which are alone in the traces and one after the other in the graph. What is left is ``gap_us`` of a framework
that launches its kernels one by one.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import opcast
from opcast.datasets.ops import FUNCTIONS
from opcast.datasets.store import Store

ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
FILL = "FillFunctor"  # torch's kernel of aten.fill_


def events_of(path: Path) -> list[Mapping[str, Any]]:
    """The events of a profiler's trace."""
    return list(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


def gaps_us(events: Sequence[Mapping[str, Any]], lead_us: float) -> np.ndarray:
    """Microseconds before each kernel that had been launched ``lead_us`` before the one before it on its stream ended.

    Copies and fills by the driver are neighbours, too, and no kernels: gaps beside them are left out.
    """
    launched = {e["args"]["correlation"]: e["ts"] + e["dur"] for e in events
                if e.get("cat") in LAUNCHES and "correlation" in e.get("args", {})}  # fmt: skip
    streams: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("cat") in ON_THE_GPU:
            streams.setdefault((event["args"]["device"], event["args"]["stream"]), []).append(event)
    found = []
    for stream in streams.values():
        stream.sort(key=lambda event: event["ts"])
        for before, after in itertools.pairwise(stream):
            end = before["ts"] + before["dur"]
            ahead = launched.get(after["args"]["correlation"], np.inf) + lead_us <= end
            if ahead and before["cat"] == after["cat"] == "kernel":
                found.append(after["ts"] - end)
    return np.array(found)


def shortest_fill_us(events: Sequence[Mapping[str, Any]]) -> float:
    """Microseconds of the shortest fill of a trace; inf without one."""
    return min((e["dur"] for e in events if e.get("cat") == "kernel" and FILL in e["name"]), default=np.inf)


def replayed_us(store: Store) -> float:
    """Microseconds of the shortest fill of a store, warm: a call of many in the replay of a CUDA graph."""
    rows = store.read("elementwise").to_pandas()
    fills = rows[(rows["fn"] == FUNCTIONS.index("fill")) & (rows["status"] == "ok") & (rows["cache"] == "warm")]
    return float(fills.loc[fills["timer"] == "cuda_graph", "latency_us"].min())


def main() -> None:
    measured = Path(opcast.__path__[0]) / "datasets" / "measured" / "h200"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=measured, help="has traces/*.json.gz and store/")
    parser.add_argument("--lead", type=float, default=20.0)
    parser.add_argument("--least", type=int, default=50)
    given = parser.parse_args()
    means: list[float] = []
    shortest = np.inf
    print(f"{'trace':32} {'ahead':>6} {'p5':>6} {'median':>6} {'mean':>6} {'p95':>6}")
    for path in sorted((given.folder / "traces").glob("*.json.gz")):
        events = events_of(path)
        gaps = gaps_us(events, given.lead)
        shortest = min(shortest, shortest_fill_us(events))
        name = path.name.removesuffix(".json.gz")
        if len(gaps) < given.least:
            print(f"{name:32} {len(gaps):6}  bound by its host")
            continue
        low, median, high = np.percentile(gaps, [5, 50, 95])
        means.append(float(gaps.mean()))
        print(f"{name:32} {len(gaps):6} {low:6.2f} {median:6.2f} {means[-1]:6.2f} {high:6.2f}")
    stream_us = float(np.median(means))
    graph_us = replayed_us(Store(given.folder / "store")) - shortest
    print(f"median of {len(means)} means {stream_us:.2f} us; a graph leaves {graph_us:.2f} us, which rows have in them")
    print(f"gap_us beyond a graph's: {stream_us - graph_us:.2f}")


if __name__ == "__main__":
    main()
