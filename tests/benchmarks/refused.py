"""Rows of published tables that opcast does not answer, by table and reason.

    python tests/benchmarks/refused.py TABLE.csv... [--most N]

simulates the rows of every table, every so-many-th of one with more than N, and prints how many of each table are
refused or failed, and why. Numbers in a reason are left out, so that one reason is one line.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from joblib import Parallel, delayed

from opcast.datasets.clusters import Cluster
from opcast.datasets.devices import Device
from opcast.datasets.truth import read_table
from opcast.simulator.engines import Engine, build_engine
from opcast.simulator.validation import ValidationSettings
from opcast.simulator.validation.answers import simulated

ROOT = Path(__file__).resolve().parents[2]
NUMBER = re.compile(r"\b\d[\d,.]*\b")


def engine(device: Device, cluster: Cluster | None) -> Engine:
    """The engines that come with opcast."""
    return build_engine(device, [ROOT / "datasets" / "measured"], [ROOT / "models" / "shipped"], cluster=cluster)


def refused(path: Path, most: int, cache: Path | None) -> tuple[str, int, int, Counter[str]]:
    """(table, its rows, those simulated or tried, reasons and how often)."""
    table = read_table(path)
    rows = table.rows[:: -(-len(table.rows) // most) or 1] if table.rows else ()
    found = simulated(rows, ValidationSettings(engine, cache), lambda done: None)
    said = [each.why for each in (*table.unsupported, *found.unsupported)]
    said += [f"FAILED {each.error}" for each in (*table.failed, *found.failed)]
    return path.stem, table.count, len(rows), Counter(NUMBER.sub("N", why) for why in said)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--most", type=int, default=1 << 30, help="rows of a table that are simulated")
    parser.add_argument("--graphs", type=Path, help="where traced graphs are kept")
    chosen = parser.parse_args(arguments)
    jobs = (delayed(refused)(path, chosen.most, chosen.graphs) for path in chosen.tables)
    for name, count, tried, reasons in Parallel(n_jobs=-1, batch_size=1, return_as="generator")(jobs):
        print(f"{name}: {count} rows, {tried} simulated, {sum(reasons.values())} refused", flush=True)
        for why, times in reasons.most_common():
            print(f"    {times:5d}  {why}")


if __name__ == "__main__":
    main()
