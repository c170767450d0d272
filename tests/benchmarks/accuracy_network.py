"""How far collectives by formula are off: fitted on half of NCCL's groups, scored on the other half.

    python tests/benchmarks/accuracy_network.py [--reference FOLDER] [--json]

A group is one collective on one number of ranks of one GPU, in half precision, from aiconfigurator's NCCL tables;
every second one is fitted, the others are scored by size decade. ``shipped`` scores the constants that come along,
``transfer`` those of another GPU (B300 by B200's). Runs between nodes come from published nccl-tests tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import Device, load_device
from opcast.simulator.engines.network import NetworkEngine
from opcast.simulator.network.calibrate import fit
from opcast.simulator.network.law import LL_GBPS, Groups, Tuning, collective_us
from opcast.simulator.network.tunings import tuning

REFERENCE = Path(os.environ.get("OPCAST_REFERENCE") or Path(__file__).resolve().parents[3] / "shared")
TABLES = {
    "h100_sxm": ("h100_sxm", "2.29.2"),
    "h200_sxm": ("h200_sxm", "2.29.2"),
    "a100_sxm_80gb": ("a100_sxm", "2.27.3"),
    "b200_sxm": ("b200_sxm", "2.29.2"),
    "b300_sxm": ("b300_sxm", "2.29.2"),
    "gb200": ("gb200", "2.29.2"),
}
START = Tuning(base=1.2, hop=1.5, bulk_us=8.0, ring=0.78, copy=2.0, nvls=0.6, exchange=0.65, peer_us=0.2)
DECADES = ((0, 2**20), (2**20, 2**24), (2**24, 2**31))


def rows(folder: Path, device_id: str) -> Any:
    """Kind, ranks, bytes and us of a GPU's table."""
    import pandas as pd

    system, version = TABLES[device_id]
    table = pd.read_parquet(folder / "data" / "aiconfigurator" / system / f"{system}__nccl__nccl__{version}.parquet")
    table = table[table.nccl_dtype == "half"]
    table = table.assign(kind=table.op_name.replace({"alltoall": "all_to_all"}), ranks=table.num_gpus.astype(int))
    table = table.groupby(["kind", "ranks", "message_size"]).latency.median().reset_index()
    return table.assign(size=table.message_size * 2.0, us=table.latency * 1e3)


def packed(device: Device, table: Any) -> dict[str, tuple[np.ndarray, Groups, np.ndarray]]:
    """Rows as :func:`fit` takes them."""
    most = LL_GBPS.get(device.architecture, LL_GBPS["hopper"])
    made = {}
    for kind, each in table.groupby("kind"):
        ranks = each.ranks.to_numpy(dtype=np.float64)
        groups = Groups(ranks, ranks, device.link_gbps, 1.0, low_latency_gbps=most)
        made[kind] = (each["size"].to_numpy(), groups, each.us.to_numpy())
    return made


def errors(device: Device, table: Any, constants: Tuning) -> dict[str, float]:
    """Median APE in percent by size, and the 80th percentile of the factor."""
    found, sizes = [], []
    for kind, (size, groups, us) in packed(device, table).items():
        found.append(collective_us(kind, size, groups, constants) / us)
        sizes.append(size)
    ratio, size = np.concatenate(found), np.concatenate(sizes)
    ape = 100.0 * np.abs(ratio - 1.0)
    out = {
        f"{low >> 10} KiB to {high >> 10} KiB": float(np.median(ape[(size >= low) & (size < high)]))
        for low, high in DECADES
    }
    return out | {"factor_p80": float(np.quantile(np.exp(np.abs(np.log(ratio))), 0.8)), "n": float(len(ratio))}


def inside(folder: Path) -> list[dict[str, Any]]:
    """Grouped split of every GPU."""
    out = []
    for device_id in TABLES:
        device, table = load_device(device_id), rows(folder, device_id)
        order = sorted(set(zip(table.kind, table.ranks, strict=True)))
        train = np.array([pair in order[1::2] for pair in zip(table.kind, table.ranks, strict=True)])
        start = START if device.architecture != "ampere" else dataclasses.replace(START, nvls=0.0)
        fitted, _ = fit(packed(device, table[train]), start)
        shipped = "transfer" if device_id == "b300_sxm" else "shipped"
        for name, constants in (("fitted", fitted), (shipped, tuning(device, "nvlink"))):
            out.append({"device": device_id, "constants": name, **errors(device, table[~train], constants)})
    return out


def across(folder: Path) -> list[dict[str, Any]]:
    """Published runs over nodes with eight 400 Gb/s NICs: predicted over measured time."""
    import pandas as pd

    table = pd.read_csv(folder / "truth" / "collectives.csv")
    table = table[(table.nodes >= 2) & table.latency_us.notna() & (table.gpu == "H100")]
    out = []
    for (source, nodes), each in table.groupby(["source", "nodes"]):
        cluster = dataclasses.replace(load_cluster("dgx_h100"), nodes=int(nodes))
        columns = {
            "size_bytes": each.payload_bytes.to_numpy(),
            "ranks": each.num_gpus.to_numpy(dtype=np.int64),
            "ranks_per_node": np.full(len(each), 8),
        }
        found = NetworkEngine(load_device("h100_sxm"), cluster).answer("all_reduce", columns, "bf16", "bf16", "warm")
        ratio = found.latency_us / each.latency_us.to_numpy()
        out.append(
            {
                "source": source.split(" (")[0],
                "nodes": int(nodes),
                "n": len(each),
                "median_ratio": float(np.median(ratio)),
            }
        )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, default=REFERENCE)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not (options.reference / "data").is_dir():
        print(f"{options.reference} has no data/", file=sys.stderr)
        return 2
    result = {"inside": inside(options.reference), "across": across(options.reference)}
    if options.json:
        print(json.dumps(result))
        return 0
    for part in result.values():
        for row in part:
            print(
                "  ".join(
                    f"{name}={value:.3g}" if isinstance(value, float) else f"{value}" for name, value in row.items()
                )
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
