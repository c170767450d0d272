"""Active campaigns against random and gridded ones of the same budget, on tables that others measured.

    python tests/benchmarks/active.py STORE [--device ID …] [--kind KIND …] [--points N …] [--seeds S]

STORE holds measurements (``opcast import source=aiconfigurator store=STORE``). Of each table (the default backend's)
whole sites (n and k of products, heads of attention) of one fold of four are held out; from the others each strategy
takes its points and the same procedure learns them (``models/learning.py``). *active* is ``models/active.py`` in rounds
and asked for all rows alike (first figures) or for the shapes of Llama-3 and of Qwen3-MoE (steps). *random* draws rows;
*grid* takes every dim at values spread evenly. Errors are medians in percent over the held-out rows; of steps, the
error of a sum of times over the table's rows nearest to the shapes of each step, all of held-out sites or not.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from opcast.datasets.devices import load_device
from opcast.datasets.store import Store
from opcast.models.active import Subject, plan_round
from opcast.models.candidates import Options
from opcast.models.features import feature_names
from opcast.models.splits import split
from opcast.models.table import MeasurementTable, default_backend, tables
from opcast.models.training import fit
from opcast.models.transfer import FEW

ROUNDS = 5
MOST = 3000  # candidates of a table
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
LLAMA = {
    1: ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    8: ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)),
}
MOE = {
    1: ((5120, 2048), (2048, 4096), (1536, 2048), (2048, 768)),
    4: ((1280, 2048), (2048, 1024), (384, 2048), (2048, 192)),
}


def sizes(table: MeasurementTable) -> np.ndarray:
    return np.stack([np.log2(np.maximum(values, 0.5)) for values in table.columns.values()], axis=1)


def steps(table: MeasurementTable) -> list[np.ndarray]:
    """Positions of rows that stand for the products of a step of Llama-3 (8B, 70B) or Qwen3-MoE, a step for each m."""
    if table.kind != "gemm":
        return []
    place = np.stack([np.log2(np.maximum(table.columns[name], 0.5)) for name in ("m", "n", "k")], axis=1)
    wide = np.isin(table.dtype, ["bf16", "fp16"])
    place[~wide] = 1e6
    found = []
    for sites in (*LLAMA.values(), *MOE.values()):
        for tokens in TOKENS:
            wanted = np.log2([(tokens, n, k) for n, k in sites])
            found.append(np.array([int(np.argmin(((place - each) ** 2).sum(axis=1))) for each in wanted]))
    return found


def active(table: MeasurementTable, asked: MeasurementTable, share: np.ndarray, points: int, seed: int) -> np.ndarray:
    """Rows of the table that rounds of an active campaign take."""
    names = feature_names(table.kind)
    ops, wanted = table.frame(), asked.frame()
    target = np.log(table.latency_us / ops.analytical_us)
    seen = np.zeros(0, dtype=np.int64)
    while len(seen) < points:
        rest = np.setdiff1d(np.arange(len(table)), seen)
        known = ops.matrix[seen], target[seen]
        subject = Subject(names, ops.matrix[rest], np.ones(len(rest)), wanted.matrix, share, *known, seed)
        count = min(max(points // ROUNDS, 10), points - len(seen))
        picks = plan_round({table.kind: subject}, count).picks.get(table.kind, ())
        if not len(picks):
            break
        seen = np.concatenate([seen, rest[np.array(picks)]])
    return np.sort(seen)


def random(table: MeasurementTable, points: int, seed: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).permutation(len(table))[:points])


def grid(table: MeasurementTable, points: int, seed: int) -> np.ndarray:
    """Rows nearest to the nodes of a regular grid over the dims that vary, as fine as the budget allows."""
    place = sizes(table)
    place = place[:, place.std(axis=0) > 0]
    ranks = (place - place.min(axis=0)) / np.ptp(place, axis=0)
    dims = ranks.shape[1]
    steps_of = [max(2, round(points ** (1 / dims)))] * dims
    while np.prod(steps_of) < points:
        steps_of[int(np.argmin(steps_of))] += 1
    axes = np.meshgrid(*(np.linspace(0, 1, count) for count in steps_of), indexing="ij")
    nodes = np.stack([each.ravel() for each in axes], axis=1)
    nodes = nodes[np.random.default_rng(seed).permutation(len(nodes))]
    taken: dict[int, None] = {}
    free = np.ones(len(ranks), dtype=bool)
    for node in nodes:
        away = np.where(free, ((ranks - node) ** 2).sum(axis=1), np.inf)
        position = int(np.argmin(away))
        free[position] = False
        taken[position] = None
        if len(taken) == points:
            break
    return np.sort(np.array(list(taken)))


def judged(
    table: MeasurementTable, seen: np.ndarray, held: MeasurementTable, asked: list[MeasurementTable]
) -> tuple[float, float]:
    """Median error over held-out rows, and of the sums of steps, in percent."""
    options = dataclasses.replace(Options(), candidates=FEW)
    made = fit(table.take(seen), options).predictor
    found = made.predict_frame(held.frame()).latency_us
    error = float(100 * np.median(np.abs(found / held.latency_us - 1)))
    sums = [abs(made.predict_frame(each.frame()).latency_us.sum() / each.latency_us.sum() - 1) for each in asked]
    return error, float(100 * np.mean(sums)) if sums else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--device", nargs="*", default=["h100_sxm", "a100_sxm_80gb"])
    parser.add_argument("--kind", nargs="*", default=["gemm", "attention_prefill", "attention_decode"])
    parser.add_argument("--points", nargs="*", type=int, default=[50, 100, 200, 400])
    parser.add_argument("--seeds", type=int, default=2)
    asked = parser.parse_args()
    store = Store(asked.store)
    print("| kind | device | points | active | random | grid | steps: active | random | grid |\n" + "| --- " * 9 + "|")
    for kind in asked.kind:
        for device_id in asked.device:
            for points in asked.points:
                print(compare(store, kind, device_id, points, asked.seeds), flush=True)


def compare(store: Store, kind: str, device_id: str, points: int, seeds: int) -> str:
    own = tables(kind, store.read(kind, device_id), load_device(device_id))
    table = next(each for each in own if each.backend == default_backend(own))
    table = table.take(np.flatnonzero(np.isin(table.dtype, ["bf16", "fp16"])))
    fold = split(kind, table.columns, 4, 0).fold
    shapes = steps(table)
    errors: dict[str, list[tuple[float, float]]] = {}
    for seed in range(seeds):
        draw = np.random.default_rng(seed)
        some = np.sort(draw.permutation(np.flatnonzero(fold != 0))[:MOST])
        held = table.take(np.sort(draw.permutation(np.flatnonzero(fold == 0))[:MOST]))
        given = table.take(some)
        wanted = [table.take(each) for each in shapes]
        strategies: Mapping[str, Callable[[], np.ndarray]] = {
            "active": lambda: active(given, given.take(random(given, 400, 7)), np.full(400, 1 / 400), points, seed),  # noqa: B023
            "random": lambda: random(given, points, seed),  # noqa: B023
            "grid": lambda: grid(given, points, seed),  # noqa: B023
        }
        for name, choose in strategies.items():
            errors.setdefault(name, []).append(judged(given, choose(), held, wanted))
        if shapes:
            rows = np.unique(np.concatenate(shapes))
            step = table.take(rows)
            share = step.latency_us / step.latency_us.sum()
            both = judged(given, active(given, step, share, points, seed), held, wanted)
            errors.setdefault("steps", []).append(both)
    means = {name: np.mean(each, axis=0) for name, each in errors.items()}
    cells = [f"{means[name][0]:.1f}" for name in ("active", "random", "grid")]
    cells += [
        f"{means[name][1]:.1f}" if shapes else "" for name in ("steps", "random", "grid") if name in means or not shapes
    ]
    return f"| {kind} | {device_id} | {points} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
