"""``opcast trace calibrate``: one profile of one's own run as a calibration that later questions use."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..datasets.counts import counted
from ..simulator.report.view import time_text
from .show import BadInputError, print_json, say, table, wants_json
from .trace_files import files_of, given
from .writing import check_place, write_text


def run(config: dict[str, Any]) -> int:
    """Fit, show what was held out, write the calibration; returns the exit code."""
    from ..datasets.traces.profiles import read_profile
    from ..simulator.execution.calibration import calibrate
    from ..simulator.execution.run import read_run
    from ..simulator.question.calibration import OWN_FILE, load_calibration
    from ..simulator.validation.calibration import as_json

    predicted_at = given(config, "predicted", "the traces that `opcast simulate chakra=DIR` wrote of the step")
    measured_at = given(config, "measured", "a profile of several steps of the run")
    home = Path(str(config["home"])).expanduser()
    output = Path(str(config["output"])).expanduser() if config["output"] else home / OWN_FILE
    if not config["output"]:
        home.mkdir(parents=True, exist_ok=True)
    check_place("output", output)
    predicted = read_run(predicted_at)
    profile = read_profile(files_of(measured_at)[0])
    if profile.blind:
        raise BadInputError(f"{profile.path}: {profile.note}")
    first = predicted.traces[min(predicted.traces)]
    about = {name: str(value) for name, _, value in first.about.items(0, first.words)}
    base = load_calibration(about.get("calibration", "shipped"))
    steps = None if config["steps"] in (None, 1) else config["steps"]
    found = calibrate(predicted, profile, base, framework=str(config["framework"] or ""), fit_steps=steps)
    write_text("output", output, as_json(found.calibration))
    told = {name: value for name, value in asdict(found).items() if name != "calibration"}
    if wants_json(config):
        print_json({"output": str(output), **told})
        return 0
    rows = [(f.family, time_text(f.predicted_us), time_text(f.measured_us), f"{f.factor:.3f}")
            for f in found.families]  # fmt: skip
    title = f"{found.framework} on {found.chip}, fitted on {counted(len(found.fitted), 'step')}"
    table(title, ("family", "predicted", "measured", "factor"), rows)
    held = [(h.step, time_text(h.measured_us), time_text(h.before_us), time_text(h.after_us),
             f"{abs(h.after_us / h.measured_us - 1):.1%}") for h in found.held_out]  # fmt: skip
    table("steps held out", ("step", "measured", "before", "calibrated", "off by"), held)
    say(f"written to {output}: `opcast simulate` uses it from now on" if not config["output"] else f"written: {output}")
    return 0
