"""How fast predictors answer: products a second in batch, one op alone, loading a device, bytes on disk.

    python tests/benchmarks/serve_predictors.py [--predictor FOLDER | --store STORE] [--rows N] [--lleaves] …

Serves the predictor in FOLDER; else one that it trains, as ``opcast train`` would fit it, on the largest GEMM table of
a H100 in STORE (default: the reference measurements, imported once, as accuracy_ops.py does). Batches are distinct
random shapes in bf16: features, correction, envelope and interval of each, nothing from memory. Bounds are for two
cores, by the CPU time that an answer takes, so that other work on the machine does not decide; the rate by the clock
on the wall stands beside it. The walk through the trees is compared with LightGBM's own, treelite's and (``--lleaves``,
which compiles for minutes) lleaves', where they are installed, one thread each. Exit code 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from opcast.datasets.devices import load_device
from opcast.datasets.ops import Op, make_op
from opcast.datasets.store import Store
from opcast.datasets.vocabulary import OpColumns
from opcast.models.candidates import Options
from opcast.models.correction import Correction
from opcast.models.envelope import surround
from opcast.models.features import feature_names
from opcast.models.intervals import calibrate, classes_of
from opcast.models.learning import task_of
from opcast.models.predictor import MODEL, Predictor, load
from opcast.models.registry import Registry
from opcast.models.table import MeasurementTable, tables
from opcast.models.trees import from_lightgbm

sys.path.insert(0, str(Path(__file__).parent))

DEVICE = "h100_sxm"
CORES = 2
KINDS_OF_A_DEVICE = 12
LOADING = """\
import sys
import time
from opcast.models.registry import Registry
began = time.perf_counter()
registry = Registry(sys.argv[1])
loaded = [registry.load(entry.path) for entry in registry.list() if entry.current]
print(len(loaded), time.perf_counter() - began)
print(*sorted({"sklearn", "lightgbm", "numba", "mlflow", "torch", "scipy", "pandas"} & set(sys.modules)))
"""


@dataclass(frozen=True)
class Figure:
    """One measured figure and the bound it has to keep, if any."""

    name: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None

    @property
    def kept(self) -> bool:
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    def __str__(self) -> str:
        sign, bound = ("≥", self.least) if self.least is not None else ("≤", self.most)
        goal = "" if bound is None else f"   ({sign} {bound:,.6g}: {'kept' if self.kept else 'MISSED'})"
        return f"{self.name:<58}{self.value:>14,.6g} {self.unit}{goal}"


def main() -> int:
    """Measure, print, and say by the exit code whether the bounds are kept."""
    chosen = arguments()
    predictor = load(chosen.predictor) if chosen.predictor else trained(chosen.store)
    figures: list[Figure] = []
    for measure in (batch, single, loading):
        figures += shown(measure(predictor, chosen.rows))
    if predictor.correction.forest is not None:
        figures += shown(rivals(predictor, chosen.lleaves))
    if chosen.json:
        Path(chosen.json).write_text(
            json.dumps([vars(each) | {"kept": each.kept} for each in figures], indent=1) + "\n"
        )
    return int(not all(each.kept for each in figures))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How fast predictors answer.")
    parser.add_argument("--predictor", help="the folder of a saved GEMM predictor")
    parser.add_argument("--store", help="a measurement store to train on; default: the reference measurements")
    parser.add_argument("--rows", type=int, default=1_000_000, help="distinct ops in a batch")
    parser.add_argument("--lleaves", action="store_true", help="compare with lleaves, too")
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args()


def shown(figures: list[Figure]) -> list[Figure]:
    print(*figures, sep="\n", flush=True)
    return figures


def trained(store: str | None) -> Predictor:
    """Boosted trees with the options of products, on every row of the largest table."""
    from accuracy_ops import imported, reference

    source = Store(store) if store else imported(str(reference()))
    device = load_device(DEVICE)
    table = max(tables("gemm", source.read("gemm", DEVICE), device), key=len)
    print(f"training on {len(table):,} rows of {table.backend}, {', '.join(np.unique(table.dtype))}", file=sys.stderr)
    return fitted(table)


def fitted(table: MeasurementTable) -> Predictor:
    """A predictor without evaluation: its interval is that of the rows it was fitted on."""
    options = Options().for_kind(table.kind)
    ops, names = table.frame(), feature_names(table.kind)
    task = task_of(table, ops, options)
    correction: Correction = options.lightgbm.fit(task, options.lightgbm.prepare(task))
    residual = task.target - correction.predict(ops.matrix)
    intervals = calibrate(residual, ops.analytical_us, classes_of(names, ops.matrix))
    card = {"n": len(table)}
    parts = correction, intervals, surround(ops.matrix, names)
    return Predictor(table.kind, table.device, table.backend, "1", *parts, card)


def shapes(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Distinct random products from a token to a large layer, sizes even in their logarithms."""
    rng = np.random.default_rng(seed)
    lowest = {"m": 0.0, "n": 6.0, "k": 6.0}
    sizes = {name: np.exp2(rng.uniform(low, 15.0, 2 * rows)).astype(np.int64) for name, low in lowest.items()}
    _, first = np.unique(np.stack(list(sizes.values())), axis=1, return_index=True)
    keep = np.sort(first)[:rows]
    ones = np.ones(len(keep), dtype=np.int64)
    return {"batch": ones, **{name: values[keep] for name, values in sizes.items()}, "layout": ones}


def batch(predictor: Predictor, rows: int) -> list[Figure]:
    """Products a second on all cores; numba is loaded before."""
    columns = shapes(rows)
    predictor.predict(columns, "bf16")
    wall, cpu = least(lambda: predictor.predict(columns, "bf16"))
    count = len(columns["m"])
    forest = predictor.correction.forest
    trees = [] if forest is None else [Figure("trees", forest.trees, ""), Figure("splits", len(forest.feature), "")]
    return [
        *trees,
        Figure("batch, two cores by CPU time", CORES * count / cpu, "predictions/s", least=1_000_000),
        Figure("batch, by the clock on the wall", count / wall, "predictions/s"),
        Figure("CPU time a prediction", cpu / count * 1e6, "us"),
    ]


def single(predictor: Predictor, rows: int) -> list[Figure]:
    """One op alone: not seen before, and seen before."""
    columns = shapes(400, seed=1)
    ops = [make_op("gemm", m=m, n=n, k=k) for m, n, k in zip(*(columns[name].tolist() for name in "mnk"), strict=True)]
    fresh = replace(predictor)
    new = [timed(fresh, op) for op in ops]
    again = [timed(fresh, op) for op in ops]
    return [
        Figure("one op, not seen before", statistics.median(new) * 1e6, "us", most=2000),
        Figure("one op, seen before", statistics.median(again) * 1e6, "us", most=20),
    ]


def timed(predictor: Predictor, op: Op) -> float:
    began = time.perf_counter()
    predictor.predict_ops([op])
    return time.perf_counter() - began


def loading(predictor: Predictor, rows: int) -> list[Figure]:
    """A dozen predictors of this size, as a device has, in a fresh interpreter; and what one takes on disk."""
    with tempfile.TemporaryDirectory() as folder:
        registry = Registry(folder)
        for index in range(KINDS_OF_A_DEVICE):
            path = registry.path(registry.register(replace(predictor, backend=f"kind-{index}")))
        size = (path / MODEL).stat().st_size
        done = subprocess.run([sys.executable, "-c", LOADING, folder], capture_output=True, text=True, check=True)
    count, seconds, *heavy = done.stdout.split()
    return [
        Figure(f"loading {count} predictors", float(seconds) * 1e3, "ms", most=1000),
        Figure("heavy packages imported for it", len(heavy), "", most=0),
        Figure("one on disk", size / 1024, "KiB", most=131),
    ]


def rivals(predictor: Predictor, with_lleaves: bool) -> list[Figure]:
    """Time of a walk through 250 trees of 63 leaves, others' over ours, one thread each."""
    import lightgbm

    from opcast.models.features import frame

    matrix = frame(OpColumns("gemm", shapes(50_000), "bf16", None), predictor.device).matrix
    target = predictor.correction.predict(matrix)
    options: dict[str, Any] = {"num_leaves": 63, "verbosity": -1, "num_threads": 1, "deterministic": True, "seed": 0}
    booster = lightgbm.train(options, lightgbm.Dataset(matrix, target), 250)
    forest = from_lightgbm(booster)
    ours = least(lambda: forest.predict(matrix, True))[1]
    apart = np.abs(forest.predict(matrix, True) - booster.predict(matrix, num_threads=1)).max()
    found = [Figure("walk: largest difference from LightGBM, ln", float(apart), "", most=1e-3)]
    found.append(over("LightGBM", lambda: booster.predict(matrix, num_threads=1), ours, 3.0))
    found.append(over("numpy, without numba", lambda: forest.predict(matrix[:5000], False), ours / 10, None))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/booster.txt"
        booster.save_model(path)
        try:
            import treelite
        except ImportError:
            print("treelite is not installed", file=sys.stderr)
        else:
            model = treelite.frontend.load_lightgbm_model(path)
            found.append(over("treelite", lambda: treelite.gtil.predict(model, matrix, nthread=1), ours, 3.0))
        if with_lleaves:
            import lleaves

            quick = lleaves.Model(model_file=path)
            quick.compile()
            doubles = matrix.astype(np.float64)
            found.append(over("lleaves", lambda: quick.predict(doubles, n_jobs=1), ours, 1.0))
    return found


def over(name: str, walk: Callable[[], object], ours: float, least_ratio: float | None) -> Figure:
    return Figure(f"walk: {name}, times ours", least(walk)[1] / ours, "x", least=least_ratio)


def least(work: Callable[[], object], repeats: int = 5) -> tuple[float, float]:
    """The shortest time by the wall and the least CPU time of some runs, in seconds."""
    work()
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls), min(cpus)


if __name__ == "__main__":
    raise SystemExit(main())
