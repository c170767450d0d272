"""How far collectives are off, by formula and learned, on groups that neither has seen.

    python tests/benchmarks/accuracy_network.py [--reference FOLDER] [--device ID …] [--json FILE]

Inside a node: NCCL tables of aiconfigurator in half precision. A group is one collective on one number of ranks of one
GPU; groups are halved like the squares of a chess board, and each half is predicted by constants (or predictors) of the
other half. ``formula`` is :mod:`opcast.simulator.network.nccl_times` with constants fitted so; ``learned`` are
predictors trained so; ``sizes`` are predictors that had seen the collective and the ranks, but not the size (grouped
split of ``opcast train``). Medians of the absolute error in percent, by decade of size; then what nothing was fitted
on: the constants that ship on another GPU, another machine, other numbers of ranks; and runs between nodes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import Device, load_device
from opcast.models.candidates import Options
from opcast.models.evaluation import evaluate
from opcast.models.learning import learn
from opcast.models.table import MeasurementTable, take
from opcast.simulator.engines.network import NetworkEngine
from opcast.simulator.network.calibrate import fit
from opcast.simulator.network.nccl import GroupShapes
from opcast.simulator.network.nccl_times import Tuning, collective_us
from opcast.simulator.network.tunings import tuning

REFERENCE = Path(os.environ.get("OPCAST_REFERENCE") or Path(__file__).resolve().parents[3] / "shared")
TABLES = {
    "h100_sxm": ("h100_sxm", "2.29.2"),
    "h200_sxm": ("h200_sxm", "2.29.2"),
    "a100_sxm_80gb": ("a100_sxm", "2.27.3"),
    "b200_sxm": ("b200_sxm", "2.29.2"),
    "b300_sxm": ("b300_sxm", "2.29.2"),
    "gb200": ("gb200", "2.29.2"),
    "gb300": ("gb300", "2.29.2"),
    "rtx_pro_6000_server": ("rtx_pro_6000_server", "2.29.2"),
    "l40s": ("l40s", "2.27.3"),
}
KIB, MIB = 2**10, 2**20
DECADES = {"<10K": 0, "10K": 10 * KIB, "100K": 100 * KIB, "1M": MIB, "10M": 10 * MIB, ">100M": 100 * MIB}
PARTS = {"<1M": (0, MIB), ">=1M": (MIB, 2**50), "1-16M": (MIB, 16 * MIB), ">=16M": (16 * MIB, 2**50)}
MODELS = ("formula", "learned", "sizes")
AIM = {"<1M": 15.0, ">=1M": 8.0}
# two nodes of Vidur's A100 move 6 GB/s a ring, 24 GB/s at most: what four 100 Gb/s Ethernet NICs do
ETHERNET = {"nics_per_node": 4, "nic_gbps": 12.5, "fabric": "roce", "nic_latency_us": 10.0}


def rows(folder: Path, device_id: str) -> Any:
    """Kind, ranks, bytes and us of a GPU's table."""
    import pandas as pd

    system, version = TABLES[device_id]
    table = pd.read_parquet(folder / "data" / "aiconfigurator" / system / f"{system}__nccl__nccl__{version}.parquet")
    table = table[table.nccl_dtype == "half"]
    table = table.assign(kind=table.op_name.replace({"alltoall": "all_to_all"}), ranks=table.num_gpus.astype(int))
    table = table.groupby(["kind", "ranks", "message_size"]).latency.median().reset_index()
    table = table.assign(size=table.message_size * 2.0, us=table.latency * 1e3)
    kinds, ranks = sorted(set(table.kind)), sorted(set(table.ranks))
    colour = [(kinds.index(k) + ranks.index(n)) % 2 for k, n in zip(table.kind, table.ranks, strict=True)]
    return table.assign(half=colour)[["kind", "ranks", "size", "us", "half"]]


def link(device: Device) -> str:
    return "nvlink" if device.link_gbps else "pcie"


def groups(device: Device, ranks: np.ndarray) -> GroupShapes:
    many = ranks.astype(np.float64)
    gbps = device.link_gbps or device.pcie_gbps
    return GroupShapes(many, many, gbps, 1.0, link(device), generation=device.architecture)


def packed(device: Device, table: Any) -> dict[str, tuple[np.ndarray, GroupShapes, np.ndarray]]:
    """Rows as :func:`fit` takes them."""
    return {
        kind: (each["size"].to_numpy(), groups(device, each.ranks.to_numpy()), each.us.to_numpy())
        for kind, each in table.groupby("kind")
    }


def by_formula(device: Device, table: Any, constants: Tuning) -> np.ndarray:
    """Predicted us of each row."""
    found = np.empty(len(table))
    for kind in set(table.kind):
        own = (table.kind == kind).to_numpy()
        each = table[own]
        found[own] = collective_us(kind, each["size"].to_numpy(), groups(device, each.ranks.to_numpy()), constants)
    return found


def start(device: Device) -> Tuning:
    """From where constants are fitted: the same for every GPU, but for what it does not have."""
    if link(device) == "pcie":
        return Tuning(beyond=0.5, crowd=0.5)
    return Tuning(nvls=0.0 if device.architecture == "ampere" else 0.5)


def learnable(device: Device, kind: str, each: Any) -> MeasurementTable:
    """Rows of one kind as predictors learn them."""
    many = each.ranks.to_numpy(dtype=np.int64)
    columns = {
        "size_bytes": each["size"].to_numpy(dtype=np.int64),
        "ranks": many,
        "ranks_per_node": np.maximum(many, 8),
        "link": np.full(len(many), 0 if link(device) == "nvlink" else 1),
    }
    texts = [np.full(len(many), text) for text in ("bf16", "bf16", "warm")]
    return MeasurementTable(kind, device, "nccl", columns, *texts, each.us.to_numpy())


def inside(folder: Path, device_id: str) -> Any:
    """The table of a GPU with ``formula``, ``learned`` and ``sizes``: predicted us of what each had not seen."""
    device, table = load_device(device_id), rows(folder, device_id)
    predicted = {name: np.full(len(table), np.nan) for name in MODELS}
    for half in (0, 1):
        unseen = (table.half == half).to_numpy()
        constants, _ = fit(packed(device, table[~unseen]), start(device))
        predicted["formula"][unseen] = by_formula(device, table[unseen], constants)
    for kind in sorted(set(table.kind)):
        own = np.flatnonzero(table.kind == kind)
        made, half = learnable(device, kind, table.iloc[own]), table.half.to_numpy()[own]
        ops, options = made.frame(), Options().for_kind(kind)
        for each in (0, 1):
            seen, unseen = np.flatnonzero(half != each), np.flatnonzero(half == each)
            if len(seen) and len(unseen):
                learned = learn(made.take(seen), take(ops, seen), options)
                predicted["learned"][own[unseen]] = learned.answer(take(ops, unseen))[0]
        crossed = evaluate(made, ops, options, "groups", learn(made, ops, options))[1]["groups"]
        predicted["sizes"][own[crossed.rows]] = made.latency_us[crossed.rows] / np.exp(crossed.residual)
    return table.assign(device=device_id, **predicted)


def medians(table: Any, name: str, bounds: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Median APE in percent of one model, by part of the sizes."""
    ape = 100.0 * np.abs(table[name] / table.us - 1.0)
    picked = {
        part: ape[(table["size"] >= low) & (table["size"] < high)].dropna() for part, (low, high) in bounds.items()
    }
    return {part: float(each.median()) if len(each) else float("nan") for part, each in picked.items()}


def decades() -> dict[str, tuple[float, float]]:
    lows = list(DECADES.values())
    return dict(zip(DECADES, zip(lows, [*lows[1:], 2**50], strict=True), strict=True))


def factor(table: Any, name: str) -> float:
    """Within which factor four of five answers lie."""
    ratio = (table[name] / table.us).dropna()
    return float(np.quantile(np.exp(np.abs(np.log(ratio))), 0.8))


def elsewhere(folder: Path) -> Iterator[dict[str, Any]]:
    """What ships on rows that no constant was fitted on: a half, another GPU, another machine and odd ranks."""
    for device_id in TABLES:
        device, table = load_device(device_id), rows(folder, device_id)
        other = device_id in ("b300_sxm", "gb300")
        unseen = table if other else table[table.half == 0]
        found = unseen.assign(formula=by_formula(device, unseen, tuning(device, link(device))))
        name = "constants of another GPU" if other else "the half that was not fitted"
        yield {"device": device_id, "rows": name, "n": len(found), **medians(found, "formula", PARTS)}
    for ranks in range(2, 9):
        found = vtrain(folder, ranks)
        yield {"device": "a100_sxm_80gb", "rows": f"vTrain, all_reduce, {ranks} ranks", "n": len(found)} | medians(
            found, "formula", PARTS
        )


def vtrain(folder: Path, ranks: int) -> Any:
    """vTrain's all-reduces on another machine of A100, 1 MiB to 1 GiB in steps of 1 MiB."""
    import pandas as pd

    table = pd.read_csv(folder / "data" / "vtrain" / f"all_reduce_a100_{ranks}gpus.csv")
    table = pd.DataFrame({"size": table["size(B)"].astype(float), "us": table["time(ns)"] / 1e3, "kind": "all_reduce"})
    table, device = table.assign(ranks=ranks), load_device("a100_sxm_80gb")
    return table.assign(formula=by_formula(device, table, tuning(device, "nvlink")))


def across(folder: Path) -> Iterator[dict[str, Any]]:
    """Measured runs between nodes: predicted over measured time by group. ``set`` says whose NICs' share is a constant.

    Shares of the NICs come from CoreWeave's and Oracle's tables; nothing comes from the others.
    """
    import pandas as pd

    table = pd.read_csv(folder / "truth" / "collectives.csv")
    table = table[(table.nodes >= 2) & table.latency_us.notna()]
    for (source, gpu, nodes, kind), each in table.groupby(["source", "gpu", "nodes", "collective"]):
        device = "h100_sxm" if gpu == "H100" else "mi300x"
        found = ratios(device, "dgx_h100", {"nodes": int(nodes)}, kind, each.payload_bytes, each.num_gpus, 8)
        chosen = source.startswith(("CoreWeave", "OCI"))
        name = f"{gpu}, {nodes} nodes: {source.split(' (')[0]}"
        yield {"group": name, "kind": kind, "set": chosen, **spread(found / each.latency_us, each.payload_bytes)}
    for device, cluster, name, change in (
        ("h100_sxm", "dgx_h100", "h100_dgx", {}),
        ("a100_sxm_80gb", "dgx_a100", "a100_dgx", ETHERNET),
    ):
        for kind in ("send_recv", "all_reduce"):
            runs = pd.read_csv(folder / "data" / "vidur" / "network" / name / f"{kind}.csv")
            runs = runs[runs.num_workers > runs.devices_per_node]
            for (ranks, near), each in runs.groupby(["num_workers", "devices_per_node"]):
                us = each[f"time_stats.{kind}.median"] * 1e3
                found = ratios(device, cluster, {"nodes": 2, **change}, kind, each["size"], each.num_workers, near)
                where = f"{device}, 2 nodes: Vidur, {ranks} ranks, {near} a node"
                yield {"group": where, "kind": kind, "set": False, **spread(found / us, each["size"])}


def ratios(device: str, cluster: str, change: dict[str, Any], kind: str, size: Any, ranks: Any, near: int) -> Any:
    """Predicted us by the constants that ship."""
    made = NetworkEngine(load_device(device), dataclasses.replace(load_cluster(cluster), **change))
    columns = {
        "size_bytes": np.asarray(size, dtype=np.float64),
        "ranks": np.asarray(ranks, dtype=np.int64),
        "ranks_per_node": np.full(len(size), near),
    }
    return collective_us(kind, columns["size_bytes"], made.groups(columns), made.tuning)


def spread(ratio: Any, size: Any) -> dict[str, Any]:
    """Median ratio and the percentiles of the factor it is off by, below 1 MiB and from there on."""
    out: dict[str, Any] = {}
    for name, own in (("<1M", size < MIB), (">=1M", size >= MIB)):
        off = np.exp(np.abs(np.log(ratio[own])))
        out |= {name: float(np.median(ratio[own])) if own.any() else None}
        out |= (
            {f"{name} factors": sorted(float(each) for each in np.quantile(off, np.linspace(0, 1, 101)))}
            if own.any()
            else {}
        )
    return out


def covered(found: list[dict[str, Any]], part: str, within: float, every: bool) -> tuple[float, int]:
    """Share of rows within a factor, every group alike, and how many groups; ``every``: those behind constants too."""
    picked = [each[f"{part} factors"] for each in found if f"{part} factors" in each and (every or not each["set"])]
    return float(np.mean([np.mean(np.array(each) <= within) for each in picked])), len(picked)


def tell_inside(table: Any) -> None:
    device = table.device.iloc[0]
    print(f"\n{device}: {', '.join(MODELS)}, median error in percent")
    print(f"  {'':20}" + "".join(f"{name:>18}" for name in DECADES))
    for (kind, ranks), each in table.groupby(["kind", "ranks"]):
        shown = [medians(each, name, decades()) for name in MODELS]
        cells = "".join(f"{'/'.join(figure(each[name]) for each in shown):>18}" for name in DECADES)
        print(f"  {kind:15} {ranks:4}" + cells)
    for name in MODELS:
        made = medians(table, name, PARTS)
        aim = all(made[part] <= goal for part, goal in AIM.items())
        told = "  ".join(f"{part} {value:.1f}" for part, value in made.items())
        print(f"  {name:8} {told}  within {factor(table, name):.2f}  {'aim reached' if aim else 'aim missed'}")


def figure(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.1f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, default=REFERENCE)
    parser.add_argument("--device", nargs="*", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if not (options.reference / "data").is_dir():
        print(f"{options.reference} has no data/", file=sys.stderr)
        return 2
    found: dict[str, Any] = {"inside": []}
    for device in options.device:
        table = inside(options.reference, device)
        tell_inside(table)
        for (kind, ranks), each in table.groupby(["kind", "ranks"]):
            shown = {name: medians(each, name, decades()) for name in MODELS}
            found["inside"].append({"device": device, "kind": kind, "ranks": int(ranks), **shown})
    print("\nconstants that ship, where they were not fitted")
    found["elsewhere"] = list(elsewhere(options.reference))
    for row in found["elsewhere"]:
        told = "  ".join(f"{part} {figure(row[part])}" for part in PARTS)
        print(f"  {row['device']:20} {row['rows']:32} {row['n']:5}  {told}")
    print("\nbetween nodes: median of predicted over measured")
    found["across"] = list(across(options.reference))
    for row in found["across"]:
        told = "  ".join(f"{part} {row[part]:.2f}" for part in ("<1M", ">=1M") if row[part] is not None)
        print(f"  {row['group']:72} {row['kind']:12} {told}")
    for part in ("<1M", ">=1M"):
        for within in (1.25, 1.6, 2.3):
            every, alone = (covered(found["across"], part, within, each) for each in (True, False))
            print(
                f"  {part} within {within}: {100 * every[0]:.0f} % of {every[1]} groups, "
                f"{100 * alone[0]:.0f} % of the {alone[1]} that no constant comes from"
            )
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
