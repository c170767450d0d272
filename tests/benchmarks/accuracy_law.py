"""How far measurements lie from the latency law alone: the factor that holds nine in ten rows of each table of a store.

``python tests/benchmarks/accuracy_law.py STORE …``, each a store that ``opcast import`` filled. Beside a table's factor
stands how many of its rows lie within 2; the last line is the median over tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from opcast.datasets.devices import Device, DeviceError, load_device
from opcast.datasets.ops import KINDS
from opcast.datasets.store import Store
from opcast.models.table import MeasurementTable, tables

FEWEST, MOST = 500, 20_000  # rows of a table: fewer are left out, of more some are drawn
HELD = 0.9


def tables_of(store: Store) -> Iterator[MeasurementTable]:
    """The tables of a store with enough rows, on devices that opcast knows."""
    for kind in (each for each in store.kinds() if each in KINDS):
        for device_id in store.devices(kind):
            device = known(store, device_id)
            if device is not None:
                yield from (each for each in tables(kind, store.read(kind, device_id), device) if len(each) >= FEWEST)


def known(store: Store, device_id: str) -> Device | None:
    """The figures of a device, measured or of its data sheet."""
    try:
        return store.device(device_id) or load_device(device_id)
    except DeviceError:
        return None


def apart(table: MeasurementTable) -> np.ndarray:
    """|ln(measured / law)| of the rows, or of some of many."""
    if len(table) > MOST:
        table = table.take(np.sort(np.random.default_rng(0).permutation(len(table))[:MOST]))
    return np.asarray(np.abs(np.log(table.latency_us / table.frame().analytical_us)))


def main(paths: list[str]) -> int:
    """Print a line per table and the median."""
    factors = []
    for table in (each for path in paths for each in tables_of(Store(path))):
        found = apart(table)
        factors.append(float(np.exp(np.quantile(found, HELD))))
        name = f"{table.device.id} {table.kind} {table.backend}"
        print(f"{name}: {len(found)} rows, x{factors[-1]:.2f}, {(found <= np.log(2.0)).mean():.0%} within 2")
    print(f"median of {len(factors)} tables: x{np.median(factors):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
