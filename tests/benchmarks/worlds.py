"""Whether measuring pays: errors of steps in worlds whose laws are known, before and after campaigns.

    python tests/benchmarks/worlds.py [--world NAME …] [--seed N …] [--budget full|model|quarter …] [--step WORDS]
    [--ops N]
    python tests/benchmarks/worlds.py --gain

In each world (``tests/worlds``) the real plan runs through the real builders and store, ``opcast train`` learns, and
thirteen steps are asked before and after. Printed are, by step, the error, ``o`` where the interval does not hold the
truth, and ``!`` where measuring made the error grow (``,`` where it is within 3 % all the same); by world and budget
the median and the worst error, the coverage, width and score of the intervals, of each seed and of all.
``--ops N`` lists the ops whose error moves each step most. ``--folder`` keeps stores and predictors. ``--gain``
measures nothing: by kind of op it prints the share of the steps' time, times the half-width in ln of its interval.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from opcast.simulator.report.needs import Need
from opcast.tests.worlds.chain import Proof, Spoken, prove
from opcast.tests.worlds.chip import WORLDS, World, make_world
from opcast.tests.worlds.emulation import Emulator
from opcast.tests.worlds.steps import steps_of

WORSE = 0.005  # of a step's time: what an error may grow by without being called worse
GOOD = 0.03  # an error that the goal of a measured step allows: smaller ones before it were luck, as errors cancel


def summary(said: Sequence[Spoken]) -> dict[str, float]:
    """Median and worst error, coverage, median width and mean interval score of some steps."""
    errors = [abs(each.error) for each in said]
    return {
        "median": float(np.median(errors)),
        "worst": float(np.max(errors)),
        "coverage": float(np.mean([each.inside for each in said])),
        "width": float(np.median([each.width for each in said])),
        "score": float(np.mean([each.score for each in said])),
    }


def worse(before: Sequence[Spoken], after: Sequence[Spoken], allowed: float = 0.0) -> list[str]:
    """Steps whose error grew by measuring, of those whose error is then above ``allowed``."""
    pairs = zip(before, after, strict=True)
    return [new.step for old, new in pairs if abs(new.error) > max(abs(old.error) + WORSE, allowed)]


def mark(before: Sequence[Spoken], after: Sequence[Spoken], step: str) -> str:
    """``!`` at a step that got worse, ``,`` at one that did and is good."""
    return " " if step not in worse(before, after) else "!" if step in worse(before, after, GOOD) else ","


def gains(needed: Iterable[Sequence[Need]]) -> dict[str, float]:
    """What measuring a kind is worth: the mean share of the steps' time times the half-width in ln, greatest first."""
    steps, worth = list(needed), dict[str, float]()
    for step in steps:
        whole_us = sum(need.us for need in step)
        for need in step:
            part = need.us / whole_us * 0.5 * math.log(need.high / need.low) / len(steps)
            worth[need.op.kind] = worth.get(need.op.kind, 0.0) + part
    return dict(sorted(worth.items(), key=lambda item: -item[1]))


def show_gains(worlds: Sequence[World], folder: Path) -> None:
    """A line a kind, before anything is measured."""
    asked = [Proof(world, Emulator(world.device), folder / "graphs", steps_of(world)) for world in worlds]
    for kind, value in gains(step for proof in asked for step in proof.ask(folder / "nothing")[1].values()).items():
        print(f"{kind:28}{value:8.4f}")


def show_summary(answers: Mapping[str, Sequence[Spoken]]) -> None:
    """A line a budget."""
    for budget, said in answers.items():
        found = summary(said)
        print(f"{budget:10}" + " ".join(f"{name} {value:6.1%}" for name, value in found.items()), end="")
        grown, bad = worse(answers["before"], said), worse(answers["before"], said, GOOD)
        print(f"  worse: {len(grown)} of {len(said)}, above {GOOD:.0%} {len(bad)}" + ": " * bool(bad) + ", ".join(bad))


def show(title: str, answers: Mapping[str, Sequence[Spoken]], ops: int) -> None:
    """The table of one world."""
    print(f"\n{title}")
    budgets = list(answers)
    print(f"{'step':24}{'true ms':>10}" + "".join(f"{budget:>18}" for budget in budgets))
    for place, first in enumerate(answers["before"]):
        cells = []
        for budget in budgets:
            each = answers[budget][place]
            grown = mark(answers["before"], answers[budget], each.step)
            cells.append(f"{100 * each.error:+8.1f}%{' ' if each.inside else 'o'}{grown} ±{50 * each.width:4.0f}%")
        print(f"{first.step:24}{first.true_ms:10.2f}" + "".join(f"{cell:>18}" for cell in cells))
        for budget in budgets[1:] if ops else ():
            for name, part, error, engine in answers[budget][place].worst[:ops]:
                print(
                    f"    {budget:8} {100 * part * error:+6.1f} % of the step: {error:+6.0%} {engine:10} {name[:110]}"
                )
    show_summary(answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", nargs="*", default=WORLDS)
    parser.add_argument("--seed", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--budget", nargs="*", default=["quarter", "full", "model"])
    parser.add_argument("--step", default="")
    parser.add_argument("--ops", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--gain", action="store_true")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp())
    graphs = folder / "graphs"
    graphs.mkdir(parents=True, exist_ok=True)
    if given.gain:
        show_gains([make_world(name, given.seed[0]) for name in given.world], folder)
        return
    for name in given.world:
        all_seeds: dict[str, list[Spoken]] = {}
        for seed in given.seed:
            world, place = make_world(name, seed), folder / f"{name}_{seed}"
            steps = [step for step in steps_of(world) if given.step in step.name]
            answers = dict(prove(world, place, graphs, given.budget, steps))
            show(f"{name}, seed {seed}", answers, given.ops)
            for budget, said in answers.items():
                all_seeds.setdefault(budget, []).extend(said)
        if len(given.seed) > 1:
            print(f"\n{name}, seeds {', '.join(map(str, given.seed))}")
            show_summary(all_seeds)


if __name__ == "__main__":
    main()
