"""The ledger: what each release says of each table, kept before new results are read, and scored later.

    python tests/evidence/ledger.py record RELEASE TABLE.csv... [--most N]
    python tests/evidence/ledger.py score TABLE.csv...

``record`` simulates the rows of the tables and writes ``tests/evidence/ledger/RELEASE.parquet``: predictions and
intervals of each row and quantity, and why a row has none. No measured value is in it; it is committed, so that
nobody can move it once results are read. ``score`` reads the tables as they are now and prints a line for each
release, table and quantity. It raises an alarm, and ends with 1, where the newest release is worse than the one before
in the median or the 90th percentile by :data:`WORSE` points, or refuses a row that the one before answered.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from opcast.datasets.truth import Row, read_table
from opcast.simulator.question.sources import Sources
from opcast.simulator.validation.answers import simulated
from opcast.simulator.validation.cases import ValidationSettings
from opcast.simulator.validation.metrics import errors, grouped
from opcast.simulator.workbench import workbench

FOLDER = Path(__file__).with_name("ledger")
WORSE = 2.0  # points of percent that a figure may grow by
WATCHED = ("median_ape", "p90_ape")
NO_ERROR = ("fits", "device_memory")  # quantities without an error in percent
SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("table", "id", "quantity", "why")]
    + [(name, pa.float64()) for name in ("predicted", "low", "high")]
)


@dataclass(frozen=True)
class Entry:
    """What a release says of a quantity of a row; ``why`` it says nothing where ``predicted`` is None."""

    table: str
    id: str
    quantity: str
    predicted: float | None
    low: float | None = None
    high: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Cell:
    """The errors of a release on a quantity of a table in percent, and its share inside intervals (None: has none)."""

    table: str
    quantity: str
    figures: Mapping[str, float]
    inside: float | None

    def __str__(self) -> str:
        inside = "" if self.inside is None else f", {100 * self.inside:.0f} % inside"
        rows, median, mean, p90 = (self.figures[name] for name in ("n", "median_ape", "mean_ape", "p90_ape"))
        return f"{self.table} {self.quantity}: {median:.1f} / {mean:.1f} / {p90:.1f} on {rows:.0f} rows{inside}"


def predictions(path: Path, setting: ValidationSettings, most: int) -> list[Entry]:
    """What opcast says now of at most so many rows of a table, evenly over it."""
    table = read_table(path)
    rows = table.rows[:: -(-len(table.rows) // most) or 1]
    answers = simulated(rows, setting, lambda done: None)
    entries = []
    for key, values in answers.predicted.items():
        for name, value in values.items():
            low, high = answers.intervals[key].get(name, (None, None))
            entries.append(Entry(path.stem, key, name, value, low, high))
    refused = (*table.unsupported, *answers.unsupported)
    entries += [Entry(path.stem, row.id, "", None, why=row.why) for row in refused]
    return entries + [Entry(path.stem, row.id, "", None, why=f"failed: {row.error}") for row in answers.failed]


def write_release(path: Path, entries: Iterable[Entry]) -> None:
    """A release's file. FileExistsError for one that is there: what was said stays said."""
    if path.exists():
        raise FileExistsError(f"{path.name} is recorded already: a release says what it says once")
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist([vars(entry) for entry in entries], schema=SCHEMA), path, compression="zstd")


def read_release(path: Path) -> list[Entry]:
    """What a release said."""
    return [Entry(**row) for row in pq.read_table(path).to_pylist()]


def cells(entries: Iterable[Entry], rows: Mapping[str, Sequence[Row]]) -> dict[tuple[str, str], Cell]:
    """The scores of a release on the rows of each table, by table and quantity."""
    measured = {(name, row.id): row.measured for name, of in rows.items() for row in of}
    known = [
        (entry, measured[entry.table, entry.id][entry.quantity])
        for entry in entries
        if entry.predicted is not None
        and entry.quantity not in NO_ERROR
        and measured.get((entry.table, entry.id), {}).get("fits", 1.0)
        and entry.quantity in measured.get((entry.table, entry.id), {})
    ]
    scores = {}
    for (table, quantity), pairs in grouped(known, lambda pair: (pair[0].table, pair[0].quantity)).items():
        inside = [entry.low <= value <= entry.high for entry, value in pairs if None not in (entry.low, entry.high)]
        figures = errors([(entry.predicted, value) for entry, value in pairs])
        scores[table, quantity] = Cell(table, quantity, figures, sum(inside) / len(inside) if inside else None)
    return scores


def alarms(before: Sequence[Entry], after: Sequence[Entry], rows: Mapping[str, Sequence[Row]]) -> list[str]:
    """What got worse from one release to the next, over rows that both had, a line each."""
    both = {(entry.table, entry.id) for entry in before} & {(entry.table, entry.id) for entry in after}
    now = {(entry.table, entry.id): entry for entry in after}
    answered = {(entry.table, entry.id) for entry in before if entry.predicted is not None}
    lines = [
        f"{table} {key}: answered before, now refused: {now[table, key].why}"
        for table, key in sorted(answered & both)
        if now[table, key].predicted is None
    ]
    old, new = (cells([e for e in of if (e.table, e.id) in both], rows) for of in (before, after))
    for place in sorted(old.keys() & new.keys()):
        for name in WATCHED:
            was, is_now = old[place].figures[name], new[place].figures[name]
            if is_now - was > WORSE:
                lines.append(f"{' '.join(place)}: {name.removesuffix('_ape')} {was:.1f} % before, {is_now:.1f} % now")
    return lines


def score(releases: Mapping[str, Sequence[Entry]], rows: Mapping[str, Sequence[Row]]) -> list[str]:
    """Prints the cells of all releases, and what is worse in the newest; releases are in the order of their names."""
    names = sorted(releases)
    for name in names:
        for cell in cells(releases[name], rows).values():
            print(f"{name}: {cell}")
    lines = alarms(releases[names[-2]], releases[names[-1]], rows) if len(names) > 1 else []
    for line in lines:
        print(f"ALARM {line}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 where there is an alarm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    record, scoring = verbs.add_parser("record"), verbs.add_parser("score")
    record.add_argument("release", help="its date and name, as 2026-11-26-believe: files are scored in their order")
    record.add_argument("--most", type=int, default=1 << 30, help="rows of a table")
    for verb in (record, scoring):
        verb.add_argument("tables", type=Path, nargs="+")
        verb.add_argument("--folder", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    if chosen.verb == "record":
        from joblib import Parallel, delayed

        setting = workbench(Sources()).validation()
        jobs = (delayed(predictions)(path, setting, chosen.most) for path in chosen.tables)
        entries = [entry for of in Parallel(n_jobs=-1, batch_size=1)(jobs) for entry in of]
        write_release(chosen.folder / f"{chosen.release}.parquet", entries)
        return 0
    releases = {path.stem: read_release(path) for path in sorted(chosen.folder.glob("*.parquet"))}
    if not releases:
        print(f"{chosen.folder} has no release: record one first")
        return 2
    return 1 if score(releases, {path.stem: read_table(path).rows for path in chosen.tables}) else 0


if __name__ == "__main__":
    sys.exit(main())
