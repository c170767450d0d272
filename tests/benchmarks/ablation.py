"""What each mechanism is worth for whole steps: switched off alone, and switched on alone.

    python tests/benchmarks/ablation.py TABLE.csv... [--most N] [--graphs FOLDER]

simulates the runs of the tables (at most so many of each) once for each mechanism of the step: without it, and with it
as the only one. Effects on families of ops are fitted anew each time, as ``opcast calibrate`` does in one round, with
hosts as in ``conf/calibration.json``. What is printed are medians and 90th percentiles of the errors of step times in
percent: with each run's table left out, with its framework left out, and by physics (no effects).

Kinds of effects are mechanisms, too: they are left out of the fit, or fitted as the only ones on steps without any of
the others. Without a learned table of the chip, the last engine is physics; tables of operators are never switched off.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from joblib import Parallel, delayed

from opcast.datasets.clusters import Cluster
from opcast.datasets.devices import Device
from opcast.datasets.truth import read_table
from opcast.simulator.engines import Answers, Engine, build_engine
from opcast.simulator.engines import network as formula
from opcast.simulator.engines import transfer as kin
from opcast.simulator.engines.kernels import KernelsEngine
from opcast.simulator.engines.learned import LearnedEngine
from opcast.simulator.engines.library import LibraryEngine
from opcast.simulator.network.nccl_times import Tuning
from opcast.simulator.question import calibration
from opcast.simulator.question.calibration import RunKind, load_calibration
from opcast.simulator.question.plan import Plan
from opcast.simulator.validation import ValidationSettings
from opcast.simulator.validation.answers import Engines
from opcast.simulator.validation.calibrate import sampled
from opcast.simulator.validation.calibration import as_json, left_out, score
from opcast.simulator.validation.observed import ObservedStep, observe

ROOT = Path(__file__).resolve().parents[2]
OF = re.compile(r"(?:^| )(\w+)")  # the parts of a level: framework=megatron chip=hopper-132
HOW = ("table", "framework", "physics")
Patches = Sequence[tuple[Any, str, Any]]


def declined(engine: Any, kind: str, columns: Mapping[str, np.ndarray], *rest: str) -> Answers:
    """An engine that knows nothing."""
    return Answers.declined(len(next(iter(columns.values()))))


# What a plan leaves out (``options.without``, :mod:`opcast.simulator.timing.modifiers`)
MODIFIERS: Mapping[str, tuple[str, ...]] = {
    "clocks under the power limit": ("power_limit",),
    "caches that grow cold": ("cold_caches",),
    "the host": ("host_issue", "shard_copies", "collective_checks"),
    "rings that wait": ("ring_steps", "older_rings"),
}
# What is put in the place of a mechanism of engines: (module or class, name, what stands there instead)
ENGINES: Mapping[str, Patches] = {
    "transfer between chips": ((kin, "errors", dict),),
    "similar kinds for kinds that nobody timed": ((kin, "donors", lambda kind: ()),),
    "products of the library for what trains": ((LibraryEngine, "answer", declined),),
    "kernels that engines take": ((KernelsEngine, "answer", declined),),
    "collectives beyond their tables": ((LearnedEngine, "_go_on", lambda *given: None),),
    "constants of NCCL by chip": ((formula, "tuning", lambda *given: Tuning()),),
}
EFFECTS: Mapping[str, tuple[str, ...]] = {  # kind of effect -> the parts that those levels are of
    "effects of all runs": ("all",),
    "effects of the framework": ("framework",),
    "effects of the chip": ("chip",),
    "effects of the format": ("format",),
    "effects of the regime": ("regime",),
    "effects of a framework on a chip": ("framework chip",),
}


@dataclass(frozen=True)
class Variant:
    """A line of the table: mechanisms of the step that are off, and kinds of effects that are fitted."""

    off: tuple[str, ...]
    effects: tuple[str, ...]


@contextmanager
def switched_off(names: Sequence[str]) -> Iterator[None]:
    """Without some mechanisms of engines."""
    with ExitStack() as stack:
        for name in names:
            for place, attribute, instead in ENGINES.get(name, ()):
                stack.enter_context(mock.patch.object(place, attribute, instead))
        yield


def engine(device: Device, cluster: Cluster | None) -> Engine:
    """The engines that come with opcast."""
    return build_engine(device, [ROOT / "datasets" / "measured"], [ROOT / "models" / "shipped"], cluster=cluster)


def simulated(path: Path, most: int, hosts: Path, graphs: Path | None, off: tuple[str, ...]) -> list[ObservedStep]:
    """The runs of a table without some mechanisms."""
    with switched_off(off):
        setting = ValidationSettings(engine, graphs)
        rows = sampled(read_table(path, setting="tables").rows, most)

        without = tuple(modifier for name in off for modifier in MODIFIERS.get(name, ()))

        def changed(plan: Plan) -> Plan:
            options = {**plan.options, "without": without} if without else plan.options
            return dataclasses.replace(plan, calibration=str(hosts), options=options)

        return observe(path.stem, rows, setting, Engines(setting), changed)


def levels_of(effects: Sequence[str]) -> Callable[[RunKind, str], tuple[str, ...]]:
    """The levels of a run that are of some kinds of effects."""
    wanted = {part for name in effects for part in EFFECTS[name]}
    whole = RunKind.levels

    def made(run: RunKind, format: str = "") -> tuple[str, ...]:
        return tuple(each for each in whole(run, format) if " ".join(OF.findall(each)) in wanted)

    return made


def errors(observed: Sequence[ObservedStep], effects: Sequence[str]) -> dict[str, dict[str, float]]:
    """ln(measured / answered) of every run by how it was answered."""
    physics = {each.id: float(np.log(each.measured / each.predicted)) for each in observed}
    if not effects:
        return dict.fromkeys(HOW, physics)
    with mock.patch.object(RunKind, "levels", levels_of(effects)):
        tables, frameworks = (left_out(observed, by) for by in (lambda each: each.table, lambda each: each.framework))
    return dict(zip(HOW, (tables, frameworks, physics), strict=True))


def line(name: str, found: Mapping[str, Mapping[str, float]]) -> str:
    """A row of the table."""
    cells = [score(found[how].values()) for how in HOW]
    return f"| {name} | " + " | ".join(f"{each['median']:.1f} / {each['p90']:.1f}" for each in cells) + " |"


def variants() -> Iterator[tuple[str, Variant]]:
    """Every line: all on, each off alone, all off, each on alone."""
    steps, effects = (*ENGINES, *MODIFIERS), tuple(EFFECTS)
    yield "everything", Variant((), effects)
    for name in steps:
        yield f"without {name}", Variant((name,), effects)
    yield "without effects", Variant((), ())
    for name in effects:
        yield f"without {name}", Variant((), tuple(each for each in effects if each != name))
    yield "nothing", Variant(steps, ())
    for name in steps:
        yield f"only {name}", Variant(tuple(each for each in steps if each != name), ())
    yield "only effects", Variant(steps, effects)
    for name in effects:
        yield f"only {name}", Variant(steps, (name,))


def main() -> None:
    """Simulate, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--most", type=int, default=30, help="runs of a table")
    parser.add_argument("--graphs", type=Path, default=Path.home() / ".opcast" / "graphs")
    chosen = parser.parse_args()
    known = load_calibration("shipped")
    print("| mechanism | table left out | framework left out | physics |\n" + "| --- " * 4 + "|")
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder) / "hosts.json"
        none = calibration.Effect("gemm", "all", 0.0, 1.0, 1)
        hosts.write_text(as_json(dataclasses.replace(known, effects=(none,))))
        made: dict[tuple[str, ...], list[ObservedStep]] = {}
        for name, variant in variants():
            if variant.off not in made:
                jobs = (
                    delayed(simulated)(path, chosen.most, hosts, chosen.graphs, variant.off) for path in chosen.tables
                )
                made[variant.off] = [each for found in Parallel(n_jobs=-1, batch_size=1)(jobs) for each in found]
            print(line(name, errors(made[variant.off], variant.effects)), flush=True)


if __name__ == "__main__":
    main()
