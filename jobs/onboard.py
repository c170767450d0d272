"""``opcast onboard``: a new device in one command. Figures, an active campaign, training, evaluation, what to trust."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..datasets.ops import Op
from ..datasets.store import Store
from . import active
from .planning import computing, shares_of
from .profile import measure, measured_device, plan_of
from .show import BadInputError, print_json, say, table, wants_json
from .train import fit_and_register, train_request

HERE = ("local", "cpu")  # names of the machine at hand
FREE_CHOICE = {"device": "device.id", "model": "+model.path"}
MEASURING = 0.75  # of the budget; the rest is for figures, simulating and training
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Trust:
    """What is known of a kind: its share of the steps' time, and how its predictor does on shapes left out (%)."""

    kind: str
    share: float
    rows: int
    median_ape: float | None
    p90_ape: float | None
    coverage: float | None
    trusted: bool
    why: str


def run(config: dict[str, Any]) -> int:
    """The whole of it; returns the exit code."""
    as_json, started = wants_json(config), time.monotonic()
    if config["device"].get("id") not in HERE:
        raise BadInputError(f"device={config['device'].get('id')}: opcast onboard measures this machine, device=local")
    total_s = seconds(str(config["budget"]))
    base = plan_of(config)
    store = Store(Path(config["store"]).expanduser())
    device = measured_device(store, base)
    say(f"{device.name}: {device.memory_gbps:.0f} GB/s, {max(device.tensor_tflops.values(), default=0.0):.2f} TFLOP/s")
    shares = computing(shares_of(config))
    left_s = MEASURING * total_s - (time.monotonic() - started)
    if left_s <= 0:
        raise BadInputError(f"budget={config['budget']} was spent on the device's figures: give more")
    budget = replace(active.budget_of(config), minutes=left_s / 60)
    rounds, ended = active.run(base, shares, store, device, budget, lambda plan: measure(plan, store))
    kinds = [kind for kind in dict.fromkeys(op.kind for op in shares) if kind in store.kinds()]
    results = fit_and_register(store, device, train_request({**config, "op": kinds}, device))
    found = judged(shares, results, config["trusted"])
    told = {
        "device": device.id,
        "rounds": [asdict(each) for each in rounds],
        "ended": ended,
        "kinds": [asdict(each) for each in found],
        "trusted_share": sum(each.share for each in found if each.trusted),
        "wall_time_s": time.monotonic() - started,
    }
    if as_json:
        print_json(told)
    else:
        show(found, told)
    return 0


def seconds(text: str) -> float:
    """A budget as ``90s``, ``30min`` or ``2h``. BadInputError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", text.strip())
    if not found or float(found[1]) <= 0:
        raise BadInputError(f"budget={text} must be a time above 0, as 90s, 30min or 2h")
    return float(found[1]) * SECONDS[found[2]]


def judged(
    shares: Mapping[Op, float], results: Mapping[str, Mapping[str, Any]], limits: Mapping[str, float]
) -> list[Trust]:
    """Each kind of the steps, those with most time first."""
    of_kind: dict[str, float] = {}
    for op, share in shares.items():
        of_kind[op.kind] = of_kind.get(op.kind, 0.0) + share
    return [
        _trust(kind, share, [each for label, each in results.items() if label.partition("@")[0] == kind], limits)
        for kind, share in sorted(of_kind.items(), key=lambda item: -item[1])
    ]


def _trust(kind: str, share: float, made: Sequence[Mapping[str, Any]], limits: Mapping[str, float]) -> Trust:
    known = [each for each in made if "n" in each]
    if not known:
        reason = next((str(each["error"]) for each in made if "error" in each), "not measured")
        return Trust(kind, share, 0, None, None, None, False, reason)
    most = max(known, key=lambda each: each["n"])
    error, covered = float(most["test_median_ape"]), float(most["coverage"])
    wrong = []
    if error > limits["median_ape"]:
        wrong.append(f"errs by more than {limits['median_ape']:g} %")
    if covered < limits["coverage"]:
        wrong.append(f"its interval holds less than {limits['coverage']:.0%}")
    figures = int(most["n"]), error, float(most["test_p90_ape"]), covered
    return Trust(kind, share, *figures, not wrong, "; ".join(wrong))


def show(found: Sequence[Trust], told: Mapping[str, Any]) -> None:
    """The report for a person."""
    rows = []
    for each in found:
        errors = [f"{value:.1f}" if value is not None else "" for value in (each.median_ape, each.p90_ape)]
        covered = "" if each.coverage is None else f"{each.coverage:.0%}"
        verdict = "trusted" if each.trusted else f"not trusted: {each.why}"
        rows.append((each.kind, f"{each.share:.1%}", each.rows, *errors, covered, verdict))
    heads = ("op", "of the steps' time", "rows", "median APE %", "p90", "coverage", "")
    title = f"{told['device']}: {told['trusted_share']:.0%} of the steps' time is in kinds that are trusted"
    table(f"{title} ({told['wall_time_s'] / 60:.1f} minutes; {told['ended']})", heads, rows)
