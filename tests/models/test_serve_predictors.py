"""The serving benchmark on a small predictor: it measures all that it says, and its exit code follows its bounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from opcast.models.training import TrainingOutcome


def test_figures_and_bounds(root: Path, outcome: TrainingOutcome, tmp_path: Path) -> None:
    saved = outcome.predictor.save(tmp_path / "1")
    script = [sys.executable, "-P", str(root / "tests" / "benchmarks" / "serve_predictors.py")]
    chosen = ["--predictor", str(saved), "--rows", "2000", "--json", str(tmp_path / "out.json")]
    done = subprocess.run([*script, *chosen], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    figures = {each["name"]: each for each in json.loads((tmp_path / "out.json").read_text())}
    assert done.returncode == int(not all(each["kept"] for each in figures.values()))
    assert figures["batch, by the clock on the wall"]["value"] > 0
    assert figures["one op, seen before"]["value"] < figures["one op, not seen before"]["value"]
    assert figures["heavy packages imported for it"]["value"] == 0
    assert figures["loading 12 predictors"]["kept"]
    assert "MISSED" in done.stdout or done.returncode == 0
