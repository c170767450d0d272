"""Clocks under load, checked on published steps: how much longer products must take for a step to be right, and do.

    python tests/benchmarks/clocks.py TABLE.csv... [--every N] [--operators FOLDER]

For each framework, chip, power limit and format, over rows without experts: the factor on matrix products that makes
the simulated step as long as the published one (*needed*: median and range), the one that the law of clocks gives
(``models/clocks.py``), and the median of predicted over published without a factor, by the law, and with the
calibration that ships (*today*).

``--operators`` is the folder of aiconfigurator's tables: products that vLLM 0.22.0 timed for long over the same as
bursts of 0.24.0, by the burst's rate over what the device sustains, beside the law's factor.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from opcast.datasets.clusters import Cluster
from opcast.datasets.devices import Device, load_device
from opcast.datasets.sources import aiconfigurator
from opcast.datasets.truth import TrainingRow, read_table
from opcast.datasets.vocabulary import OpColumns
from opcast.models import clocks, power
from opcast.simulator.engines import Engine, build_engine
from opcast.simulator.question.calibration import NONE
from opcast.simulator.simulate import simulate
from opcast.simulator.validation import ValidationSettings
from opcast.simulator.validation.answers import Engines, simulated_case
from opcast.simulator.validation.cases import Question, training_case
from opcast.simulator.validation.metrics import grouped

ROOT = Path(__file__).resolve().parents[2]
PAIRED = ("h200_sxm", "b200_sxm")  # whose tables know both
EDGES = (0.0, 0.5, 0.7, 0.9, 1.0, 1.1, 1.2, 2.0)  # of the burst's rate over the steady one
UNLIMITED_W = 1e5
SHORT_US = 300.0  # a burst of longer calls ends in the limiter's hands


@dataclass(frozen=True)
class Checked:
    """One published step: factors on its products, needed and by the law, and predicted over measured times."""

    needed: float
    law: float
    plain: float
    clocked: float
    today: float


def engine(device: Device, cluster: Cluster | None) -> Engine:
    """The engines that come with opcast."""
    return build_engine(device, [ROOT / "datasets" / "measured"], [ROOT / "models" / "shipped"], cluster=cluster)


def step_s(
    case: Question, engines: Engines, cache_dir: Path | None, products: float = 1.0, free: bool = False
) -> float:
    """Seconds of the step with ``products`` so many times longer; ``free`` of its power limit."""
    device = replace(case.device, tdp_w=UNLIMITED_W) if free else case.device
    plan = replace(case.plan, stack=replace(case.plan.stack, scale={device.id: {"gemm": products}}))
    found = simulate(case.config, case.work, plan, device, engines.of(device, plan.cluster), cache_dir)
    return float(found.step_time_s)


def checked(row: TrainingRow, engines: Engines, setting: ValidationSettings) -> Checked:
    """The row simulated with products as in tables, twice as long, by the law of clocks, and as shipped."""
    case, measured = training_case(row, setting), float(row.measured["step_time"])
    physics = replace(case, plan=replace(case.plan, calibration=NONE))
    plain, double = (step_s(physics, engines, setting.cache_dir, factor, free=True) for factor in (1.0, 2.0))
    clocked = step_s(physics, engines, setting.cache_dir)
    today = float(simulated_case(case, setting, engines).step_time_s)  # type: ignore[union-attr]
    needed, law = (1.0 + (seconds - plain) / (double - plain) for seconds in (measured, clocked))
    return Checked(needed, law, plain / measured, clocked / measured, today / measured)


def group(row: TrainingRow, setting: ValidationSettings) -> str:
    """What rows share for which one factor is sought."""
    device = training_case(row, setting).device
    return f"{row.framework} {device.id} {device.tdp_w:.0f} W {row.tags.get('precision', row.precision)}"


def products(file: Path) -> dict[tuple[int, int, int], float]:
    """Microseconds of a table's bf16 products by (m, n, k)."""
    found: dict[tuple[int, int, int], float] = {}
    for batch in aiconfigurator.read(file, {}):
        if batch.kind == "gemm":
            dtypes = batch.columns["dtype"].to_pylist()
            rows = zip(*(batch.columns[name].tolist() for name in ("m", "n", "k", "latency_us")), strict=True)
            timed = zip(rows, dtypes, strict=True)
            found |= {(m, n, k): us for (m, n, k, us), dtype in timed if dtype == "bf16"}
    return found


def operators(folder: Path, system: str) -> None:
    """Print how much longer products take that are timed for long, and how much by the law."""
    device = load_device(system)
    long, burst = (products(folder / system / f"{system}__gemm__vllm__{each}.parquet") for each in ("0.22.0", "0.24.0"))
    shapes = [shape for shape in burst if shape in long and shape[0] >= 512 and burst[shape] < SHORT_US]
    columns = {name: np.array([shape[at] for shape in shapes]) for at, name in enumerate("mnk")}
    columns |= {"batch": np.ones(len(shapes)), "layout": np.ones(len(shapes))}
    before, after = (np.array([table[shape] for shape in shapes]) for table in (burst, long))
    limits = power.Limits(device.tdp_w)
    law = power.drawn(None, OpColumns("gemm", columns, "bf16", "bf16", "warm"), device, limits, before).slower
    rate = 2.0 * columns["m"] * columns["n"] * columns["k"] / before * 1e-6
    share = rate / clocks.steady_rate(device, "bf16", device.tdp_w)
    for low, high in pairwise(EDGES):
        own = (share >= low) & (share < high)
        print(
            f"| {system} | {low:.1f} to {high:.1f} | {own.sum()} | {np.median((after / before)[own]):.2f} "
            f"| {np.median(law[own]):.2f} |"
        )


def main() -> None:
    """Read, simulate, print a line a group."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--operators", type=Path)
    parser.add_argument("--graphs", type=Path, default=Path.home() / ".opcast" / "graphs")
    chosen = parser.parse_args()
    if chosen.operators:
        print("| chip | burst over steady rate | products | long over burst | law |\n|---|---|---|---|---|")
        for system in PAIRED:
            operators(chosen.operators, system)
    if not chosen.tables:
        return
    setting = ValidationSettings(engine, chosen.graphs)
    engines = Engines(setting)
    print("| rows | n | needed (range) | law | predicted / measured: no factor → law (today) |\n|---|---|---|---|---|")
    for path in chosen.tables:
        known = [row for row in read_table(path).rows if isinstance(row, TrainingRow) and "step_time" in row.measured]
        rows = [row for row in known[:: chosen.every] if row.tags.get("architecture") == "dense"]
        for name, members in grouped(rows, lambda row: group(row, setting)).items():
            made = []
            for row in members:
                try:
                    made.append(checked(row, engines, setting))
                except ValueError as error:
                    print(f"{row.id}: {error}")
            if made:
                table = np.array([(each.needed, each.law, each.plain, each.clocked, each.today) for each in made])
                needed, law, plain, clocked, today = np.median(table, axis=0)
                low, high = table[:, 0].min(), table[:, 0].max()
                print(
                    f"| {path.stem}: {name} | {len(made)} | {needed:.2f} ({low:.2f}-{high:.2f}) | {law:.2f} "
                    f"| {plain:.2f} → {clocked:.2f} ({today:.2f}) |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
