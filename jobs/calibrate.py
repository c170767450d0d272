"""``opcast calibrate``: effects on the times of families of ops, fitted on tables of known runs, with their scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import resolve
from .show import print_json, say, table, wants_json
from .validate import progress_bar
from .writing import check_place, write_text

HOW = ("physics", "fitted", "halves", "table", "framework", "chip")
SAID = ("no effects", "fitted on", "half left out", "table left out", "framework left out", "chip left out")


def run(config: dict[str, Any]) -> int:
    """Fit, print the scores, write the files; returns the exit code."""
    from ..simulator.validation.calibrate import as_json

    request = resolve.calibrate_request(config)
    outputs = {name: Path(str(config[name])).expanduser() for name in ("output", "scores") if config[name]}
    for name, path in outputs.items():
        check_place(name, path)
    made = resolve.bench(config).calibrate(request, progress_bar)
    scores = made.scores()
    if "output" in outputs:
        write_text("output", outputs["output"], as_json(made.calibration))
    if "scores" in outputs:
        write_text("scores", outputs["scores"], json.dumps(scores, indent=1) + "\n")
    if wants_json(config):
        print_json({"scores": scores, "effects": len(made.calibration.effects), "widths": made.calibration.widths})
    else:
        show(scores)
        for name, path in outputs.items():
            say(f"{name}: {path}")
    return 0


def show(scores: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Median and p90 of the errors by table and by what was left out."""
    rows = [
        (name, f"{of['fitted']['rows']:.0f}", *(f"{of[how]['median']:.1f} / {of[how]['p90']:.1f}" for how in HOW))
        for name, of in scores.items()
    ]
    table("errors of step times, median / p90 in percent", ("table", "rows", *SAID), rows)
