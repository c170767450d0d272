"""How many ops a second `opcast predict shapes=FILE output=FILE` answers, beside the predictor's own rate.

    python tests/benchmarks/shapes.py [--rows 1000000] [--suffix .csv]

Writes a table of random products, answers it in a process of its own (start included) and asks the predictor for the
same columns in this one. Prints rates by the clock on the wall and by CPU time, and the largest memory of the process.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq

from opcast.datasets.devices import load_device
from opcast.datasets.vocabulary import OpColumns
from opcast.jobs.resolve import SHIPPED_PREDICTORS
from opcast.simulator.engines import build_engine
from opcast.simulator.predict.columns import predict_columns

DEVICE = "h100_sxm"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--suffix", default=".csv", choices=(".csv", ".parquet"))
    chosen = parser.parse_args()
    random = np.random.default_rng(0)
    columns = {name: random.integers(1, 16_384, chosen.rows) for name in ("m", "n", "k")}
    with tempfile.TemporaryDirectory() as folder:
        shapes, output = Path(folder, f"shapes{chosen.suffix}"), Path(folder, f"answers{chosen.suffix}")
        write = arrow_csv.write_csv if chosen.suffix == ".csv" else pq.write_table
        write(pa.table(columns), shapes)
        command = [sys.executable, "-m", "opcast.jobs.cli", "predict", "op=gemm", f"device={DEVICE}"]
        began = time.perf_counter()
        subprocess.run([*command, f"shapes={shapes}", f"output={output}"], check=True)
        wall = time.perf_counter() - began
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"predict shapes=: {chosen.rows / wall:,.0f} rows/s, {wall:.2f} s, {used.ru_maxrss / 2**10:,.0f} MiB at most")
    print(f"  by CPU time:   {chosen.rows / (used.ru_utime + used.ru_stime):,.0f} rows/s")
    device = load_device(DEVICE)
    engine = build_engine(device, [], [SHIPPED_PREDICTORS])
    dims = {"batch": np.ones(chosen.rows, np.int64), **columns, "layout": np.ones(chosen.rows, np.int64)}
    predict_columns(OpColumns("gemm", dims, "bf16", "bf16"), device, engine)  # loads and compiles
    began, cpu = time.perf_counter(), time.process_time()
    predict_columns(OpColumns("gemm", dims, "bf16", "bf16"), device, engine)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    print(f"predictor alone: {chosen.rows / wall:,.0f} rows/s; by CPU time {chosen.rows / cpu:,.0f} rows/s")


if __name__ == "__main__":
    main()
