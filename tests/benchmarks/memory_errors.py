"""Errors of predicted peaks of memory by framework, from tables of published runs: writes ``conf/memory_errors.yaml``.

    python tests/benchmarks/memory_errors.py TABLE.csv... [--every N] [--write]

prints what each framework's peaks are off by, and how well that tells the rows of a table that is left out;
``--every N`` takes each N-th row of tables with more than 300.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from opcast.datasets.clusters import Cluster
from opcast.datasets.devices import Device
from opcast.datasets.truth import read_table
from opcast.simulator.engines import Engine, build_engine
from opcast.simulator.memory.errors import ERRORS
from opcast.simulator.validation import ValidationSettings
from opcast.simulator.validation.answers import simulated
from opcast.simulator.validation.memory_errors import ObservedPeak, observe, scored, spreads

ROOT = Path(__file__).resolve().parents[2]
LARGE = 300
HEAD = """\
# How far predicted peaks of memory are from published ones: what P(out of memory) rests on. Errors are ln(measured /
# predicted): bias their mean, spread their root mean square drawn towards the pooled one as by four more rows. Made by
#   python tests/benchmarks/memory_errors.py {tables}{every} --write
"""


def engine(device: Device, cluster: Cluster | None) -> Engine:
    """The engines that come with opcast."""
    return build_engine(device, [ROOT / "datasets" / "measured"], [ROOT / "models" / "shipped"], cluster=cluster)


def main() -> None:
    """Read, simulate, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--graphs", type=Path, default=Path.home() / ".opcast" / "graphs")
    parser.add_argument("--write", action="store_true", help=f"keep the errors in {ERRORS.relative_to(ROOT)}")
    chosen = parser.parse_args()
    observed: list[ObservedPeak] = []
    for path in chosen.tables:
        rows = [row for row in read_table(path).rows if row.measured.keys() & {"peak_memory", "fits"}]
        rows = rows[:: chosen.every] if len(rows) > LARGE else rows
        found = simulated(rows, ValidationSettings(engine, chosen.graphs), lambda done: None)
        for failed in found.failed:
            print(f"{path.stem}: {failed.id} failed: {failed.error}")
        observed += observe(path.stem, rows, found.predicted)
    known = spreads(observed)
    for name, of in known.items():
        print(f"{name or 'pooled'}:", ", ".join(f"{key} {value:g}" for key, value in of.items()))
    for table, score in scored(observed).items():
        print(f"{table} left out:", ", ".join(f"{key} {value:.3g}" for key, value in score.items()))
    if chosen.write:
        ERRORS.write_text(written(known, observed, chosen.tables, chosen.every), "utf-8")


def written(
    known: Mapping[str, Mapping[str, float]], observed: Sequence[ObservedPeak], tables: Sequence[Path], every: int
) -> str:
    """The file: pooled, then each framework with the tables that its rows are of."""
    names = " ".join(path.name for path in tables)
    lines = [HEAD.format(tables=names, every=f" --every {every}" if every > 1 else "")]
    lines.append(f"pooled: {line(known[''], ())}\nstacks:\n")
    for name in sorted(known.keys() - {""}):
        of = tuple(dict.fromkeys(each.table for each in observed if each.stack == name and each.error is not None))
        lines.append(f"  {name}: {line(known[name], of)}\n")
    return "".join(lines)


def line(values: Mapping[str, float], tables: Sequence[str]) -> str:
    """One mapping of YAML."""
    said = [f"{name}: {value:g}" for name, value in values.items()]
    return "{" + ", ".join([*said, *([f"tables: [{', '.join(tables)}]"] if tables else [])]) + "}"


if __name__ == "__main__":
    main()
