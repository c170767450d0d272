"""What a few rows of a new GPU are worth: each measured device in turn is the new one, all others are known.

    python tests/benchmarks/new_gpu.py STORE [--kind KIND …] [--device ID …]

STORE holds measurements of several devices (``opcast import source=aiconfigurator store=STORE``). For each device and
kind one table (the default backend's) is split: whole shapes of one fold of four are scored, rows of the others are
given: 0, 50, 200, 1,000 or all. *adapted* is a model of the other devices corrected by them (``models/transfer.py``),
*alone* the same procedure on those rows by themselves. Printed are median errors in percent, the share of scored rows
inside the 90 % interval, and the error at 200 over that of all rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from opcast.datasets.backends import framework
from opcast.datasets.devices import load_device
from opcast.datasets.store import Store
from opcast.models.candidates import Options
from opcast.models.splits import split
from opcast.models.table import MeasurementTable, TrainingError, default_backend, tables
from opcast.models.training import fit
from opcast.models.transfer import adapt, donors_of, draw, pool

POINTS = (50, 200, 1000)
SCORED = 3000
MOST = 20_000  # rows that stand for all


def score(made: Any, asked: MeasurementTable) -> tuple[float, float]:
    """Median error in percent and coverage."""
    found = made.predict_frame(asked.frame())
    residual = np.abs(np.log(asked.latency_us / found.latency_us))
    inside = residual <= np.log(found.high_us / found.latency_us) + 1e-12
    return float(100 * np.median(np.abs(found.latency_us / asked.latency_us - 1))), float(inside.mean())


def table_of(store: Store, kind: str, device_id: str) -> MeasurementTable | None:
    own = tables(kind, store.read(kind, device_id), load_device(device_id))
    chosen = default_backend(own)
    return next((each for each in own if each.backend == chosen), None)


def rows(store: Store, kind: str, device_id: str) -> Iterator[tuple[str, float, float]]:
    """(label, error, coverage) of each way."""
    table = table_of(store, kind, device_id)
    if table is None or len(table) < 300:
        return
    donors = donors_of(store, kind, table.backend, np.unique(table.dtype), device_id)
    if len({each.device.id for each in donors}) < 2:
        return
    options = Options().for_kind(kind)
    fold = split(kind, table.columns, 4, 0).fold
    asked = table.take(_some(np.flatnonzero(fold == 0), SCORED))
    given = table.take(_some(np.flatnonzero(fold != 0), MOST))
    base = pool(donors, options)
    yield "0", *score(base, asked)
    for count in POINTS:
        if count > len(given):
            continue
        seen = given.take(draw(given, count, "random"))
        yield f"{count}", *score(adapt(base, seen, options), asked)
        yield f"{count} alone", *score(fit(seen, options).predictor, asked)
    yield "all", *score(fit(given, options).predictor, asked)


def _some(positions: np.ndarray, most: int) -> np.ndarray:
    return np.sort(np.random.default_rng(0).permutation(positions)[:most])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--kind", nargs="*", default=["gemm", "attention_prefill", "attention_decode", "all_reduce"])
    parser.add_argument("--device", nargs="*")
    asked = parser.parse_args()
    store = Store(asked.store)
    labels = ["0", *(f"{n}{way}" for n in POINTS for way in ("", " alone")), "all"]
    print(
        "| kind | device | framework | "
        + " | ".join(labels)
        + " | 200 over all |\n"
        + "| --- " * (len(labels) + 4)
        + "|"
    )
    for kind in asked.kind:
        for device_id in asked.device or store.devices(kind):
            try:
                found = {label: (error, held) for label, error, held in rows(store, kind, device_id)}
            except TrainingError as error:
                print(f"{kind} {device_id}: {error}", flush=True)
                continue
            if not found:
                continue
            cells = [f"{found[name][0]:.1f} ({found[name][1]:.0%})" if name in found else "" for name in labels]
            ratio = f"{found['200'][0] / found['all'][0]:.2f}" if "200" in found else ""
            table = table_of(store, kind, device_id)
            assert table is not None
            print(
                f"| {kind} | {device_id} | {framework(table.backend)} | " + " | ".join(cells) + f" | {ratio} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
