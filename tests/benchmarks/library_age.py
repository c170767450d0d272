"""How much longer products took under a library of 2023 than in the tables of 2025.

    python tests/benchmarks/library_age.py FOLDER

FOLDER is Vidur's ``compute`` folder (https://github.com/microsoft/vidur, data/profiling/compute): layers timed with the
cuBLAS of torch's wheels of CUDA 12.1. Their fp16 products of 1,024 to 4,096 rows over the answers of the predictors
that ship, by how long they take: short ones know no power limit, long ones do. The figure of
``simulator/timing/older_kernels.py`` is the median of products of 50 to 300 us.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from opcast.datasets.devices import load_device
from opcast.datasets.ops import Op, make_op
from opcast.simulator.engines import ask, build_engine

ROOT = Path(__file__).resolve().parents[2]
CHIPS = {"h100": "h100_sxm", "a100": "a100_sxm_80gb"}
EDGES_US = (0.0, 50.0, 300.0, 1000.0, np.inf)
ROWS, EACH = (1024, 4096), 256


def products(row: dict[str, str]) -> Iterator[tuple[Op, float]]:
    """A layer's products under tensor parallelism, and their microseconds."""
    named = ("n_embd", "n_expanded_embd", "n_head", "n_kv_head", "num_tensor_parallel_workers")
    hidden, inner, heads, kv_heads, ranks = (int(row[name]) for name in named)
    width = hidden // heads
    shapes = {
        "attn_pre_proj": ((heads + 2 * max(kv_heads, ranks)) * width // ranks, hidden),
        "attn_post_proj": (hidden, hidden // ranks),
        "mlp_up_proj": (2 * inner // ranks, hidden),
        "mlp_down_proj": (hidden, inner // ranks),
    }
    for name, (n, k) in shapes.items():
        if timed := row[f"time_stats.{name}.median"]:
            yield make_op("gemm", "fp16", m=int(float(row["num_tokens"])), n=n, k=k, layout="nt"), 1e3 * float(timed)


def main() -> None:
    """Read, ask, print a line a length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    print("| chip | us | products | measured / predicted: median (a quarter, three quarters) |\n|---|---|---|---|")
    for name, device_id in CHIPS.items():
        device = load_device(device_id)
        engine = build_engine(device, [ROOT / "datasets" / "measured"], [ROOT / "models" / "shipped"])
        found: list[tuple[Op, float]] = []
        for file in sorted(folder.glob(f"{name}/*/mlp.csv")):
            with file.open() as text:
                rows = [row for row in csv.DictReader(text) if float(row["num_tokens"]) % EACH == 0]
            found += [each for row in rows if ROWS[0] <= float(row["num_tokens"]) <= ROWS[1] for each in products(row)]
        measured = np.array([us for _, us in found])
        ratio = measured / ask(engine, [op for op, _ in found]).latency_us
        for low, high in pairwise(EDGES_US):
            own = ratio[(measured >= low) & (measured < high)]
            quarter, median, most = np.quantile(own, (0.25, 0.5, 0.75))
            print(f"| {name} | {low:.0f} to {high:.0f} | {len(own)} | {median:.2f} ({quarter:.2f}, {most:.2f}) |")


if __name__ == "__main__":
    main()
