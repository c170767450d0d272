"""What a few rows of a new GPU are worth: each measured device in turn is the new one, all others are known.

    python tests/benchmarks/new_gpu.py STORE [--kind KIND …] [--device ID …] [--rule random|spread|active]

STORE holds measurements of several devices (``opcast import source=aiconfigurator store=STORE``); the others are known
by their shipped predictors. For each device and kind one table (the default backend's) is split: whole shapes of one
fold of four are scored, rows of the others are given: 0, 50, 200, 1,000 or all. With 0 the kin answers
(``models/kinship.py``), with some rows ``models/transfer.py`` adapts; *alone* is the same procedure on those rows by
themselves. ``--rule active`` takes rows as ``campaign=active`` does that is asked for all rows alike. Printed are
median errors in percent, the share of scored rows inside the 90 % interval, the error at 200 over that of all rows, and
who answered at 200.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from opcast.datasets.backends import framework
from opcast.datasets.devices import load_device
from opcast.datasets.store import Store
from opcast.models.candidates import Options
from opcast.models.features import alike
from opcast.models.kinship import TIERS, Kin, constant, tier, voices
from opcast.models.learning import task_of
from opcast.models.predictor import Predictor
from opcast.models.registry import Registry
from opcast.models.splits import split
from opcast.models.table import MeasurementTable, default_backend, tables
from opcast.models.training import SHIPPED, fit
from opcast.models.transfer import adapt, bases_of, draw
from opcast.simulator.engines.transfer import learned_places
from opcast.tests.benchmarks.active import active, random

POINTS = (50, 200, 1000)
TOLD = 200  # of them the goal speaks
SCORED = 3000
ASKED = 400  # rows that an active campaign is asked for
MOST = 20_000  # rows that stand for all
UNKNOWN = constant(1.0)
REGISTRY = Registry(SHIPPED)


def table_of(store: Store, kind: str, device_id: str) -> MeasurementTable:
    own = tables(kind, store.read(kind, device_id), load_device(device_id))
    chosen = default_backend(own)
    return next(each for each in own if each.backend == chosen)


def by_kin(table: MeasurementTable) -> float:
    """Median error in percent of the nearest kin's answers, which have seen nothing of the device."""
    ops, device = table.frame(), table.device
    correction = np.zeros(len(table))
    for dtype in np.unique(table.dtype):
        rows = np.flatnonzero(table.dtype == dtype)
        places = learned_places([REGISTRY], table.kind, alike(str(dtype)), framework(table.backend), None)
        for level in TIERS:
            near = [each for each in places if tier(device, each[0], alike(str(dtype))) == level]
            heard = voices(device, [each for each, *_ in near], str(dtype))[1]
            found = {each.id: registry.find(table.kind, each.id, backend) for each, registry, backend in near}
            known = [made for name in heard if (made := found[name]) is not None]
            if known:
                part = table.take(rows)
                kin = Kin(level, known, list(heard.values()), str(dtype), UNKNOWN)
                asked = table.kind, part.columns, str(dtype), str(dtype)
                mine = part.frame()
                correction[rows] = kin.correction(mine, kin.laws(mine, asked, "warm"), asked, device, "warm")
                break
    return median_error(ops.analytical_us * np.exp(correction), table)


def median_error(found_us: np.ndarray, table: MeasurementTable) -> float:
    return float(100 * np.median(np.abs(found_us / table.latency_us - 1)))


def score(made: Predictor, asked: MeasurementTable) -> str:
    """Median error in percent and coverage."""
    found = made.predict_frame(asked.frame())
    inside = np.abs(np.log(asked.latency_us / found.latency_us)) <= np.log(found.high_us / found.latency_us) + 1e-12
    return f"{median_error(found.latency_us, asked):.1f} ({inside.mean():.0%})"


def chosen_rows(given: MeasurementTable, count: int, rule: str) -> np.ndarray:
    """Positions of the rows that are given."""
    if rule != "active":
        return draw(given, count, rule)
    some = _some(np.arange(len(given)), SCORED)
    part = given.take(some)
    return some[active(part, part.take(random(part, ASKED, 7)), np.full(ASKED, 1 / ASKED), count, 0)]


def cells(table: MeasurementTable, rule: str) -> Iterator[str]:
    """What is printed of a table, column by column."""
    options = Options().for_kind(table.kind)
    fold = split(table.kind, table.columns, 4, 0).fold
    asked = table.take(_some(np.flatnonzero(fold == 0), SCORED))
    given = table.take(_some(np.flatnonzero(fold != 0), MOST))
    yield f"{by_kin(asked):.1f}"
    bases, chosen, at_200 = bases_of([REGISTRY], table), "", ""
    for count in POINTS:
        seen = given.take(chosen_rows(given, count, rule))
        made = adapt(bases, seen, options)
        yield score(made, asked)
        yield score(fit(seen, options).predictor, asked)
        if count == TOLD:
            chosen, at_200 = str(made.card["chosen"]), score(made, asked)
    ops, everything = asked.frame(), task_of(given, given.frame(), options)
    all_rows = median_error(
        ops.analytical_us * np.exp(options.lightgbm.fit(everything, None).predict(ops.matrix)), asked
    )
    yield f"{all_rows:.1f}"
    yield f"{float(at_200.partition(' ')[0]) / all_rows:.2f}"
    yield chosen.rpartition(":")[0].removeprefix(f"{table.kind}@").rpartition("@")[0] or "alone"


def _some(positions: np.ndarray, most: int) -> np.ndarray:
    return np.sort(np.random.default_rng(0).permutation(positions)[:most])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--kind", nargs="*", default=["gemm", "attention_prefill", "attention_decode"])
    parser.add_argument("--device", nargs="*")
    parser.add_argument("--rule", choices=("random", "spread", "active"), default="random")
    asked = parser.parse_args()
    store = Store(asked.store)
    points = [name for count in POINTS for name in (str(count), f"{count} alone")]
    heads = ["kind", "device", "framework", "0", *points, "all", f"{TOLD} over all", f"{TOLD} from"]
    print(f"| {' | '.join(heads)} |\n" + "| --- " * len(heads) + "|", flush=True)
    for kind in asked.kind:
        for device_id in asked.device or store.devices(kind):
            table = table_of(store, kind, device_id)
            row = [kind, device_id, framework(table.backend), *cells(table, asked.rule)]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
