"""Errors of predicted peaks of memory by framework, from tables of published runs: writes ``conf/memory_errors.yaml``.

    python tests/benchmarks/memory_errors.py TABLE.csv... [--every N] [--write]

prints what each framework's peaks are off by, and how well that tells the rows of a table that is left out;
``--every N`` takes each N-th row of tables with more than 300.

A framework's spread is drawn towards the pooled one as if ``PRIOR`` more rows had that; the pooled one is the root of
the frameworks' mean square error, each framework counting alike. Scores are of rows that nothing was taken from: each
table in turn is left out.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from opcast.datasets.clusters import Cluster
from opcast.datasets.devices import Device, load_device
from opcast.datasets.truth import InferenceRow, Row, TrainingRow, read_table
from opcast.simulator.engines import Engine, build_engine
from opcast.simulator.memory.errors import ERRORS, T_QUANTILE_95, T_STANDARD_DEVIATION, probability_within
from opcast.simulator.validation import ValidationSettings
from opcast.simulator.validation.answers import simulated
from opcast.simulator.validation.metrics import grouped

ROOT = Path(__file__).resolve().parents[2]
LARGE = 300
PRIOR = 4
PLACES = 3
BEFORE = 0.02  # what every framework was given before errors were measured
LEAST = 1e-6  # a probability no smaller than this is scored
HEAD = """\
# How far predicted peaks of memory are from published ones: what P(out of memory) rests on. Errors are ln(measured /
# predicted): bias their mean, spread their root mean square drawn towards the pooled one as by four more rows. Made by
#   python tests/benchmarks/memory_errors.py {tables}{every} --write
"""


@dataclass(frozen=True)
class ObservedPeak:
    """One run: the log error of its peak, and whether it fitted (None: not published).

    ``room`` is the logarithm of the device's memory over the predicted peak.
    """

    table: str
    stack: str
    error: float | None
    fitted: bool | None
    room: float


def observe(table: str, rows: Sequence[Row], predicted: Mapping[str, Mapping[str, float]]) -> list[ObservedPeak]:
    """The runs of a table that publish a peak or whether they fitted."""
    made = []
    for row in rows:
        found = predicted.get(row.id, {})
        if not isinstance(row, (TrainingRow, InferenceRow)) or not found.get("peak_memory"):
            continue
        measured, fits = row.measured.get("peak_memory"), row.measured.get("fits")
        error = math.log(measured / found["peak_memory"]) if measured and fits != 0.0 else None
        room = math.log(load_device(row.hardware.device).memory_gib / found["device_memory"])
        made.append(ObservedPeak(table, row.framework, error, None if fits is None else bool(fits), room))
    return made


def spreads(observed: Sequence[ObservedPeak]) -> dict[str, dict[str, float]]:
    """By framework, and ``""`` for all: ``bias`` and ``spread`` of log errors and ``rows`` that they rest on."""
    known = [each for each in observed if each.error is not None]
    by_stack = {
        name: np.array([each.error for each in members])
        for name, members in grouped(known, lambda each: each.stack).items()
    }
    pooled = float(np.mean([np.mean(errors**2) for errors in by_stack.values()]))
    biases = [float(errors.mean()) for errors in by_stack.values()]
    made = {"": {"bias": float(np.mean(biases)), "spread": math.sqrt(pooled), "rows": len(known)}}
    for name, errors in by_stack.items():
        drawn = (PRIOR * pooled + float((errors**2).sum())) / (PRIOR + len(errors))
        made[name] = {"bias": float(errors.mean()), "spread": math.sqrt(drawn), "rows": len(errors)}
    return {name: {key: round(value, PLACES) for key, value in of.items()} for name, of in made.items()}


def scored(observed: Sequence[ObservedPeak]) -> dict[str, dict[str, float]]:
    """By table, spreads taken from the others: ``density`` (mean log density of errors), ``coverage`` of 90 % intervals
    and ``fits`` (mean log-likelihood of what fitted); ``_before``: under a fixed spread and a normal distribution.
    """
    made: dict[str, dict[str, float]] = {}
    for table, members in grouped(observed, lambda each: each.table).items():
        others = [each for each in observed if each.table != table and each.error is not None]
        if not others:
            continue
        known = spreads(others)
        errors = [
            (each.error, known.get(each.stack, known[""])["spread"]) for each in members if each.error is not None
        ]
        fits = [(each.fitted, each.room, known.get(each.stack, known[""])["spread"]) for each in members]
        made[table] = {"rows": len(errors)}
        if errors:
            made[table] |= {
                "density": float(np.mean([density(error, spread) for error, spread in errors])),
                "density_before": float(np.mean([normal(error, BEFORE) for error, _ in errors])),
                "coverage": float(
                    np.mean([abs(error) <= T_QUANTILE_95 * spread / T_STANDARD_DEVIATION for error, spread in errors])
                ),
            }
        told = [(fitted, room, spread) for fitted, room, spread in fits if fitted is not None]
        if told:
            made[table] |= {
                "verdicts": len(told),
                "fits": _likelihood([(fitted, probability_within(room, spread)) for fitted, room, spread in told]),
                "fits_before": _likelihood([(fitted, _normal_within(room)) for fitted, room, _ in told]),
            }
    return made


def density(error: float, spread: float) -> float:
    """Log density of an error under Student's t with four degrees of freedom and a standard deviation."""
    scale = spread / T_STANDARD_DEVIATION
    return math.log(0.375 / scale) - 2.5 * math.log1p((error / scale) ** 2 / 4.0)


def normal(error: float, spread: float) -> float:
    """Log density of an error under a normal distribution."""
    return -0.5 * (error / spread) ** 2 - math.log(spread * math.sqrt(2.0 * math.pi))


def _normal_within(room: float) -> float:
    return 0.5 * (1.0 + math.erf(room / BEFORE / T_STANDARD_DEVIATION))


def _likelihood(told: Sequence[tuple[bool, float]]) -> float:
    return float(np.mean([math.log(max(chance if fitted else 1.0 - chance, LEAST)) for fitted, chance in told]))


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
