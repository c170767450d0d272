"""How far a predictor's errors of one kind go together in a step, from rows that were left out.

    python tests/benchmarks/shared_errors.py STORE [--kinds NAME …] [--rows N]

Every table of at most N rows is learned as ``opcast train`` does. A step asks for several shapes at one workload: so
rows are put together that have the same number of rows, tokens or positions, format and state of the cache. Printed is
the mean product of the errors of two shapes among them over the mean square of errors: 1 where errors of a step's ops
are all alike, 0 where each has its own (the intraclass correlation; below 0 by chance). ``SHARED`` of
``simulator/timing/latencies.py`` is read off it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from opcast.datasets.devices import load_device
from opcast.datasets.store import Store
from opcast.datasets.vocabulary import KINDS
from opcast.models.candidates import Options
from opcast.models.learning import learn
from opcast.models.splits import codes, combined, recipe
from opcast.models.table import MeasurementTable, tables
from opcast.models.threads import one_thread

FEWEST_ROWS, FEWEST_SHAPES, FEWEST_PAIRS = 20, 3, 30
MOST_ERROR = 0.7  # ln: a row that is further off is as far
SIZES = ("numel", "size_bytes")  # all that such an op has: no step asks for several shapes of one size


def shared_part(table: MeasurementTable) -> float | None:
    """What errors of two shapes at one workload share of their variance; None for a table with too few of them."""
    ends = [name for name, _ in recipe(table.kind).ends if name in table.columns]
    if not ends or ends[0] in SIZES:
        return None
    with one_thread():
        learned = learn(table, table.frame(), Options().for_kind(table.kind))
    error = np.clip(learned.residuals[learned.chosen], -MOST_ERROR, MOST_ERROR)
    states = [each.astype(str) for each in (table.dtype, table.out_dtype, table.cache)]
    workload = combined([table.columns[ends[0]], *states])
    shape = codes(table.columns, [name for name in KINDS[table.kind].names if name != ends[0]])
    known, products, pairs = np.isfinite(error), 0.0, 0
    for one in np.unique(workload[known]):
        rows = known & (workload == one)
        means = np.array([error[rows & (shape == each)].mean() for each in np.unique(shape[rows])])
        if len(means) >= FEWEST_SHAPES:
            products += float(means.sum() ** 2 - (means**2).sum())
            pairs += len(means) * (len(means) - 1)
    if pairs < FEWEST_PAIRS:
        return None
    return products / pairs / float(np.mean(error[known] ** 2))


def tables_of(store: Store, wanted: list[str], most: int) -> Iterator[MeasurementTable]:
    """The tables of a store that are worth asking."""
    for kind in wanted or store.kinds():
        for device_id in store.devices(kind):
            device = store.device(device_id) or load_device(device_id)
            for table in tables(kind, store.read(kind, device_id), device):
                if FEWEST_ROWS <= len(table) <= most:
                    yield table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--rows", type=int, default=2500)
    given = parser.parse_args()
    parts = []
    for table in tables_of(Store(given.store), given.kinds, given.rows):
        part = shared_part(table)
        if part is not None:
            parts.append(part)
            print(f"{table.kind:22}{table.device.id:14}{table.backend:44}{len(table):6} rows {part:6.2f}", flush=True)
    if parts:
        low, middle, high = np.quantile(parts, (0.25, 0.5, 0.9))
        print(f"{len(parts)} tables: quarter {low:.2f}, median {middle:.2f}, nine in ten below {high:.2f}")


if __name__ == "__main__":
    main()
