"""How far answers are off for kinds that nobody timed: each kind that has tables, answered by its donors instead.

    python tests/benchmarks/donors.py STORE… [--write]

The stores hold what has both a kind's own rows and a donor's (``opcast import source=neusight``, ``vidur``,
``kineto``); predictors are those that come with opcast. Each table of a kind (``models/donors.py``) is answered by the
kind's donors on the same device, or on one of its die or generation, and by physics. Kinds without tables are held
against published figures (``published_kernels.csv``). A table is one voice, whatever its rows.

Where a donor's shortfall carries over in part, the part is the one of :data:`SHARES` that misses least; what is printed
of a table was answered with the part that tables of other heads say. ``--write`` puts the parts and the width that
holds 90 % of what was missed into ``models/shipped/kinship.json``, where donors are nearer to the truth than physics.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from opcast.datasets.devices import load_device
from opcast.datasets.ops import KINDS, cost_columns, make_op
from opcast.datasets.store import Store
from opcast.datasets.vocabulary import OpColumns
from opcast.models import analytical
from opcast.models.clocks import steady_rate
from opcast.models.donors import Donor, donors, group
from opcast.models.intervals import COVERAGE
from opcast.models.kinship import ERRORS, TIERS, errors
from opcast.models.registry import Registry
from opcast.models.table import MeasurementTable, tables
from opcast.simulator.engines.transfer import TransferEngine

SHIPPED = Registry(Path(__file__).resolve().parents[2] / "models" / "shipped")
PUBLISHED = Path(__file__).parent / "published_kernels.csv"
MEASURED = ("elementwise", "gelu", "silu_mul", "rope", "layer_norm", "softmax")
NEAR = TIERS[:2]  # as far as donors are asked here: what lies further is the error of another device
NEARER = 0.9  # of physics' error, which donors must be below to answer in its place
MOST, LEAST = 400, 5  # rows of a table
SHARES = tuple(place / 20 for place in range(21))  # of a shortfall, that are tried


@dataclass(frozen=True)
class Told:
    """One table's ops: ln(measured / answered) by a donor and by physics, each [n].

    ``group`` is what tables have in common, and ``tried`` [shares, n] what each of :data:`SHARES` misses, where a part
    of the shortfall carries over; ``share`` is the one that was taken.
    """

    kind: str
    donor: str
    table: str
    recast: np.ndarray
    law: np.ndarray
    group: str = ""
    tried: np.ndarray | None = None
    share: float = 1.0


def of_stores(stores: Sequence[Store]) -> Iterator[Told]:
    """Every table of a kind that has donors near it."""
    for store in stores:
        for kind in (each for each in MEASURED if each in store.kinds()):
            for device_id in store.devices(kind):
                device = load_device(device_id)
                for table in tables(kind, store.read(kind, device_id), device):
                    if len(table) >= LEAST:
                        yield from _of_table(table)


def _of_table(table: MeasurementTable) -> Iterator[Told]:
    part = table.take(np.sort(np.random.default_rng(0).permutation(len(table))[:MOST]))
    law = np.log(part.latency_us / part.frame().analytical_us)
    for donor in donors(table.kind):
        found = np.full(len(part), np.nan)
        for dtype in np.unique(part.dtype):
            rows = np.flatnonzero(part.dtype == dtype)
            columns = {name: values[rows] for name, values in part.columns.items()}
            found[rows] = answered(donor, table.device.id, table.kind, columns, str(dtype), str(dtype))
        known = np.isfinite(found)
        if known.sum() >= LEAST:
            missed = np.log(part.latency_us[known] / found[known])
            yield Told(table.kind, donor.kind, f"{table.device.id} {table.backend}", missed, law[known])


def of_publications() -> Iterator[Told]:
    """Published rates of kinds without tables; several of one op are readings of the same.

    Where a kernel was timed under the power limit (``steady``), no answer is faster than the limit lets products be.
    """
    for row in csv.DictReader(PUBLISHED.read_text("utf-8").splitlines()):
        dims = dict(each.split("=") for each in row["dims"].split())
        op = make_op(row["kind"], dtype=row["dtype"], out_dtype="bf16", **dims)
        columns = {name: np.array([size]) for name, size in zip(KINDS[op.kind].names, op.dims, strict=True)}
        device, flops = load_device(row["device"]), cost_columns(op.kind, columns, op.dtype, op.out_dtype).flops / 1e6
        measured = flops / np.array(row["tflops"].split(), float)
        least = flops / steady_rate(device, op.dtype, device.tdp_w) if row["steady"] else 0.0
        law = analytical.latency_us(OpColumns(op.kind, columns, op.dtype, op.out_dtype), device)
        physics = np.log(measured / np.maximum(law, least))
        for donor in donors(op.kind):
            asked = row["device"], op.kind, columns, op.dtype, op.out_dtype
            parts = [replace(donor, share=share) for share in SHARES] if donor.partly else [donor]
            missed = [np.log(measured / np.maximum(answered(each, *asked), least)) for each in parts]
            name, tried = f"{row['device']} {row['dtype']} {row['dims']}", np.array(missed) if donor.partly else None
            yield Told(op.kind, donor.kind, name, missed[-1], physics, dims.get("head_dim", ""), tried)


def shared(parts: Sequence[Told]) -> list[Told]:
    """The tables, those of a donor in part by the share that the other groups say."""
    made = []
    for each in parts:
        if each.tried is not None:
            share = best_share([one for one in parts if one.group != each.group])
            each = replace(each, recast=each.tried[SHARES.index(share)], share=share)
        made.append(each)
    return made


def best_share(parts: Sequence[Told]) -> float:
    """The share that misses least, a table one voice."""
    missed = np.mean([np.median(np.abs(each.tried), axis=1) for each in parts if each.tried is not None], axis=0)
    return SHARES[int(np.argmin(missed))]


def answered(
    donor: Donor, device_id: str, kind: str, columns: dict[str, np.ndarray], dtype: str, out_dtype: str
) -> np.ndarray:
    """us of n ops by a donor near the device, NaN without one."""
    engine = TransferEngine(load_device(device_id), [SHIPPED])
    known = {tier: each for tier, each in errors().get(donor.kind, {}).items() if tier in NEAR}
    kin = next(engine.recast(kind, donor, dtype, known, 0.0), None)
    if kin is None:
        return np.full(len(next(iter(columns.values()))), np.nan)
    return kin.predict(columns, dtype, out_dtype, engine.device, "warm").latency_us


def told(parts: Sequence[Told]) -> dict[str, Any]:
    """Median errors in percent, a table one voice, and the half-width in ln units that 90 % lie within."""
    miss, law = ([np.abs(getattr(each, name)) for each in parts] for name in ("recast", "law"))
    made: dict[str, Any] = {
        "tables": len(parts),
        "median": round(100 * float(np.mean([np.median(np.expm1(each)) for each in miss])), 1),
        "physics": round(100 * float(np.mean([np.median(np.expm1(each)) for each in law])), 1),
    }
    if parts[0].tried is not None:
        made["share"] = best_share(parts)
        made["shares_left_out"] = sorted({each.share for each in parts})
    if made["median"] < NEARER * made["physics"]:
        made["half_width"] = round(weighted_quantile(miss, COVERAGE), 3)
    return made


def weighted_quantile(parts: Sequence[np.ndarray], share: float) -> float:
    """The value below which ``share`` of all parts' values lie, a part one voice."""
    values = np.concatenate(parts)
    weights = np.concatenate([np.full(len(each), 1.0 / len(each)) for each in parts])
    order = np.argsort(values)
    return float(values[order][np.searchsorted(np.cumsum(weights[order]) / weights.sum(), share)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--details", action="store_true", help="every table")
    asked = parser.parse_args()
    parts = [*of_stores([Store(path) for path in asked.stores]), *of_publications()]
    for each in parts if asked.details else ():
        errors_of = (f"{np.median(one):+.2f}" for one in (each.recast, each.law))
        print(each.kind, "<-", each.donor, each.table, len(each.law), *errors_of)
    found: dict[str, dict[str, Any]] = {}
    print("| kind | donor | tables | median % | physics | 90 % within |\n" + "| --- " * 6 + "|")
    for name, donor in dict.fromkeys((group(each.kind), each.donor) for each in parts):
        own = shared([each for each in parts if (group(each.kind), each.donor) == (name, donor)])
        name = own[0].kind if own[0].kind not in MEASURED else name
        made = found.setdefault(name, {})[donor] = told(own)
        part = f", {made['share']:.2f} of it" if "share" in made else ""
        held = f"{np.expm1(made['half_width']):.0%}" if "half_width" in made else "not used"
        print(f"| {name} | {donor} | {made['tables']} | {made['median']} | {made['physics']} | {held}{part} |")
    if asked.write:
        known = json.loads(ERRORS.read_text("utf-8"))
        ERRORS.write_text(json.dumps({**known, "donors": found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
