"""``opcast calibrate``: effects on the times of families of ops, fitted on tables of known runs, with their scores."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from ..datasets.counts import counted
from . import resolve
from .show import print_json, say, table, wants_json
from .validate import progress_bar
from .writing import check_place, write, write_text

if TYPE_CHECKING:
    from ..simulator.validation.calibrate import Calibrating

WRITTEN = ("output", "scores", "steps", "picture")
HOW = ("physics", "fitted", "halves", "table", "framework", "chip", "roofline", "constant_share")
SAID = (
    "no runs",
    "fitted on",
    "half left out",
    "table left out",
    "framework left out",
    "chip left out",
    "roofline",
    "constant share of it",
)


def run(config: dict[str, Any]) -> int:
    """Fit, print the scores, write the files; returns the exit code."""
    from ..simulator.validation.calibration import as_json

    request = resolve.calibrate_request(config)
    outputs = {name: Path(str(config[name])).expanduser() for name in WRITTEN if config[name]}
    for name, path in outputs.items():
        check_place(name, path)
    result = resolve.bench(config).calibrate(request, progress_bar)
    scores = result.scores()
    if "output" in outputs:
        write_text("output", outputs["output"], as_json(result.calibration))
    if "scores" in outputs:
        write_text("scores", outputs["scores"], json.dumps(scores, indent=1) + "\n")
    if "steps" in outputs:
        write_steps(outputs["steps"], result)
    if "picture" in outputs:
        write_text("picture", outputs["picture"], drawn(result))
    if wants_json(config):
        summary = {"effects": len(result.calibration.effects), "widths": result.calibration.widths}
        print_json({"scores": scores, **summary, "unanswered": result.unanswered})
    else:
        show(scores)
        for name, count in result.unanswered.items():
            if count:
                say(f"{count} rows of {name} have no time or cannot be simulated: `opcast validate` says why")
        for name, path in outputs.items():
            say(f"{name}: {path}")
    return 0


def write_steps(path: Path, result: Calibrating) -> None:
    """What was simulated, so that it can be fitted again."""
    from ..simulator.validation.simulated import as_table

    steps = as_table(result.observed, result.errors)
    write("steps", path, lambda temporary: pq.write_table(steps, temporary, compression="zstd"))


def _three(score: Mapping[str, float]) -> str:
    return f"{score['median']:.1f} / {score['mean']:.1f} / {score['p90']:.1f}"


def drawn(result: Calibrating) -> str:
    """Predicted over measured times of every run as SVG, each predicted without the runs of its framework."""
    from ..simulator.html.agreement import svg

    errors = result.errors["framework"]
    ratios: dict[str, list[float]] = {}
    for run in result.observed:
        ratios.setdefault(run.table, []).append(math.exp(-errors[run.id]))
    return svg(
        ratios, f"Predicted over measured times of {counted(len(errors), 'run')}, no run of their framework known"
    )


def show(scores: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Median, mean and p90 of the errors by table and by what was left out."""
    rows = [(name, f"{of['fitted']['rows']:.0f}", *(_three(of[how]) for how in HOW)) for name, of in scores.items()]
    table("errors of step times, median / mean / p90 in percent", ("table", "rows", *SAID), rows)
