"""Fit the constants of frameworks on half of the groups of tables of published steps; report the other half.

    python tests/benchmarks/calibrate_stacks.py TABLE.csv... [--every N]

prints by framework and chip the ``scale`` for ``conf/stack`` and errors in percent on both halves; ``--every N`` takes
each N-th row of a large table.

A group is a model under one layout; which half it falls in is decided by a hash of its name, so that no table, run or
machine can change it. A constant multiplies the times of one family of ops (matrix products, attention, collectives,
everything else), as :attr:`opcast.simulator.question.plan.Stack.scale` has it: what clocks under load, kernels of
another version and launch gaps make of an op that was timed alone.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from opcast.datasets.clusters import Cluster
from opcast.datasets.devices import Device, load_device
from opcast.datasets.ops import KINDS
from opcast.datasets.truth import TrainingRow, read_table
from opcast.simulator.engines import Engine, build_engine
from opcast.simulator.report.answer import StepReport
from opcast.simulator.simulate import simulate
from opcast.simulator.validation import ValidationSettings
from opcast.simulator.validation.answers import Engines
from opcast.simulator.validation.cases import training_case
from opcast.simulator.validation.metrics import errors, grouped
from scipy.optimize import minimize

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("gemm", "attention", "collective", "*")
HOST = (1.0, 3.0, 5.0)  # what is tried for the host
BOUNDS = (0.8, 3.0)
PRIOR = 0.15  # weight of a log constant away from 0, in log errors of one row
NEARLY = 1.1
ROUNDS = 1


@dataclass(frozen=True)
class Constants:
    """What was fitted for one framework on the devices of one chip, and errors (percent) of both halves.

    ``held_out_before`` is the other half without any constant.
    """

    framework: str
    devices: tuple[str, ...]
    scale: Mapping[str, float]
    fitted: Mapping[str, float]
    held_out: Mapping[str, float]
    held_out_before: Mapping[str, float]


@dataclass(frozen=True)
class Observed:
    """A simulated step: seconds predicted and measured, and by family what of the prediction follows its constant."""

    row: TrainingRow
    predicted: float
    parts: Mapping[str, float]

    @property
    def measured(self) -> float:
        """Seconds that were published."""
        return float(self.row.measured["step_time"])


def half(row: TrainingRow) -> int:
    """0 for groups that are fitted on, 1 for those held out."""
    name = f"{row.model} {row.layout} {row.hardware.devices} {row.recompute}"
    return hashlib.sha256(name.encode()).digest()[0] % 2


def calibrate(
    rows: Sequence[TrainingRow], setting: ValidationSettings, families: Sequence[str] = FAMILIES
) -> list[Constants]:
    """Constants of every framework and chip that the rows hold groups of both halves of."""
    made = []
    timed = [row for row in rows if "step_time" in row.measured]
    for (framework, _), members in grouped(timed, lambda row: (row.framework, chip(row))).items():
        if len({half(row) for row in members}) == 2:
            devices = tuple(dict.fromkeys(row.hardware.device for row in members))
            made.append(fit(framework, devices, members, setting, families))
    return made


def chip(row: TrainingRow) -> tuple[str, int]:
    """What devices of one chip share: kernels and clocks, whatever memory stands beside."""
    device = load_device(row.hardware.device)
    return device.architecture, device.compute_units


def fit(
    framework: str,
    devices: tuple[str, ...],
    rows: Sequence[TrainingRow],
    setting: ValidationSettings,
    families: Sequence[str],
) -> Constants:
    """Constants of one framework on one chip: linearised around what is simulated."""
    engines = Engines(setting)
    before = observed(rows, {}, setting, engines)
    chosen = [row for row in rows if half(row) == 0]
    tried = [refined(chosen, dict.fromkeys(families, 1.0) | {"host": host}, setting, engines) for host in HOST]
    least = min(error for _, error in tried)
    scale = next(found for found, error in tried if error <= least * NEARLY)  # the fastest host that does as well
    after = observed(rows, scale, setting, engines)
    return Constants(
        framework,
        devices,
        {name: round(value, 3) for name, value in scale.items()},
        scored(after, 0),
        scored(after, 1),
        scored(before, 1),
    )


def refined(
    rows: Sequence[TrainingRow], scale: dict[str, float], setting: ValidationSettings, engines: Engines
) -> tuple[dict[str, float], float]:
    """Constants after a few linearised steps, the host's held, and their mean absolute log error."""
    for _ in range(ROUNDS):
        scale = stepped(observed(rows, scale, setting, engines), scale)
    found = observed(rows, scale, setting, engines)
    return scale, float(np.mean([abs(np.log(each.predicted / each.measured)) for each in found]))


def scored(found: Sequence[Observed], which: int) -> dict[str, float]:
    """Errors of one half."""
    return errors([(each.predicted, each.measured) for each in found if half(each.row) == which])


def observed(
    rows: Sequence[TrainingRow], scale: Mapping[str, float], setting: ValidationSettings, engines: Engines
) -> list[Observed]:
    """Every row simulated under the constants; rows that cannot be are left out."""
    found = []
    for row in rows:
        try:
            case = training_case(row, setting)
            constants = {**scale, "expert_parallel": scale.get("collective", 1.0)}
            plan = replace(case.plan, stack=replace(case.plan.stack, scale={case.device.id: constants}))
            engine = engines.of(case.device, plan.cluster)
            report = simulate(case.config, case.work, plan, case.device, engine, setting.cache_dir)
        except ValueError as error:
            if not type(error).__module__.startswith("opcast"):
                raise
            continue
        assert isinstance(report, StepReport)
        found.append(Observed(row, report.step_time_s, parts(report, FAMILIES)))
    return found


def parts(report: StepReport, families: Sequence[str]) -> dict[str, float]:
    """Seconds of the step that follow each family's constant.

    Kernels of a family count as far as they are not hidden: compute by its share of computing time, collectives by
    what is exposed. Bubbles follow what fills the pipeline.
    """
    b = report.breakdown
    kernels: dict[str, float] = {}
    for share in b.by_op:
        kernels[family_of(share.kind, families)] = kernels.get(family_of(share.kind, families), 0.0) + share.time_s
    computing = b.compute_s + b.optimizer_s
    communication = kernels.pop("collective", 0.0) if "collective" in families else 0.0
    whole = sum(kernels.values())
    found = {name: seconds / whole * computing for name, seconds in kernels.items()} if whole else {}
    if communication:
        found["collective"] = b.exposed_comm_s
    total = sum(found.values()) or 1.0
    bubble = 1.0 + b.bubble_s / total
    return {name: seconds * bubble for name, seconds in found.items()}


def family_of(kind: str, families: Sequence[str]) -> str:
    """The family whose constant an op kind follows."""
    family = KINDS[kind].family if kind in KINDS else "pointwise"
    family = "collective" if family == "expert_parallel" else family
    return family if family in families else "*"


def stepped(found: Sequence[Observed], scale: Mapping[str, float]) -> dict[str, float]:
    """Better constants by a linear model of each step: the least absolute log error with a pull towards 1."""
    names = [name for name in scale if name != "host"]
    table = np.array([[each.parts.get(name, 0.0) for name in names] for each in found])
    predicted = np.array([each.predicted for each in found])
    measured = np.array([each.measured for each in found])
    rest = predicted - table.sum(axis=1)
    now = np.log([scale[name] for name in names])

    def loss(logs: np.ndarray) -> float:
        made = rest + table @ np.exp(logs - now)
        error = np.log(np.maximum(made, 1e-9) / measured)
        return float(np.sqrt(error**2 + 1e-4).sum() + PRIOR * np.abs(logs).sum())

    best: Any = minimize(loss, now, method="Powell", bounds=[tuple(np.log(BOUNDS))] * len(names))
    found_scale = {name: float(np.exp(value)) for name, value in zip(names, np.atleast_1d(best.x), strict=True)}
    return {**scale, **found_scale}


def engine(device: Device, cluster: Cluster | None) -> Engine:
    """The engines that come with opcast."""
    return build_engine(device, [ROOT / "datasets" / "measured"], [ROOT / "models" / "shipped"], cluster=cluster)


def main() -> None:
    """Read, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--graphs", type=Path, default=Path.home() / ".opcast" / "graphs")
    chosen = parser.parse_args()
    rows = [row for path in chosen.tables for row in read_table(path).rows if isinstance(row, TrainingRow)]
    for made in calibrate(rows[:: chosen.every], ValidationSettings(engine, chosen.graphs)):
        print(f"{made.framework} on {', '.join(made.devices)}: {dict(made.scale)}")
        for name in ("fitted", "held_out", "held_out_before"):
            print(f"  {name}:", ", ".join(f"{key} {value:.1f}" for key, value in getattr(made, name).items()))


if __name__ == "__main__":
    main()
