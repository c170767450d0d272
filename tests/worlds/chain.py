"""From measuring to answers, as a user goes: campaign, store, training, simulation; and the truth beside it.

:func:`prove` asks the steps of a world before anything is measured and after each of several budgets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opcast.datasets.ops import KINDS, Op
from opcast.datasets.store import Store
from opcast.harness import campaign
from opcast.harness.coverage import to_measure, ways
from opcast.harness.plan import CampaignPlan
from opcast.jobs import profile
from opcast.jobs.composing import compose
from opcast.jobs.requests import train_request
from opcast.jobs.train import fit_and_register
from opcast.models.intervals import COVERAGE
from opcast.simulator.engines.chain import caller_of
from opcast.simulator.question.plan import load_stack
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.report.needs import Need, needs
from opcast.simulator.workbench import Workbench
from opcast.tests.worlds.chip import World
from opcast.tests.worlds.emulation import Emulator
from opcast.tests.worlds.measurer import WorldMeasurer
from opcast.tests.worlds.steps import STEPS, StepAsked
from opcast.tests.worlds.truth import TruthEngine, true_report

MEASURED = ("measured", "learned")  # engines that answer from rows; the predictor says whose
NODES = 8  # that the user has: torchrun joins them
Say = Callable[[str], None]


@dataclass(frozen=True)
class Spoken:
    """What opcast says of a step beside the truth: milliseconds, and the ops that are furthest off."""

    step: str
    ms: float
    low_ms: float
    high_ms: float
    true_ms: float
    worst: tuple[tuple[str, float, float, str], ...] = ()  # op, share of the true time, error of its time, who

    @property
    def error(self) -> float:
        """Of the time, against the truth."""
        return self.ms / self.true_ms - 1.0

    @property
    def inside(self) -> bool:
        """Whether the interval holds the truth."""
        return self.low_ms <= self.true_ms <= self.high_ms

    @property
    def width(self) -> float:
        """Of the interval, as a share of the time."""
        return (self.high_ms - self.low_ms) / self.ms

    @property
    def score(self) -> float:
        """The width, and 20 times what the truth lies outside: least on average for an honest 90 % (Winkler, 1972)."""
        outside = max(self.low_ms - self.true_ms, self.true_ms - self.high_ms, 0.0)
        return self.width + 2.0 / (1.0 - COVERAGE) * outside / self.ms


def milliseconds(report: Any) -> tuple[float, float, float]:
    """Time and interval of a report of training or inference."""
    if hasattr(report, "step_time_s"):
        return 1e3 * report.step_time_s, 1e3 * report.low_s, 1e3 * report.high_s
    return report.e2e_ms, report.low_ms, report.high_ms


def _request(asked: StepAsked, world: World, home: Path, graphs: Path) -> SimulateRequest:
    request = asked.request(world, home)
    return replace(request, sources=replace(request.sources, graphs=str(graphs)))


@dataclass
class Proof:
    """The steps of a world with their truths."""

    world: World
    emulator: Emulator
    graphs: Path
    steps: Sequence[StepAsked] = STEPS

    def __post_init__(self) -> None:
        self.truths: dict[str, tuple[float, Mapping[Op, float]]] = {}

    def truth(self, asked: StepAsked) -> tuple[float, Mapping[Op, float]]:
        """Milliseconds of a step, and microseconds of each op in all of it."""
        if asked.name not in self.truths:
            request = _request(asked, self.world, self.graphs, self.graphs)
            report, _ = true_report(request, self.world, self.emulator, self.graphs, asked.name)
            self.truths[asked.name] = milliseconds(report)[0], {each.op: each.us for each in needs(report.state)}
        return self.truths[asked.name]

    def ask(self, home: Path) -> tuple[list[Spoken], dict[str, list[Need]]]:
        """What opcast says of every step with the rows of a home, and what each step needs."""
        said, needed = [], {}
        for asked in self.steps:
            request = _request(asked, self.world, home, self.graphs)
            report = Workbench(request.sources).answered(request).report
            true_ms, of_ops = self.truth(asked)
            needed[asked.name] = found = needs(report.state)  # type: ignore[union-attr]
            said.append(Spoken(asked.name, *milliseconds(report), true_ms, _worst(found, of_ops)))
        return said, needed

    def measure(self, home: Path, plans: Sequence[CampaignPlan], say: Say = print) -> dict[str, int]:
        """Run campaigns into the store of a home; statuses of the rows."""
        store, statuses = Store(home / "store"), {}
        for plan in plans:
            began = time.perf_counter()
            measurer = WorldMeasurer(self.world, self.emulator, plan.settings, NODES)
            summary = campaign.run(plan, store, measurer=measurer)
            for status, count in summary.statuses.items():
                statuses[status] = statuses.get(status, 0) + count
            say(f"{plan.name}: {dict(summary.statuses)} in {time.perf_counter() - began:.0f} s")
        return statuses

    def train(self, home: Path, say: Say = print) -> None:
        """Train what the store of a home holds, as the verb does."""
        store, began = Store(home / "store"), time.perf_counter()
        config = compose(
            "train", [f"home={home}", f"store={home}/store", f"predictors={home}/predictors", "tracking=null"]
        )
        results = fit_and_register(store, self.world.device, train_request(config, self.world.device))
        say(f"{len(results)} tables trained in {time.perf_counter() - began:.0f} s")


def _worst(said: Sequence[Need], true: Mapping[Op, float]) -> tuple[tuple[str, float, float, str], ...]:
    """The ops whose error moves a step most."""
    whole = sum(true.values()) or 1.0
    found = [(str(n.op), true[n.op] / whole, n.us / true[n.op] - 1.0, n.engine) for n in said if true.get(n.op)]
    return tuple(sorted(found, key=lambda row: -abs(row[1] * row[2])))


def plan_of(name: str, *overrides: str, extra: Sequence[Mapping[str, Any]] = ()) -> CampaignPlan:
    """The real plan of a shipped campaign, for a GPU."""
    return profile.plan_of(compose("profile", [f"campaign={name}", "+settings.device=cuda", *overrides]), extra=extra)


def share(plan: CampaignPlan, part: float) -> CampaignPlan:
    """The first cases of a plan, in its own order: what a budget of so much leaves of it."""
    return replace(plan, name=f"{plan.name}_part", cases=plan.cases[: max(1, round(part * len(plan.cases)))])


def model_plan(world: World, steps: Sequence[StepAsked], needed: Mapping[str, Sequence[Need]]) -> CampaignPlan:
    """``campaign=model`` for what steps need, each op on the kernels of the step's stack, as the verb plans it."""
    found: dict[tuple[Op, str], None] = {}
    for asked in steps:
        caller = caller_of(load_stack(asked.settings["stack"]), world.device)
        for need in needed[asked.name]:
            for way in to_measure(ways(need.op, world.device, caller)):
                found[way.op, way.backend] = None
    warm = {op: {"cache": "warm"} if KINDS[op.kind].collective else {} for op, _ in found}
    return plan_of("model", extra=[{**op.to_dict(), "backend": backend, **warm[op]} for op, backend in found])


def prove(
    world: World,
    folder: Path,
    graphs: Path,
    budgets: Sequence[str],
    steps: Sequence[StepAsked] = STEPS,
    say: Say = print,
) -> Iterator[tuple[str, list[Spoken]]]:
    """What opcast says of the steps before anything is measured, then after each budget: full, model, quarter."""
    proof = Proof(world, Emulator(world.device), graphs, steps)
    said, needed = proof.ask(folder / "nothing")
    yield "before", said
    for budget in budgets:
        home = folder / budget
        if not (home / "store").is_dir():
            proof.measure(home, list(_plans(world, budget, steps, needed)), say)
        if budget != "model" and not (home / "predictors").is_dir():  # rows of a model's campaign answer themselves
            proof.train(home, say)
        yield budget, proof.ask(home)[0]


def _plans(
    world: World, budget: str, steps: Sequence[StepAsked], needed: Mapping[str, Sequence[Need]]
) -> Iterator[CampaignPlan]:
    if budget == "model":
        yield model_plan(world, steps, needed)
        return
    kinds = {need.op.kind for each in needed.values() for need in each}
    part = {"full": 1.0, "quarter": 0.25}.get(budget) or float(budget)
    for name in ("full", "collectives"):
        plan = plan_of(name)
        cut = plan if part == 1.0 else share(plan, part)
        yield replace(cut, cases=tuple(case for case in cut.cases if case.op.kind in kinds))  # saves the test's time


__all__ = ["Proof", "Spoken", "TruthEngine", "milliseconds", "model_plan", "plan_of", "prove", "share"]
