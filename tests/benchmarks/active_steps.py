"""Active campaigns against random and gridded ones of the same budget, judged by whole steps of Llama-3 and Qwen3-MoE.

    python tests/benchmarks/active_steps.py STORE [--device ID …] [--points N …] [--seeds S]

STORE holds measurements (``opcast import source=aiconfigurator store=STORE``). A step is all that SGLang's tables have
of it: products, attention and experts of every layer, for prompts and for generated tokens; norms and activations are
in no table. Rows that stand for a step are never candidates, nor are sites of one fold of four. One budget is shared
out over all kinds: *active* by ``models/active.py`` in rounds, asked for these steps; *random* over all candidates
alike; *grid* evenly over kinds. The same procedure learns what each took. Printed is the mean error of the steps in
percent.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from opcast.datasets.devices import load_device
from opcast.datasets.store import Store
from opcast.models.active import Subject, plan_round
from opcast.models.candidates import Options
from opcast.models.features import feature_names
from opcast.models.splits import split
from opcast.models.table import MeasurementTable, tables
from opcast.models.training import fit
from opcast.models.transfer import FEW
from opcast.tests.benchmarks.active import ROUNDS, grid

BACKENDS = {
    "h100_sxm": ("sglang_torch_linear", "fa3", "fa3", "sglang-0.5.14:sglang_fused_moe_triton"),
    "a100_sxm_80gb": ("sglang-0.5.10:sglang", "flash_attention", "flash_attention", "sglang_fused_moe_triton"),
}
KINDS = ("gemm", "attention_prefill", "attention_decode", "fused_moe")
MOST, LEAST = 1500, 5  # candidates of a kind; rows that can be learned
PROMPTS, BATCHES, CONTEXTS = (512, 2048, 8192), (1, 8, 32, 128), (512, 2048, 8192)


@dataclass(frozen=True)
class Layer:
    """One layer of a model on one of ``tp`` devices: (n, k) of products, heads and, of a mixture, its experts."""

    products: tuple[tuple[int, int], ...]
    heads_q: int
    heads_kv: int
    experts: Mapping[str, int] | None = None


MODELS = {
    "llama3_8b": Layer(((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), 32, 8),
    "llama3_70b TP 8": Layer(((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)), 8, 1),
    "qwen3_30b_a3b": Layer(
        ((5120, 2048), (2048, 4096)), 32, 4, {"hidden": 2048, "inter": 768, "topk": 8, "experts": 128, "tp": 1, "ep": 1}
    ),
}
Wanted = tuple[str, dict[str, int]]


def step_ops(layer: Layer) -> list[list[Wanted]]:
    """The ops of a layer in every step: prompts by length, decoding by batch and context."""
    heads = {"heads_q": layer.heads_q, "heads_kv": layer.heads_kv, "head_dim": 128, "v_head_dim": 128}
    found = []
    for tokens in PROMPTS:
        attention = {"batch": 1, **heads, "seq_q": tokens, "seq_kv": tokens, "causal": 1}
        found.append([*linear(layer, tokens), ("attention_prefill", attention)])
    for batch in BATCHES:
        for context in CONTEXTS:
            attention = {"batch": batch, **heads, "seq_q": 1, "seq_kv": context}
            found.append([*linear(layer, batch), ("attention_decode", attention)])
    return found


def linear(layer: Layer, tokens: int) -> list[Wanted]:
    made: list[Wanted] = [("gemm", {"m": tokens, "n": n, "k": k}) for n, k in layer.products]
    return made + ([("fused_moe", {"tokens": tokens, **layer.experts})] if layer.experts else [])


def nearest(table: MeasurementTable, wanted: Mapping[str, int]) -> int:
    """The row nearest in logs of what is wanted; what is not named is as in most rows."""
    away = np.zeros(len(table))
    for name, values in table.columns.items():
        if name in wanted:
            away += np.log2(np.maximum(values, 0.5) / max(wanted[name], 0.5)) ** 2
        else:
            each, count = np.unique(values, return_counts=True)
            away += 100.0 * (values != each[int(np.argmax(count))])
    return int(np.argmin(away))


@dataclass(frozen=True)
class World:
    """A device: the table of each kind, its candidates, and for each step the rows that stand for it, by kind."""

    all: Mapping[str, MeasurementTable]
    given: Mapping[str, MeasurementTable]
    steps: tuple[Mapping[str, np.ndarray], ...]

    def asked(self, kind: str) -> tuple[MeasurementTable, np.ndarray]:
        """Distinct rows of the steps, and their share of the steps' time, each step weighing the same."""
        shares: dict[int, float] = {}
        for step in self.steps:
            whole = sum(self.all[each].latency_us[rows].sum() for each, rows in step.items())
            for row in step.get(kind, np.zeros(0, int)).tolist():
                shares[row] = shares.get(row, 0.0) + self.all[kind].latency_us[row] / whole / len(self.steps)
        return self.all[kind].take(np.array(list(shares))), np.array(list(shares.values()))


def world(store: Store, device_id: str, seed: int) -> World:
    """Candidates differ by seed, steps do not."""
    found = {}
    for kind, name in zip(KINDS, BACKENDS[device_id], strict=True):
        own = tables(kind, store.read(kind, device_id), load_device(device_id))
        table = next(each for each in own if each.backend.startswith("sglang") and each.backend.endswith(name))
        found[kind] = table.take(np.flatnonzero(table.dtype == "bf16"))
    steps = []
    for layer in MODELS.values():
        for ops in step_ops(layer):
            rows: dict[str, list[int]] = {}
            for kind, wanted in ops:
                rows.setdefault(kind, []).append(nearest(found[kind], wanted))
            steps.append({kind: np.array(each) for kind, each in rows.items()})
    given = {}
    for kind, table in found.items():
        own_rows = np.unique(np.concatenate([step[kind] for step in steps if kind in step]))
        free = np.setdiff1d(np.flatnonzero(split(kind, table.columns, 4, 0).fold != 0), own_rows)
        given[kind] = table.take(np.sort(np.random.default_rng(seed).permutation(free)[:MOST]))
    return World(found, given, tuple(steps))


def active(made: World, points: int, seed: int) -> dict[str, np.ndarray]:
    seen = {kind: np.zeros(0, dtype=np.int64) for kind in KINDS}
    frames = {kind: table.frame() for kind, table in made.given.items()}
    asked = {kind: made.asked(kind) for kind in KINDS}
    left = points
    while left > 0:
        subjects, rest = {}, {}
        for kind, ops in frames.items():
            rest[kind] = np.setdiff1d(np.arange(len(ops.matrix)), seen[kind])
            target = np.log(made.given[kind].latency_us[seen[kind]] / ops.analytical_us[seen[kind]])
            wanted, share = asked[kind]
            known = ops.matrix[seen[kind]], target
            free = ops.matrix[rest[kind]], np.ones(len(rest[kind]))
            subjects[kind] = Subject(feature_names(kind), *free, wanted.frame().matrix, share, *known, seed)
        picks = plan_round(subjects, min(max(points // ROUNDS, 10), left)).picks
        if not picks:
            break
        for kind, chosen in picks.items():
            seen[kind] = np.concatenate([seen[kind], rest[kind][np.array(chosen)]])
            left -= len(chosen)
    return {kind: np.sort(rows) for kind, rows in seen.items()}


def random(made: World, points: int, seed: int) -> dict[str, np.ndarray]:
    ends = np.cumsum([0, *(len(made.given[kind]) for kind in KINDS)])
    rows = np.sort(np.random.default_rng(seed).permutation(ends[-1])[:points])
    return {kind: rows[(rows >= a) & (rows < b)] - a for kind, a, b in zip(KINDS, ends[:-1], ends[1:], strict=True)}


def gridded(made: World, points: int, seed: int) -> dict[str, np.ndarray]:
    return {kind: grid(made.given[kind], points // len(KINDS), seed) for kind in KINDS}


def error(made: World, seen: Mapping[str, np.ndarray]) -> float:
    """Mean error of the steps in percent; a kind of too few rows is answered by physics and one factor."""
    options, found = dataclasses.replace(Options(), candidates=FEW), {}
    for kind, table in made.all.items():
        rows = np.unique(np.concatenate([step[kind] for step in made.steps if kind in step]))
        ops, known = table.take(rows).frame(), made.given[kind].take(seen[kind])
        if len(known) >= LEAST:
            latency = fit(known, options).predictor.predict_frame(ops).latency_us
        else:
            ratio = known.latency_us / known.frame().analytical_us if len(known) else np.ones(1)
            latency = ops.analytical_us * np.median(ratio)
        found[kind] = dict(zip(rows.tolist(), latency.tolist(), strict=True))
    errors = []
    for step in made.steps:
        told = sum(found[kind][row] for kind, rows in step.items() for row in rows.tolist())
        errors.append(abs(told / sum(made.all[kind].latency_us[rows].sum() for kind, rows in step.items()) - 1))
    return float(100 * np.mean(errors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--device", nargs="*", default=list(BACKENDS))
    parser.add_argument("--points", nargs="*", type=int, default=[50, 100, 200, 400])
    parser.add_argument("--seeds", type=int, default=2)
    asked = parser.parse_args()
    print("| device | points | active | random | grid |\n" + "| --- " * 5 + "|", flush=True)
    for device_id in asked.device:
        worlds = [world(Store(asked.store), device_id, seed) for seed in range(asked.seeds)]
        for points in asked.points:
            cells = []
            for choose in (active, random, gridded):
                errors = [error(made, choose(made, points, seed)) for seed, made in enumerate(worlds)]
                cells.append(f"{np.mean(errors):.1f}")
            print(f"| {device_id} | {points} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
