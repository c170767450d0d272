"""Which chips, and how well: what ``opcast predict`` answers for rows of others' tables, by chip, kind and format.

    python tests/benchmarks/chips.py STORE [--learn] [--device ID...] [--kind KIND...] [--state warm|cold]

STORE is what ``opcast import`` made of tables. Without ``--learn`` the predictors that ship answer, but for those that
learned from these very tables (their source is that of the rows): so a chip is answered as one that nobody measured.
With it, four fifths of the shapes (whole ones, as ``opcast train`` holds them out) are learned first, as ``opcast
train`` does, and the last fifth is asked. Printed are rows, median and p90 error and bias in percent, which share lies
inside the interval, the half-width of that in percent, and who answered most.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from opcast.datasets.columns import values
from opcast.datasets.devices import DeviceError, load_device
from opcast.datasets.ops import KINDS
from opcast.datasets.store import Store
from opcast.models.predictor import read_card
from opcast.models.registry import Registry
from opcast.models.splits import MIN_GROUPS, codes, recipe
from opcast.models.table import MeasurementTable, tables
from opcast.models.training import train_and_register
from opcast.simulator.engines import build_engine

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "shipped"
FOLDS = 5
MOST = 2000  # rows of a chip, kind, backend and format that are asked


class Score(NamedTuple):
    """Errors in percent of one chip, kind and format."""

    device: str
    kind: str
    dtype: str
    rows: int
    median: float
    p90: float
    bias: float
    inside: float
    width: float
    who: str

    def __str__(self) -> str:
        figures = f"{self.median:.1f} | {self.p90:.1f} | {self.bias:+.0f} | {self.inside:.0%} | {self.width:.0f}"
        return f"| {self.device} | {self.kind} | {self.dtype} | {self.rows:,} | {figures} | {self.who} |"


def others_predictors(folder: Path, sources: set[str]) -> Path:
    """The shipped predictors that did not learn from rows of these sources, below a folder."""
    for entry in Registry(SHIPPED).list():
        learned = read_card(entry.path).get("sources", {}).get("source", ())
        if not sources.intersection(learned):
            place = folder / entry.path.parent.relative_to(SHIPPED)
            place.mkdir(parents=True, exist_ok=True)
            shutil.copytree(entry.path, place / entry.version)
            shutil.copy(entry.path.parent / "current", place / "current")
    shutil.copy(SHIPPED / "default", folder / "default")
    return folder


def held_out(kind: str, rows: pa.Table) -> np.ndarray:
    """Which rows [n] are of the shapes that are asked about: a fifth of the shapes (of an expert layer, an (n, k))."""
    columns = {name: np.asarray(rows.column(name).to_numpy(zero_copy_only=False)) for name in KINDS[kind].names}
    groupings = (codes(columns, names) for names in (*recipe(kind).groups, KINDS[kind].names))
    shapes = next(each for each in groupings if each.max() + 1 >= MIN_GROUPS or len(np.unique(each)) == len(rows))
    chosen = np.random.default_rng(0).permutation(int(shapes.max()) + 1) % FOLDS == 0
    return np.asarray(chosen[shapes])


def asked(table: MeasurementTable, registries: Sequence[Path], state: str | None) -> Iterator[Score]:
    """Scores of one table by format."""
    engine = build_engine(table.device, [], registries)
    for dtype in np.unique(table.dtype):
        rows = np.flatnonzero((table.dtype == dtype) & ((table.cache == state) if state else True))
        rows = np.sort(np.random.default_rng(0).permutation(rows)[:MOST])
        errors, widths, who = [], [], Counter[str]()
        for out_dtype, cache in {(str(table.out_dtype[i]), str(table.cache[i])) for i in rows}:
            own = rows[(table.out_dtype[rows] == out_dtype) & (table.cache[rows] == cache)]
            columns = {name: each[own] for name, each in table.columns.items()}
            found = engine.answer(table.kind, columns, str(dtype), out_dtype, cache)
            errors.append(np.log(found.latency_us / table.latency_us[own]))
            widths.append(np.log(np.stack([found.latency_us / found.low_us, found.high_us / found.latency_us])))
            who.update(f"{name} {by}" for name, by in zip(found.engine, found.predictor, strict=True))
        if len(rows):
            yield scored(table, str(dtype), np.concatenate(errors), np.concatenate(widths, axis=1), who)


def scored(table: MeasurementTable, dtype: str, error: np.ndarray, width: np.ndarray, who: Counter[str]) -> Score:
    """The figures of ln(answered / measured) [n] with half-widths below and above [2, n]."""
    share = 100.0 * np.abs(np.expm1(error))
    inside = float(np.mean((error <= width[0]) & (-error <= width[1])))
    figures = (float(np.median(share)), float(np.quantile(share, 0.9)), 100.0 * float(np.expm1(np.median(error))))
    name = who.most_common(1)[0][0]
    return Score(
        table.device.id, table.kind, dtype, len(error), *figures, inside,
        100.0 * float(np.expm1(np.median(width[1]))), name[:60],
    )  # fmt: skip


def scores(
    store: Store, learn: bool, devices: Sequence[str], kinds: Sequence[str], state: str | None
) -> Iterator[Score]:
    """Every chip, kind and format of a store."""
    with tempfile.TemporaryDirectory() as folder:
        rows_of = {
            (kind, device): store.read(kind, device)
            for kind in store.kinds()
            for device in store.devices(kind)
            if (not devices or device in devices) and (not kinds or kind in kinds)
        }
        sources = {str(name) for rows in rows_of.values() for name in set(values(rows["source"]))}
        registries = [others_predictors(Path(folder) / "others", sources)]
        if learn:
            part, mine = Store(Path(folder) / "part"), Registry(Path(folder) / "mine")
            for (kind, device), rows in rows_of.items():
                learned = rows.filter(pa.array(~held_out(kind, rows)))
                run = pa.array([f"part-{device}"] * len(learned), learned.schema.field("run_id").type)
                place = learned.schema.get_field_index("run_id")
                part.write((kind, learned.set_column(place, learned.schema.field(place), run)), f"part-{device}")
            for device in sorted({device for _, device in rows_of}):
                train_and_register(part, load_device(device), mine, [k for k, d in rows_of if d == device])
            registries = [mine.root, *registries]
        for (kind, device), rows in rows_of.items():
            try:
                target = load_device(device)
            except DeviceError:
                continue
            wanted = rows.filter(pa.array(held_out(kind, rows))) if learn else rows
            for table in tables(kind, wanted, target, eager=True):
                yield from asked(table, registries, state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--device", nargs="*", default=())
    parser.add_argument("--kind", nargs="*", default=())
    parser.add_argument("--state", choices=("warm", "cold"))
    chosen = parser.parse_args()
    print("| chip | kind | format | rows | median % | p90 % | bias % | inside | ± % | who |\n" + "| --- " * 10 + "|")
    for each in scores(Store(chosen.store), chosen.learn, chosen.device, chosen.kind, chosen.state):
        print(each, flush=True)


if __name__ == "__main__":
    main()
