"""How fast the network simulator answers, by CPU time; beside ASTRA-sim where its times are at hand.

    python tests/benchmarks/network.py [--astra FILE] [--json]

One 1 GiB ring all-reduce and one all-to-all over 1,024 GPUs on a three-level fabric, 10,000 random flows on a fat tree
of 1,024 hosts with its growth from 1,250 flows on, 10,000 collectives by formula, 1,000 positions of a fault. FILE is a
table of ASTRA-sim runs (``collective, topology, npus, algorithm_per_dim, size_bytes, wall_s``; default: the reference
measurements'): the same rings are run here and the ratio of times is printed. Exit code 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.simulator.engines.network import NetworkEngine
from opcast.simulator.network.build import build_fabric
from opcast.simulator.network.fabric import Fabric, Transfer
from opcast.simulator.network.faults import Fault, fault_sites
from opcast.simulator.network.fidelity import simulate
from opcast.simulator.network.shapes import Dimension, Port, Servers, fat_tree, product
from opcast.simulator.network.study import run_trials, with_faults

GIB = 2.0**30
EVERYONE = tuple(range(1024))
SERVERS = Servers(128, 8, Port(450.0, 0.5, "nvlink"), Port(50.0, 1.0))
REFERENCE = Path(os.environ.get("OPCAST_REFERENCE") or Path(__file__).resolve().parents[3] / "shared")


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of all threads."""
    began = time.process_time()
    work()
    return time.process_time() - began


def random_flows(flows: int) -> list[Transfer]:
    rng = np.random.default_rng(0)
    source = rng.integers(0, 1024, flows)
    target = (source + rng.integers(1, 1024, flows)) % 1024
    sizes = rng.uniform(1e6, 1e8, flows)
    return [
        Transfer("send", pair, size, "path")
        for *pair, size in zip(source.tolist(), target.tolist(), sizes, strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--astra", type=Path, default=REFERENCE / "truth" / "astra_collectives.csv")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    three = fat_tree(SERVERS, 32)
    simulate(Fabric(product([Dimension("switch", 1024, 50.0)]), "ecmp"), random_flows(1250))  # compile once
    figures: list[tuple[str, float, float]] = []

    def timed(what: str, bound: float, work: Callable[[], object]) -> None:
        figures.append((what, cpu_s(work), bound))

    ring = [Transfer("all_reduce", EVERYONE, GIB, "ring")]
    timed("1 GiB ring all-reduce, 1,024 GPUs, three levels", 1.0, lambda: simulate(Fabric(three, per_node=8), ring))
    exchange = [Transfer("all_to_all", EVERYONE, GIB, "direct")]
    timed("all-to-all, 1,024 GPUs, adaptive", 10.0, lambda: simulate(Fabric(three, "adaptive", 8), exchange))
    timed("all-to-all, 1,024 GPUs, ecmp", 10.0, lambda: simulate(Fabric(three, "ecmp", 8), exchange))
    tree = fat_tree(SERVERS, 64)
    flows = {n: random_flows(n) for n in (1250, 2500, 5000, 10_000)}
    growth = [cpu_s(lambda n=n: simulate(Fabric(tree, "ecmp", 8), flows[n])) for n in flows]  # type: ignore[misc]
    figures.append(("10,000 random flows, 1,024 hosts", growth[-1], 5.0))
    cluster = dataclasses.replace(load_cluster("dgx_h100"), nodes=128)
    engine = NetworkEngine(load_device("h100_sxm"), cluster)
    columns = {
        "size_bytes": np.random.default_rng(0).integers(1, 2**30, 10_000),
        "ranks": np.full(10_000, 1024),
        "ranks_per_node": np.full(10_000, 8),
        "link": np.full(10_000, 2),
    }
    timed("10,000 collectives by formula", 0.1, lambda: engine.answer("all_reduce", columns, "bf16", "bf16", "warm"))
    small = build_fabric(dataclasses.replace(cluster, nodes=8), load_device("h100_sxm"))
    step = [Transfer("all_reduce", tuple(range(64)), GIB, "ring")]
    faults = [[Fault(site, bandwidth_factor=0.5)] for site in fault_sites(small.topology)]
    timed(
        "a slow link at each cable of 64 GPUs",
        5.0,
        lambda: run_trials(faults, lambda slow: simulate(with_faults(small, slow), step).total_us),
    )
    formula = [against_flows(over, count) for over in (1.0, 4.0) for count in (4, 16, 64)]
    astra = against_astra(options.astra) if options.astra.is_file() else []
    report(figures, growth, formula, astra, options.json)
    return 0 if all(seconds <= bound for _, seconds, bound in figures) else 1


def against_flows(oversubscription: float, count: int) -> tuple[str, float, float, float]:
    """Collectives and sends at once over 64 GPUs, by formula: how far off flows, median and p90; us for each."""
    shape = {"shape": "fat_tree", "radix": 16, "oversubscription": oversubscription}
    cluster = dataclasses.replace(load_cluster("dgx_h100"), nodes=8, topology=shape)
    made = build_fabric(cluster, load_device("h100_sxm"))
    off, seconds, kinds = [], 0.0, ["all_reduce", "all_gather", "all_to_all", "send"]
    for seed in range(8):
        rng = np.random.default_rng(seed)
        drawn = []
        for kind in rng.choice(kinds, count).tolist():
            ranks = rng.choice(64, 2 if kind == "send" else int(rng.choice([4, 8, 16])), replace=False)
            drawn.append(Transfer(kind, tuple(ranks.tolist()), float(rng.uniform(1e6, 1e8))))
        flows = simulate(made, drawn).end_us
        off.append(np.abs(simulate(made, drawn, "analytical").end_us / flows - 1.0))
        seconds += cpu_s(lambda: simulate(made, drawn, "analytical"))  # noqa: B023
    every = np.concatenate(off)
    what = f"{count} transfers at once, fat tree {oversubscription:g}:1, by formula"
    return what, float(np.median(every)), float(np.quantile(every, 0.9)), seconds / 8 / count * 1e6


def against_astra(file: Path) -> list[tuple[str, float, float]]:
    """Ring all-reduces of a table: what, seconds there, seconds here."""
    import pandas as pd

    rows = pd.read_csv(file)
    rows = rows[(rows.status == "ok") & (rows.backend == "congestion_aware") & (rows.algorithm_per_dim == "ring")]
    rows = rows[(rows.collective == "all_reduce") & (rows.topology == "Ring") & (rows.pattern == "single_collective")]
    rows = rows[rows.npus >= 64].sort_values(["npus", "size_bytes"]).drop_duplicates(["npus", "size_bytes"])
    found = []
    for row in rows.itertuples():
        made = Fabric(product([Dimension("ring", int(row.npus), float(row.bandwidth_GBps_per_dim), 0.5)]), "shortest")
        ring = [Transfer("all_reduce", tuple(range(int(row.npus))), float(row.size_bytes), "ring")]
        seconds = cpu_s(lambda: simulate(made, ring))  # noqa: B023
        found.append((f"ring of {row.npus:,}, {row.size_bytes / 2**20:,.0f} MiB", float(row.wall_s), seconds))
    return found


def report(
    figures: list[tuple[str, float, float]],
    growth: list[float],
    formula: list[tuple[str, float, float, float]],
    astra: list[tuple[str, float, float]],
    as_json: bool,
) -> None:
    if as_json:
        rows = [{"what": what, "cpu_s": seconds, "bound_s": bound} for what, seconds, bound in figures]
        peers = [{"what": what, "astra_s": theirs, "opcast_s": ours} for what, theirs, ours in astra]
        print(json.dumps({"figures": rows, "flows_cpu_s": growth, "formula": formula, "astra": peers}))
        return
    for what, seconds, bound in figures:
        print(f"{what:52} {seconds:8.3f} s of {bound:g}" + ("" if seconds <= bound else "   MISSED"))
    print("1,250, 2,500, 5,000, 10,000 flows: " + ", ".join(f"{each:.2f} s" for each in growth))
    for what, median, p90, us in formula:
        print(f"{what:52} {median:5.1%} off flows (median), {p90:.1%} (p90), {us:.0f} us each")
    for what, theirs, ours in astra:
        print(f"{what:52} ASTRA-sim {theirs:7.3f} s, opcast {ours:7.3f} s: {theirs / max(ours, 1e-6):.0f} times faster")


if __name__ == "__main__":
    sys.exit(main())
