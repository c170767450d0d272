"""How far labs are apart: tables that no shipped predictor has learned, against the predictors that answer for them.

    python tests/benchmarks/labs.py STORE... [--tables TABLE.csv...] [--write]

STORE holds what ``opcast import`` made of other people's timings (``source=vidur``, ``kineto``, ``neusight``); tables
of operators are those of ``opcast validate``. An op is answered by the predictor that answers when no backend is named,
where its table is of another source than the predictor's.

For each family and length of ops (``models/labs.py``): the half-width (ln) that with the predictor's own interval holds
90 % of the rows, a table one voice, and which share of each table's rows the others' widths hold. A few tables promise
too much: the level is raised, in steps, until tables are held as stated by the widths of the others. Where fewer than
three tables time ops of a family that long, the width is that of all families together. ``--write`` puts the widths
into ``models/shipped/labs.json``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opcast.datasets.devices import Device, DeviceError, load_device
from opcast.datasets.ops import KINDS, iterate_groups
from opcast.datasets.store import Store
from opcast.datasets.truth import OperatorRow, read_table
from opcast.datasets.vocabulary import OpColumns
from opcast.models.features import frame
from opcast.models.intervals import COVERAGE
from opcast.models.labs import EDGES_US, WIDTHS, band
from opcast.models.predictor import Predictor
from opcast.models.registry import Registry
from opcast.models.table import MeasurementTable, tables
from opcast.simulator.engines.library import device_for
from opcast.tests.benchmarks.donors import weighted_quantile

SHIPPED = Registry(Path(__file__).resolve().parents[2] / "models" / "shipped")
FAMILIES = ("gemm", "attention", "moe", "norm", "pointwise")
BANDS = len(EDGES_US) + 1
Parts = tuple[np.ndarray, np.ndarray, np.ndarray]
MOST, LEAST = 1000, 5  # rows of a table
ENOUGH = 3  # tables of a family
LEVELS = tuple(COVERAGE + place / 100 for place in range(10))
PLAIN = ("bf16", "fp16", "fp32")  # formats without a rounding that one table times and another leaves out


@dataclass(frozen=True)
class Missed:
    """One table's ops: |ln(measured / predicted)|, half-widths of the predictor's own intervals, and lengths [n]."""

    family: str
    table: str
    error: np.ndarray
    own: np.ndarray
    band: np.ndarray

    def beyond(self, band: int) -> np.ndarray:
        """The half-width that would hold each op of a length together with its own."""
        rows = self.band == band
        return np.sqrt(np.maximum(self.error[rows] ** 2 - self.own[rows] ** 2, 0.0))


def answers_for(device: Device, kind: str, dtype: str) -> Predictor | None:
    """The predictor that answers when no backend is named, if it has learned the format."""
    for device_id in filter(None, (device.id, device.variant_of)):
        backend = SHIPPED.learned(kind, device_id, None, dtype, SHIPPED.preferences())
        if backend is not None:
            return SHIPPED.find(kind, device_id, backend)
    return None


def of_stores(stores: Sequence[Store]) -> Iterator[Missed]:
    """Every table of the stores that its device's predictors have not learned."""
    for store in stores:
        for kind in (each for each in store.kinds() if each in KINDS and KINDS[each].family in FAMILIES):
            for device_id in store.devices(kind):
                try:
                    device = load_device(device_id)
                except DeviceError:
                    continue
                for table in tables(kind, store.read(kind, device_id), device):
                    yield from _of_table(table)


def _of_table(table: MeasurementTable) -> Iterator[Missed]:
    part = table.take(np.sort(np.random.default_rng(0).permutation(len(table))[:MOST]))
    source = next(iter(part.sources.get("source", ())), "")
    found = []
    for rows, ops in part.groups():
        predictor = answers_for(part.device, part.kind, ops.dtype)
        if predictor is not None and source not in predictor.card["sources"]["source"] and ops.dtype in PLAIN:
            found.append(missed(predictor, part.device, ops, part.latency_us[rows]))
    yield from joined(f"{part.kind} {part.device.id} {part.backend}", part.kind, found)


def joined(name: str, kind: str, found: Sequence[Parts]) -> Iterator[Missed]:
    """One table of the parts that predictors answer; none of few rows."""
    if found:
        made = [np.concatenate(each) for each in zip(*found, strict=True)]
        if len(made[0]) >= LEAST:
            yield Missed(KINDS[kind].family, name, *made)


def of_tables(paths: Sequence[Path]) -> Iterator[Missed]:
    """Operators of published tables, by device; those at a locked clock ask another question."""
    for path in paths:
        rows = [each for each in read_table(path).rows if isinstance(each, OperatorRow) and not each.clock_mhz]
        for device_id in sorted({each.hardware.device for each in rows}):
            own = [each for each in rows if each.hardware.device == device_id]
            yield from _of_rows(path.stem, load_device(device_id), own)


def _of_rows(name: str, device: Device, rows: Sequence[OperatorRow]) -> Iterator[Missed]:
    found: dict[str, list[Parts]] = {}
    whole = 1e3 * np.array([each.measured["latency"] for each in rows])
    beside = np.array([max(each.empty_op_us - device.launch_us, 0.0) for each in rows])
    told = 2.0 * beside < whole  # an op that is mostly host says little of its kernel
    rows, measured = [each for each, kept in zip(rows, told, strict=True) if kept], (whole - beside)[told]
    for kind, dtype, out_dtype, at, columns in iterate_groups([each.op for each in rows]):
        predictor = answers_for(device, kind, dtype) if KINDS[kind].family in FAMILIES else None
        if predictor is not None:
            made = missed(predictor, device, OpColumns(kind, columns, dtype, out_dtype), measured[at])
            found.setdefault(kind, []).append(made)
    for kind, parts in found.items():
        yield from joined(f"{kind} {device.id} {name}", kind, parts)


def missed(predictor: Predictor, device: Device, ops: OpColumns, measured_us: np.ndarray) -> Parts:
    """Errors of ops, the half-widths of their own intervals, and how long they are.

    Answers that are physics for more than a half are left out: they say how far physics is off, not labs.
    """
    known = device_for(device, predictor)
    found = predictor.predict(ops.columns, ops.dtype, ops.out_dtype, known, ops.cache)
    error, own = np.abs(np.log(measured_us / found.latency_us)), np.log(found.high_us / found.latency_us)
    learned = predictor.seen(frame(ops, known).analytical_us) >= 0.5
    return error[learned], own[learned], band(found.latency_us)[learned]


def told(family: str, tables: Sequence[Missed], level: float) -> dict[str, Any]:
    """What ``labs.json`` says of a family."""
    own = sorted((each for each in tables if each.family == family), key=lambda each: each.table)
    made: dict[str, Any] = {"half_width": half_widths(family, tables, level).round(3).tolist()}
    made["tables"] = {each.table: of_one(each, tables, level) for each in own}
    return made


def half_widths(family: str, tables: Sequence[Missed], level: float) -> np.ndarray:
    """The width by length [bands]: of the tables of a family that have ops so long, else of all."""
    found = []
    for place in range(BANDS):
        known = [(each.family, beyond) for each in tables if len(beyond := each.beyond(place)) >= LEAST]
        own = [beyond for name, beyond in known if name == family]
        found.append(weighted_quantile(own if len(own) >= ENOUGH else [beyond for _, beyond in known], level))
    return np.array(found)


def of_one(one: Missed, tables: Sequence[Missed], level: float) -> dict[str, float]:
    """Rows and median error in percent of a table; held by its own interval alone, and by widths of the others."""
    width = half_widths(one.family, [each for each in tables if each is not one], level)[one.band]
    return {
        "rows": len(one.error),
        "median": round(100.0 * float(np.median(np.expm1(one.error))), 1),
        "own": round(float(np.mean(one.error <= one.own)), 2),
        "held": round(float(np.mean(one.error <= np.hypot(one.own, width))), 2),
    }


def level_of(tables: Sequence[Missed]) -> float:
    """The least level at which widths of the other tables hold as many as stated, a table one voice."""
    for level in LEVELS:
        if np.mean([of_one(each, tables, level)["held"] for each in tables]) >= COVERAGE:
            return level
    return LEVELS[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", type=Path, nargs="+")
    parser.add_argument("--tables", type=Path, nargs="*", default=[])
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    parts = [*of_stores([Store(path) for path in asked.stores]), *of_tables(asked.tables)]
    level = level_of(parts)
    print(
        "| family | table | rows | median % | its own interval holds | widened by the others' |\n" + "| --- " * 6 + "|"
    )
    found = {family: told(family, parts, level) for family in FAMILIES}
    for family, of in found.items():
        for name, one in of["tables"].items():
            print(f"| {family} | {name} | {one['rows']} | {one['median']} | {one['own']:.0%} | {one['held']:.0%} |")
        print(f"| {family} | {', '.join(map(str, of['half_width']))} in ln | | | | |")
    held = [np.mean([one[how] for of in found.values() for one in of["tables"].values()]) for how in ("own", "held")]
    print(f"| all | at a level of {level:.2f} | | | {held[0]:.0%} | {held[1]:.0%} |")
    if asked.write:
        WIDTHS.write_text(json.dumps({"families": found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
