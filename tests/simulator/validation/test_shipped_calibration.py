"""The calibration that ships is what its command makes: fitted again from its steps, some of them simulated again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.truth import read_table
from opcast.simulator.question.calibration import NONE, SHIPPED, load_calibration
from opcast.simulator.question.sources import Sources
from opcast.simulator.validation import ValidationSettings
from opcast.simulator.validation.answers import Engines
from opcast.simulator.validation.calibrate import Calibrating, concluded, sampled
from opcast.simulator.validation.observed import ObservedStep, measured_of, observe
from opcast.simulator.validation.simulated import read_steps
from opcast.simulator.workbench import workbench

STEPS = SHIPPED.parent / "calibration_steps.parquet"
SCORES = SHIPPED.parent / "calibration_scores.json"
TABLES, MOST = json.loads(SHIPPED.read_text())["made_by"].removeprefix("opcast calibrate tables=[").split("] rows=")
NAMES = tuple(name.removesuffix(".csv") for name in TABLES.split(","))


@pytest.fixture(scope="module")
def drawn(reference_data: Path) -> Mapping[str, list]:
    """The runs that the command takes of each table."""
    paths = {name: reference_data / "truth" / f"{name}.csv" for name in NAMES}
    return {name: sampled(read_table(path).rows, int(MOST)) for name, path in paths.items()}


@pytest.fixture(scope="module")
def steps(drawn: Mapping[str, list]) -> tuple[list[ObservedStep], dict[str, float]]:
    """What was simulated of them, and errors without effects."""
    measured = {f"{name} {row.id}": measured_of(row) for name, rows in drawn.items() for row in rows}
    return read_steps(STEPS, measured)


@pytest.mark.reference
def test_the_shipped_effects_and_scores_are_those_of_its_steps(
    steps: tuple[list[ObservedStep], dict[str, float]],
) -> None:
    observed, physics = steps
    shipped = load_calibration("shipped")
    hosts = {each.framework: shipped.host.get(each.framework, 1.0) for each in observed}
    made, errors = concluded(observed, physics, hosts)
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
    name: str, drawn: Mapping[str, list], steps: tuple[list[ObservedStep], dict[str, float]], tmp_path: Path
) -> None:
    observed, physics = steps
    kept = {each.id: float(each.measured / np.exp(physics[each.id])) for each in observed if each.table == name}
    known = [row for row in drawn[name] if f"{name} {row.id}" in kept]
    row = min(known, key=lambda each: sha256(each.id.encode()).digest())
    bench = workbench(Sources(store=str(tmp_path / "store"), predictors=str(tmp_path / "predictors")))
    setting = ValidationSettings(bench.engine, None, calibration=NONE)
    (found,) = observe(name, [row], setting, Engines(setting))
    assert found.predicted == pytest.approx(kept[found.id], rel=2e-3)
