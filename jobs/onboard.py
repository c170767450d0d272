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
from .planning import computing_ops, planned_steps, shares_of
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
    planned_steps(config)  # refused now, not behind half a minute of measuring
    base = plan_of(config)
    store = Store(Path(config["store"]).expanduser())
    device = measured_device(store, base)
    say(f"{device.name}: {device.memory_gbps:.0f} GB/s, {max(device.tensor_tflops.values(), default=0.0):.2f} TFLOP/s")
    shares = computing_ops(shares_of(config))
    left_s = MEASURING * total_s - (time.monotonic() - started)
    if left_s <= 0:
        raise BadInputError(f"budget={config['budget']} was spent on the device's figures: give more")
    budget = replace(active.budget_of(config), minutes=left_s / 60)
    rounds, ended = active.run(base, shares, store, device, budget, lambda plan: measure(plan, store))
    kinds = [kind for kind in dict.fromkeys(op.kind for op in shares) if kind in store.kinds()]
    results = fit_and_register(store, device, train_request({**config, "op": kinds}, device))
    kinds_trust = judge_kinds(shares, results, config["trusted"])
    report = {
        "device": device.id,
        "rounds": [asdict(round_) for round_ in rounds],
        "ended": ended,
        "kinds": [asdict(trust) for trust in kinds_trust],
        "trusted_share": sum(trust.share for trust in kinds_trust if trust.trusted),
        "wall_time_s": time.monotonic() - started,
    }
    if as_json:
        print_json(report)
    else:
        show(kinds_trust, report)
    return 0


def seconds(text: str) -> float:
    """A budget as ``90s``, ``30min`` or ``2h``. BadInputError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", text.strip())
    if not match or float(match[1]) <= 0:
        raise BadInputError(f"budget={text} must be a time above 0, as 90s, 30min or 2h")
    return float(match[1]) * SECONDS[match[2]]


def judge_kinds(
    shares: Mapping[Op, float], results: Mapping[str, Mapping[str, Any]], limits: Mapping[str, float]
) -> list[Trust]:
    """Each kind of the steps, those with most time first."""
    of_kind: dict[str, float] = {}
    for op, share in shares.items():
        of_kind[op.kind] = of_kind.get(op.kind, 0.0) + share
    return [
        _trust(kind, share, [result for label, result in results.items() if label.partition("@")[0] == kind], limits)
        for kind, share in sorted(of_kind.items(), key=lambda item: -item[1])
    ]


def _trust(kind: str, share: float, results: Sequence[Mapping[str, Any]], limits: Mapping[str, float]) -> Trust:
    tested = [result for result in results if "n" in result]
    if not tested:
        reason = next((str(result["error"]) for result in results if "error" in result), "not measured")
        return Trust(kind, share, 0, None, None, None, False, reason)
    most = max(tested, key=lambda result: result["n"])
    error, covered = float(most["test_median_ape"]), float(most["coverage"])
    wrong = []
    if error > limits["median_ape"]:
        wrong.append(f"errs by more than {limits['median_ape']:g} %")
    if covered < limits["coverage"]:
        wrong.append(f"its interval holds less than {limits['coverage']:.0%}")
    figures = int(most["n"]), error, float(most["test_p90_ape"]), covered
    return Trust(kind, share, *figures, not wrong, "; ".join(wrong))


def show(trusts: Sequence[Trust], report: Mapping[str, Any]) -> None:
    """The report for a person."""
    rows = []
    for trust in trusts:
        errors = [f"{value:.1f}" if value is not None else "" for value in (trust.median_ape, trust.p90_ape)]
        covered = "" if trust.coverage is None else f"{trust.coverage:.0%}"
        verdict = "trusted" if trust.trusted else f"not trusted: {trust.why}"
        rows.append((trust.kind, f"{trust.share:.1%}", trust.rows, *errors, covered, verdict))
    heads = ("op", "of the steps' time", "rows", "median APE %", "p90", "coverage", "")
    title = f"{report['device']}: {report['trusted_share']:.0%} of the steps' time is in kinds that are trusted"
    table(f"{title} ({report['wall_time_s'] / 60:.1f} minutes; {report['ended']})", heads, rows)
