"""``opcast serving calibrate``: step times of a served model learned from its engine's own log of steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..simulator.question.calibration import load_calibration
from . import resolve
from .show import BadInputError, print_json, say, table, wants_json
from .writing import check_place, write_text

if TYPE_CHECKING:
    from ..simulator.question.learned_steps import LearnedSteps
    from ..simulator.serving.step_learning import TaughtSteps

NAMES = {
    "weights": "reading weights",
    "narrow": "what few tokens add to it",
    "products": "products of many tokens",
    "attention": "attention of decodes",
    "prompts": "attention of prompts",
    "sampling": "last layer and sampling",
    "step_us": "host, an iteration",
    "seq_us": "host, a sequence",
    "token_us": "host, a token",
}


def calibrate(config: dict[str, Any]) -> int:
    """Learn, say how far off steps were and are, write the file; returns the exit code."""
    from ..simulator.serving.step_learning import learn_steps
    from ..simulator.validation.calibration import as_json

    if not config["log"]:
        raise BadInputError("name the engine's log of steps: log=steps.jsonl (`opcast serving calibrate --help`)")
    output = Path(str(config["output"])).expanduser() if config["output"] else None
    if output is not None:
        check_place("output", output)
    request = resolve.request_of("serving", config)
    if request.step is None:
        raise BadInputError("a log teaches of a model: leave out law")
    start = load_calibration(request.step.sources.calibration)
    taught = learn_steps(request, resolve.bench(config), Path(str(config["log"])).expanduser())
    learned = taught.learned
    about = (learned.model, learned.device, learned.engine)
    others = tuple(each for each in start.steps if (each.model, each.device, each.engine) != about)
    if output is not None:
        write_text("output", output, as_json(replace(start, steps=(*others, learned))))
    if wants_json(config):
        print_json({"learned": as_plain(learned), "errors": taught.errors, "left_out": dict(taught.left_out)})
        return 0
    show(taught)
    if output is not None:
        say(f"output: {output} (calibration={output})")
    return 0


def as_plain(learned: LearnedSteps) -> dict[str, Any]:
    """What was learned, without its covariance."""
    return {name: value for name, value in vars(learned).items() if name != "errors"}


def show(taught: TaughtSteps) -> None:
    """Errors before and after, then what was learned."""
    learned = taught.learned
    rows = [
        (name, f"{error['steps']:.0f}", *(f"{error[figure]:.1f}" for figure in ("median", "p90", "bias")))
        for name, error in taught.errors.items()
    ]
    table("errors of step times, percent", ("", "steps", "median", "p90", "bias"), rows)
    values = [(NAMES[name], f"x {value:.3g}") for name, value in learned.factors.items()]
    values += [(NAMES[name], f"{value:,.3g} us") for name, value in learned.host.items()]
    table(f"learned of {learned.model} on {learned.device} under {learned.engine}", ("", ""), values)
    for why, count in taught.left_out.items():
        say(f"{count:,} lines {why}: left out")
