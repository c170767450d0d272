"""The calibration that ships is what its command makes: fitted again from its steps, some of them simulated again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from opcast.datasets.truth import read_table
from opcast.simulator.question.calibration import SHIPPED, load_calibration
from opcast.simulator.question.sources import Sources
from opcast.simulator.validation import ValidationSettings
from opcast.simulator.validation.calibrate import Calibrating, concluded, sampled
from opcast.simulator.validation.holdout import answer_holdouts, holdout, physics
from opcast.simulator.validation.observed import ObservedStep, measured_of
from opcast.simulator.workbench import workbench
from opcast.tests.evidence.steps import read_steps

STEPS = Path(__file__).with_name("calibration_steps.parquet")
SCORES = STEPS.with_name("calibration_scores.json")
TABLES, MOST = json.loads(SHIPPED.read_text())["made_by"].removeprefix("opcast calibrate tables=[").split("] rows=")
Steps = tuple[list[ObservedStep], dict[str, dict[str, float]]]
NAMES = tuple(name.removesuffix(".csv") for name in TABLES.split(","))


@pytest.fixture(scope="module")
def drawn(reference_data: Path) -> Mapping[str, list]:
    """The runs that the command takes of each table."""
    paths = {name: reference_data / "truth" / f"{name}.csv" for name in NAMES}
    return {name: sampled(read_table(path).rows, int(MOST)) for name, path in paths.items()}


@pytest.fixture(scope="module")
def steps(drawn: Mapping[str, list]) -> Steps:
    """What was simulated of them, and errors by what was left out."""
    measured = {f"{name} {row.id}": measured_of(row) for name, rows in drawn.items() for row in rows}
    return read_steps(STEPS, measured)


@pytest.mark.reference
def test_the_shipped_effects_and_scores_are_those_of_its_steps(
    steps: Steps,
) -> None:
    observed, held_out = steps
    shipped = load_calibration("shipped")
    hosts = {each.framework: shipped.host.get(each.framework, 1.0) for each in observed}
    made, errors = concluded(observed, held_out, hosts)
    assert made.rows == shipped.rows  # no run is missing, and none too many
    assert [(each.of, each.family, each.rows) for each in made.effects] == [
        (each.of, each.family, each.rows) for each in shipped.effects
    ]
    for name in ("value", "error"):
        again, kept = ([getattr(each, name) for each in of.effects] for of in (made, shipped))
        assert again == pytest.approx(kept, abs=5e-4), name
    assert made.widths == pytest.approx(shipped.widths, abs=2e-3)
    scores = Calibrating(made, tuple(observed), errors).scores()
    frozen = json.loads(SCORES.read_text())
    assert scores.keys() == frozen.keys()
    for table, of in frozen.items():
        for how, figures in of.items():
            assert scores[table][how] == pytest.approx(figures, abs=0.2), (table, how)


@pytest.mark.reference
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_each_table_is_simulated_as_its_steps_say(
    name: str, drawn: Mapping[str, list], steps: Steps, tmp_path: Path
) -> None:
    observed, errors = steps
    (step,) = [each for each in observed if each.id == _first(name, observed)]
    bench = workbench(Sources(store=str(tmp_path / "store"), predictors=str(tmp_path / "predictors")))
    setting = ValidationSettings(bench.engine, None)
    hosts = load_calibration("shipped").host

    def hosts_of(others: Sequence[ObservedStep]) -> dict[str, float]:
        return {framework: hosts[framework] for framework in hosts.keys() & {each.framework for each in others}}

    cases = [physics([step])]
    if name == "train_nanotron_h100":  # figures were read off it, and fitting takes seconds
        cases.append(holdout("table", [each for each in observed if each.table == name], observed, hosts_of))
    only = [replace(case, ids=frozenset({step.id})) for case in cases]
    found = answer_holdouts(only, {name: drawn[name]}, setting, lambda done: None)
    for way in [case.way for case in cases]:
        assert found[way][step.id] == pytest.approx(errors[way][step.id], abs=2e-3)


def _first(name: str, observed: Sequence[ObservedStep]) -> str:
    """The run of a table that a hash of names puts first."""
    return min((each.id for each in observed if each.table == name), key=lambda id: sha256(id.encode()).digest())
