"""How far predictions of GPU operators are from measurements that no model saw, beside the figures to reach.

    python tests/benchmarks/accuracy_ops.py [--store STORE] [--data FOLDER] [--device ID …] [--kind KIND …] [--quick]
                                            [--json FILE]

Reads a measurement store; without one, imports the reference measurements once (NVIDIA's aiconfigurator tables, by
default from the folder of reference data beside the checkout) into a cache folder. For each target, device and
backend it runs the split that the target names and prints median, mean and p90 error of the rows held out, coverage
of the 90 % intervals, and the errors of four answers that need no learning, fitted on the same rows. ``--quick``: one
device, the largest table of each target, thinned to 12,000 rows by whole groups. Exit code 1 when nothing could be
scored.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opcast.datasets.devices import load_device
from opcast.datasets.store import Store
from opcast.models.candidates import Options
from opcast.models.evaluation import evaluate, summarise
from opcast.models.learning import learn
from opcast.models.splits import split
from opcast.models.table import MeasurementTable, TrainingError, tables

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ("h100_sxm", "h200_sxm", "b200_sxm")
QUICK_ROWS = 12_000
SMALL = 60  # tables with fewer rows say nothing about a target
METRICS = ("median_ape", "mean_ape", "p90_ape")
PEERS = ("roofline", "calibrated_roofline", "log_log", "nearest")
DENSE = ("bf16", "fp8", "fp8_block")


@dataclass(frozen=True)
class Target:
    """What is asked of one kind under one split: errors to reach, in percent; of some dtypes and backends only."""

    name: str
    kind: str
    mode: str
    split: str
    median: float
    mean: float
    p90: float | None = None
    dtypes: tuple[str, ...] = ()
    backends: str = ""


TARGETS = (
    Target("GEMM, unseen (n, k)", "gemm", "groups", "groups", 2.0, 3.0, 7.0, DENSE),
    Target("GEMM, n > 8192 unseen", "gemm", "extrapolate", "extrapolate n", 4.0, 7.0, None, DENSE),
    Target("context attention, unseen heads", "attention_prefill", "groups", "groups", 1.5, 2.5),
    Target("generation attention, unseen heads", "attention_decode", "groups", "groups", 1.2, 2.0),
    Target("generation attention, unseen head_dim", "attention_decode", "head_dim", "head_dim", 4.0, 6.0),
    Target("MLA prefill", "mla_prefill", "groups", "groups", 2.0, 4.0),
    Target("MLA decode", "mla_decode", "groups", "groups", 2.0, 4.0),
    Target("MoE, seen models", "fused_moe", "random", "random", 2.2, 3.2),
    Target("MoE, unseen model shapes", "fused_moe", "groups", "groups", 8.0, 14.0),
    Target("MoE, tokens beyond", "fused_moe", "extrapolate", "extrapolate tokens", 10.0, 14.0),
    *(
        target
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for target in (
            Target(f"NCCL {kind}, unseen sizes", kind, "groups", "groups", 3.0, 5.0, backends="nccl-"),
            Target(
                f"NCCL {kind}, above 64 MiB", kind, "extrapolate", "extrapolate size_bytes", 4.0, 6.0, backends="nccl-"
            ),
            Target(f"NCCL {kind}, unseen ranks", kind, "ranks", "ranks", 10.0, 13.0, backends="nccl-"),
        )
    ),
)
ACROSS = (
    Target("GEMM, new device, no rows", "gemm", "device", "device+0", 15.0, 20.0),
    Target("GEMM, new device, 200 rows", "gemm", "device", "device+200", 6.0, 9.0),
)


def main() -> int:
    """Score every target and print the table; returns the exit code."""
    chosen = arguments()
    store = Store(chosen.store) if chosen.store else imported(chosen.data)
    wanted = [target for target in TARGETS if not chosen.kind or target.kind in chosen.kind]
    devices = chosen.device or (DEVICES[:1] if chosen.quick else DEVICES)
    found: list[dict[str, Any]] = []
    print(header(), flush=True)
    for device in devices:
        for kind in dict.fromkeys(target.kind for target in wanted):
            found += scored(store, device, [target for target in wanted if target.kind == kind], chosen.quick)
    if not chosen.quick and (not chosen.kind or "gemm" in chosen.kind):
        found += across(store)
    print(summary(found))
    if chosen.json:
        Path(chosen.json).write_text(json.dumps({"results": found}, indent=1) + "\n")
    return int(not found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Errors of op predictions on rows held out, beside targets.")
    parser.add_argument("--store", help="a measurement store; default: import the reference measurements once")
    parser.add_argument("--data", default=str(reference()), help="folder with aiconfigurator's tables")
    parser.add_argument("--device", nargs="*", help=f"default: {' '.join(DEVICES)}")
    parser.add_argument("--kind", nargs="*", help="op kinds, default: all that a target names")
    parser.add_argument("--quick", action="store_true", help="one device, the largest table of each target, thinned")
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args()


def reference() -> Path:
    """The folder of reference measurements: $OPCAST_REFERENCE, else beside the checkout."""
    return Path(os.environ.get("OPCAST_REFERENCE") or ROOT.parent / "shared") / "data" / "aiconfigurator"


def imported(folder: str) -> Store:
    """A store of the reference measurements in the user's cache; importing twice adds nothing."""
    from opcast.datasets.sources.importing import import_into

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opcast" / "reference-store"
    store = Store(cache)
    print(f"importing {folder} into {cache}", file=sys.stderr, flush=True)
    import_into(store, "aiconfigurator", folder)
    return store


def scored(store: Store, device: str, targets: list[Target], quick: bool) -> Iterator[dict[str, Any]]:
    """Every target of one kind on one device: a result per backend, printed as it comes."""
    kind = targets[0].kind
    if device not in store.devices(kind):
        return
    made = [each for each in tables(kind, store.read(kind, device), load_device(device)) if len(each) >= SMALL]
    made = [each for each in made if any(each.backend.startswith(target.backends) for target in targets)]
    for table in [thinned(max(made, key=len))] if quick and made else made:
        yield from of_table(table, [target for target in targets if table.backend.startswith(target.backends)])


def thinned(table: MeasurementTable) -> MeasurementTable:
    """Whole groups of a table, about 12,000 rows."""
    parts = max(1, round(len(table) / QUICK_ROWS))
    folds = split(table.kind, table.columns, parts, seed=7)
    return table.take(np.flatnonzero((folds.fold == 0) | (folds.fold == -1))) if parts > 1 else table


def of_table(table: MeasurementTable, targets: list[Target]) -> Iterator[dict[str, Any]]:
    """The targets of one table; it is learned once for all of them."""
    options = Options().for_kind(table.kind)
    ops = table.frame()
    learned = learn(table, ops, options)
    for target in targets:
        began = time.perf_counter()
        reports, crossed = evaluate(table, ops, options, target.mode, learned)
        if target.split not in crossed:
            continue
        answers, report = crossed[target.split], reports[target.split]
        asked = np.isin(table.dtype[answers.rows], target.dtypes) if target.dtypes else np.ones(len(answers.rows), bool)
        if asked.sum() < SMALL // 2:
            continue
        result = {
            "target": target.name,
            "device": table.device.id,
            "backend": table.backend,
            "rows": int(asked.sum()),
            **summarise(answers.residual[asked]),
            "coverage": float(np.mean(answers.inside[asked])),
            "interval_width": report["interval_width"],
            "goal": {"median_ape": target.median, "mean_ape": target.mean, "p90_ape": target.p90},
            "reached": reached(target, summarise(answers.residual[asked])),
            "split": report["split"],
            "chosen": learned.chosen,
            "baselines": report["baselines"],
            "by_dtype": report["by_dtype"],
            "wall_s": time.perf_counter() - began,
        }
        print(line(result), flush=True)
        yield result


def across(store: Store) -> Iterator[dict[str, Any]]:
    """A B200 from the other devices, with none and with 200 of its rows."""
    from opcast.models.transfer import evaluate_device

    try:
        reports = evaluate_device(store, "gemm", load_device("b200_sxm"), Options().for_kind("gemm"))
    except TrainingError as error:
        print(f"across devices: {error}", file=sys.stderr)
        return
    for target in ACROSS:
        if target.split in reports:
            report = reports[target.split]
            result = {
                "target": target.name,
                "device": "b200_sxm",
                "backend": "all",
                "rows": report["n"],
                **report,
                "goal": {"median_ape": target.median, "mean_ape": target.mean, "p90_ape": None},
                "reached": reached(target, report),
                "baselines": report.get("baselines", {}),
            }
            print(line(result), flush=True)
            yield result


def reached(target: Target, figures: dict[str, Any]) -> bool:
    """Whether median, mean and, where it is asked, p90 are within the target."""
    goals = dict(zip(METRICS, (target.median, target.mean, target.p90), strict=True))
    return all(figures[name] <= goal for name, goal in goals.items() if goal is not None)


def header() -> str:
    peers = " ".join(f"{name:>13}" for name in ("roofline", "calibrated", "log-log", "nearest"))
    figures = f"{'rows':>7} {'goal':>9} {'median':>7} {'mean':>6} {'p90':>6} {'cover':>6}"
    return f"{'target':38} {'device':9} {'backend':52} {figures}  {'':3} {peers}  (median/mean APE, %)"


def line(result: dict[str, Any]) -> str:
    """One row of the table."""
    goal = f"{result['goal']['median_ape']:g}/{result['goal']['mean_ape']:g}"
    errors = f"{result['median_ape']:7.2f} {result['mean_ape']:6.2f} {result['p90_ape']:6.1f}"
    peers = " ".join(
        f"{result['baselines'][name]['median_ape']:6.1f}/{result['baselines'][name]['mean_ape']:6.1f}"
        for name in PEERS
        if name in result["baselines"]
    )
    cover = f"{100 * result['coverage']:5.1f}%" if "coverage" in result else ""
    sign = "ok" if result["reached"] else "-"
    place = f"{result['target'][:38]:38} {result['device']:9} {result['backend'][:52]:52} {result['rows']:7d}"
    return f"{place} {goal:>9} {errors} {cover:>6}  {sign:3} {peers}"


def summary(found: list[dict[str, Any]]) -> str:
    """For each target: how many tables reach it, and the figures pooled by rows."""
    lines = ["", f"{'target':38} {'reached':>8} {'goal':>9}  median/mean APE over all tables, weighted by rows"]
    for name in dict.fromkeys(result["target"] for result in found):
        own = [result for result in found if result["target"] == name]
        rows = np.array([result["rows"] for result in own], dtype=np.float64)
        median, mean = (float(np.average([result[each] for result in own], weights=rows)) for each in METRICS[:2])
        goal = f"{own[0]['goal']['median_ape']:g}/{own[0]['goal']['mean_ape']:g}"
        lines.append(f"{name:38} {sum(r['reached'] for r in own):3d}/{len(own):<4d} {goal:>9}  {median:.2f}/{mean:.2f}")
    held = [result["coverage"] for result in found if result.get("split", "").find("grouped") >= 0]
    if held:
        off = [abs(100 * each - 90) for each in held]
        lines.append(
            f"coverage on grouped splits: {100 * np.mean(held):.1f} %, worst table off by {max(off):.1f} points"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
