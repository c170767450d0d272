"""How far answers for a device that nobody measured are off: each measured device left out, answered by its kin.

    python tests/benchmarks/transfer.py STORE [--kind KIND …] [--rows N] [--write]

STORE holds measurements of several devices (``opcast import source=aiconfigurator store=STORE``); the predictors are
those that come with opcast. For each kind, device, framework and format, rows of the backend that would have answered
(the largest, where a device has no predictor) are answered by each tier of kin alone (``models/kinship.py``): devices
of the same die, of the same generation but another die, of the vendor but another generation. Whole shapes are parted
in two halves: intervals come from one, what is printed from the other, and of a device only with intervals from the
other devices. ``--write`` puts intervals and errors into ``models/shipped/kinship.json``, without intervals where a
tier is no nearer to the truth than physics.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opcast.datasets.backends import framework
from opcast.datasets.devices import Device, load_device
from opcast.datasets.store import Store
from opcast.models.features import alike
from opcast.models.intervals import COVERAGE, Intervals, calibrate, calibrate_grouped
from opcast.models.kinship import ERRORS, TIERS, Kin, tier, voices
from opcast.models.registry import Registry
from opcast.models.splits import split
from opcast.models.table import MeasurementTable, tables
from opcast.simulator.engines.transfer import learned_places

SHIPPED = Registry(Path(__file__).resolve().parents[2] / "models" / "shipped")
FRAMEWORKS = ("nccl", "vllm", "trtllm", "sglang", "torch", "vidur")
KINDS = (
    *("gemm", "attention_prefill", "attention_decode", "mla_prefill", "mla_decode", "fused_moe", "quantize"),
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ep_dispatch", "ep_combine"),
    *("elementwise", "gelu", "layer_norm", "softmax"),
)
UNKNOWN = Intervals(COVERAGE, np.zeros(0), np.zeros((1, 0)), np.ones((1, 1)))
NEARER = 0.9  # of the law's error, which kin must be below to answer in its place
LEAST = 30  # rows of a table that say something


@dataclass(frozen=True)
class Left:
    """Rows of a device that was left out: ln(measured / answered) by kin of one tier and by the law alone, each [n]."""

    device: str
    table: str
    tier: str
    kin: np.ndarray
    law: np.ndarray
    analytical_us: np.ndarray
    judged: np.ndarray  # whether a row is of the half that is printed


def left_out(store: Store, kind: str, rows: int) -> Iterator[Left]:
    """Every device, framework and format of a kind by each tier of kin."""
    for device_id in store.devices(kind):
        device = load_device(device_id)
        made = {table.backend: table for table in tables(kind, store.read(kind, device_id), device)}
        for name in FRAMEWORKS:
            own = [table for table in made.values() if framework(table.backend) == name]
            for dtype in sorted({alike(str(each)) for table in own for each in np.unique(table.dtype)}):
                backend = SHIPPED.learned(kind, device_id, name, dtype)
                table = made[backend] if backend in made else max(own, key=lambda each: _of(each, dtype).sum())
                yield from _answered(device, table, name, dtype, rows)


def _answered(device: Device, table: MeasurementTable, name: str, dtype: str, most: int) -> Iterator[Left]:
    fold = split(table.kind, table.columns, 6, 0).fold
    own = np.flatnonzero(_of(table, dtype))
    own = np.sort(np.random.default_rng(0).permutation(own)[:most])
    part = table.take(own)
    if len(part) < LEAST:
        return
    ops = part.frame()
    law = np.log(part.latency_us / ops.analytical_us)
    places = learned_places([SHIPPED], table.kind, dtype, name, None)
    for level in TIERS:
        near = [each for each in places if tier(device, each[0], dtype) == level]
        heard = voices(device, [each for each, *_ in near], dtype)[1]
        found = {each.id: registry.find(table.kind, each.id, backend) for each, registry, backend in near}
        predictors = [made for key in heard if (made := found[key]) is not None]
        if predictors:
            kin = Kin(level, predictors, list(heard.values()), dtype, UNKNOWN)
            judged = np.maximum(fold[own], 0) % 2 == 1
            asked = table.kind, part.columns, dtype, dtype
            short = kin.correction(ops, kin.laws(ops, asked, "warm"), asked, device, "warm")
            yield Left(device.id, f"{name} {dtype}", level, law - short, law, ops.analytical_us, judged)


def _of(table: MeasurementTable, dtype: str) -> np.ndarray:
    """Which rows are in a format."""
    return np.isin(table.dtype, [name for name in np.unique(table.dtype) if alike(str(name)) == dtype])


def interval(parts: Sequence[Left]) -> Intervals:
    """From the half that is not judged; of several devices so that each is covered by the others' intervals."""
    chosen = [~each.judged for each in parts]
    residual = np.concatenate([each.kin[rows] for each, rows in zip(parts, chosen, strict=True)])
    size = np.concatenate([each.analytical_us[rows] for each, rows in zip(parts, chosen, strict=True)])
    names = np.concatenate([np.full(rows.sum(), each.device) for each, rows in zip(parts, chosen, strict=True)])
    fold = np.unique(names, return_inverse=True)[1]
    none = np.zeros(len(residual))
    several = fold.max() > 0
    return calibrate_grouped(residual, size, none, fold) if several else calibrate(residual, size, none)


def scores(parts: Sequence[Left]) -> dict[str, Any]:
    """Errors in percent on the judged half, by device the median over its tables; coverage by the others' intervals."""
    by_device: dict[str, dict[str, float]] = {}
    for device in sorted({each.device for each in parts}):
        own = [each for each in parts if each.device == device]
        others = [each for each in parts if each.device != device]
        kin = np.concatenate([each.kin[each.judged] for each in own])
        size = np.concatenate([each.analytical_us[each.judged] for each in own])
        found = {
            "rows": len(kin),
            "median": _median(kin),
            "worst_table": max(_median(each.kin[each.judged]) for each in own),
            "law": _median(np.concatenate([each.law[each.judged] for each in own])),
        }
        if others:
            width = interval(others).widths(size, np.zeros(len(size)), np.zeros(len(size)))
            found |= {"coverage": float(np.mean(np.abs(kin) <= width)), "width": float(np.median(np.expm1(width)))}
        by_device[device] = {name: round(value, 3) for name, value in found.items()}
    return by_device


def _median(residual: np.ndarray) -> float:
    return float(100.0 * np.median(np.abs(np.expm1(-residual)))) if len(residual) else float("nan")


def nearer(parts: Sequence[Left]) -> bool:
    """Whether kin are nearer to the truth than the law, on the half that is not judged, a device one voice."""
    devices = sorted({each.device for each in parts})

    def error(name: str) -> float:
        own = ([getattr(each, name)[~each.judged] for each in parts if each.device == device] for device in devices)
        return float(np.mean([_median(np.concatenate(each)) for each in own]))

    return error("kin") < NEARER * error("law")


def told(parts: Sequence[Left]) -> dict[str, Any]:
    """What ``kinship.json`` says of a kind and tier."""
    out: dict[str, Any] = {"devices": scores(parts)}
    if nearer(parts):
        made = interval(parts)
        names = ("coverage", "edges", "half_width")
        arrays = {name: np.minimum(made.arrays()[name], 1e30).round(4) for name in names}
        out["intervals"] = {name: (each[-1:] if each.ndim else each).tolist() for name, each in arrays.items()}
    return out


def show(kind: str, level: str, made: Mapping[str, Any]) -> None:
    found = made["devices"]
    mean = np.mean([each["median"] for each in found.values()])
    law = np.mean([each["law"] for each in found.values()])
    covered = [each["coverage"] for each in found.values() if "coverage" in each]
    held = f"{np.mean(covered):.0%}" if covered else "-"
    each = ", ".join(f"{name} {one['median']:.1f}" for name, one in found.items())
    used = "" if "intervals" in made else " (not used)"
    print(f"| {kind} | {level}{used} | {mean:.1f} | {law:.0f} | {held} | {each} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--kind", nargs="*", default=KINDS)
    parser.add_argument("--rows", type=int, default=1500, help="of a device, framework and format")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    whole = json.loads(ERRORS.read_text("utf-8")) if ERRORS.is_file() else {}
    known = whole.get("kinds", {})
    print("| kind | kin of the same | median % | physics | held by 90 % | by device |\n" + "| --- " * 6 + "|")
    for kind in asked.kind:
        parts = list(left_out(Store(asked.store), kind, asked.rows))
        known[kind] = {}
        for level in TIERS:
            own = [each for each in parts if each.tier == level]
            if own:
                known[kind][level] = told(own)
                show(kind, level, known[kind][level])
        if set(known[kind]) == {TIERS[-1]}:  # no two of one generation: they miss no more than those further apart
            known[kind][TIERS[-2]] = known[kind][TIERS[-1]]
            known[kind][TIERS[-1]] = {"devices": known[kind][TIERS[-1]]["devices"]}
        if asked.write:
            ERRORS.write_text(json.dumps({**whole, "kinds": known}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
