"""Fit the constants of frameworks on half of the groups of tables of published steps; report the other half.

    python tests/benchmarks/calibrate_stacks.py TABLE.csv... [--every N]

prints by framework and chip the ``scale`` for ``conf/stack`` and errors in percent on both halves; ``--every N`` takes
each N-th row of a large table.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from opcast.datasets.clusters import Cluster
from opcast.datasets.devices import Device
from opcast.datasets.truth import TrainingRow, read_table
from opcast.simulator.engines import Engine, build_engine
from opcast.simulator.validation import ValidationSettings
from opcast.simulator.validation.calibration import calibrate

ROOT = Path(__file__).resolve().parents[2]


def engine(device: Device, cluster: Cluster | None) -> Engine:
    """The engines that come with opcast."""
    return build_engine(device, [ROOT / "datasets" / "measured"], [ROOT / "models" / "shipped"], cluster=cluster)


def main() -> None:
    """Read, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--graphs", type=Path, default=Path.home() / ".opcast" / "graphs")
    chosen = parser.parse_args()
    rows = [row for path in chosen.tables for row in read_table(path).rows if isinstance(row, TrainingRow)]
    for made in calibrate(rows[:: chosen.every], ValidationSettings(engine, chosen.graphs)):
        print(f"{made.framework} on {', '.join(made.devices)}: {dict(made.scale)}")
        for name in ("fitted", "held_out", "held_out_before"):
            print(f"  {name}:", ", ".join(f"{key} {value:.1f}" for key, value in getattr(made, name).items()))


if __name__ == "__main__":
    main()
