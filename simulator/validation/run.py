"""Validate: every row simulated, scored, and put beside a baseline, the noise of repeats and a rival."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...datasets.devices import load_device
from ...datasets.truth import Row, TrainingRow, TruthTable, UnsupportedRow
from ..report.answer import ape
from .answers import Estimate, Predictions, Progress, bounded, joined, simulated
from .baseline import constant_mfu
from .cases import ValidationSettings
from .metrics import grouped, score, spearman, spread
from .result import Metrics, RivalResult, Validation

Predicted = Mapping[str, Mapping[str, float]]
Answered = tuple[Predicted, tuple[UnsupportedRow, ...]]  # what another tool says of rows, and rows it says nothing of
CARRIED = "table"


class RivalError(ValueError):
    """A rival that does not exist. The message says what to do."""


def validate(
    table: TruthTable,
    setting: ValidationSettings,
    rival: str = "",
    details: bool = False,
    progress: Progress = lambda done: None,
) -> Validation:
    """Simulate the rows of a table and score the answers; ``rival`` names a peer to ask too.

    What is made of the answers is made of the measured values first, as if opcast had said them: it takes no time, and
    what fails there fails before the simulation. RivalError for a rival that does not exist.
    """
    started = time.perf_counter()
    if rival not in ("", CARRIED):
        raise RivalError(f"rival={rival!r} is not known; take {CARRIED}: what the table carries of another tool")
    peer = (rival, carried(table.rows)) if rival else None
    json.dumps(summary(table, as_measured(table.rows), peer, details=True).to_dict())
    result = summary(table, simulated((*table.rows, *table.by_outcome), setting, progress), peer, details)
    return replace(result, wall_time_s=time.perf_counter() - started)


def carried(rows: Sequence[Row]) -> Answered:
    """The predictions that a table carries beside its measurements (its ``peer_*`` columns)."""
    missing = tuple(UnsupportedRow(row.id, "the table has no prediction of it") for row in rows if not row.peer)
    return {row.id: row.peer for row in rows if row.peer}, missing


def as_measured(rows: Sequence[Row]) -> Predictions:
    """What a tool would say that knows all that was measured."""
    answers = Predictions()
    for row in rows:
        sure = {name: None if name == "fits" else (value, value) for name, value in row.measured.items()}
        answers.note(row, {name: Estimate(value, sure[name]) for name, value in row.measured.items()})
    return answers


def summary(table: TruthTable, answers: Predictions, peer: tuple[str, Answered] | None, details: bool) -> Validation:
    """Errors of the answers, in all and by group, beside a baseline, the noise of repeats and what a peer answered."""
    unsupported = (*table.unsupported, *answers.unsupported)
    return Validation(
        table=table.name,
        kind=table.kind,
        rows=table.count,
        simulated=sum(row.id in answers.predicted for row in table.rows),
        unsupported=unsupported,
        failed=(*table.failed, *answers.failed),
        metrics=scores(answers, table.rows),
        by_group=by_group(answers, table.rows),
        baseline=baseline(answers.predicted, table.rows),
        rank_correlation=rank_correlation(answers.predicted, table.rows),
        noise_floor=noise_floor(table.rows),
        rival=compared(*peer, answers.predicted, table.rows) if peer else None,
        per_row=per_row(answers, table.rows) if details else None,
        refused=dict(Counter(row.why for row in unsupported).most_common()),
        refused_by_outcome=sum(row.by_outcome for row in table.unsupported),
        with_refused=scores(answers, (*table.rows, *table.by_outcome)) if table.by_outcome else None,
    )


def scores(answers: Predictions, rows: Sequence[Row]) -> Metrics:
    """Errors of all quantities, and how their intervals did."""
    return score(joined(answers.predicted, rows), bounded(answers, rows))


def by_group(answers: Predictions, rows: Sequence[Row]) -> dict[str, dict[str, Metrics]]:
    """Metrics by tag and value, of tags that tell rows apart."""
    tags = dict.fromkeys(tag for row in rows for tag in row.tags)
    metrics_of: dict[str, dict[str, Metrics]] = {}
    for tag in tags:
        groups = grouped((row for row in rows if tag in row.tags), lambda row: row.tags[tag])  # noqa: B023  used at once
        scored = {value: scores(answers, members) for value, members in groups.items()}
        metrics_of[tag] = {value: metrics for value, metrics in scored.items() if metrics}
    return metrics_of


def baseline(predicted: Predicted, rows: Sequence[Row]) -> dict[str, Any] | None:
    """What a constant MFU scores, and opcast on the same rows; None where no row is a training step."""
    steps = [row for row in rows if isinstance(row, TrainingRow)]
    devices = {row.hardware.device: load_device(row.hardware.device) for row in steps}
    pairs = constant_mfu(steps, devices)
    ours = [
        (predicted[row.id]["step_time"], pairs[row.id][1]) for row in steps if row.id in pairs and row.id in predicted
    ]
    if not pairs:
        return None
    return {
        "name": "a constant MFU per GPU and format, fitted on the table's other models",
        "metrics": score({"step_time": list(pairs.values())}),
        "opcast_on_same_rows": score({"step_time": ours}),
    }


def rank_correlation(predicted: Predicted, rows: Sequence[Row]) -> dict[str, Any] | None:
    """Spearman's correlation of the speeds of layouts of one model on as many devices; None without three of them."""
    steps = [
        row for row in rows if isinstance(row, TrainingRow) and "step_time" in row.measured and row.id in predicted
    ]
    by_group: dict[str, dict[str, float]] = {}
    for (model, gpu, devices), members in grouped(
        steps, lambda row: (row.model, row.hardware.gpu, row.hardware.devices)
    ).items():
        pairs = [
            (
                predicted[row.id]["step_time"] / row.global_batch / row.seq_len,
                row.measured["step_time"] / row.global_batch / row.seq_len,
            )
            for row in members
        ]
        if len({str(row.layout) for row in members}) >= 3 and (value := spearman(pairs)) is not None:
            by_group[f"{model} on {devices} {gpu}"] = {"n": len(pairs), "spearman": value}
    if not by_group:
        return None
    values, weights = zip(*((group["spearman"], group["n"]) for group in by_group.values()), strict=True)
    return {"median": float(np.median(values)), "mean": float(np.average(values, weights=weights)), "groups": by_group}


def noise_floor(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """The spread of runs of the same configuration, by quantity."""
    groups = grouped((row for row in rows if hasattr(row, "configuration")), lambda row: row.configuration)
    floors = {}
    for name in dict.fromkeys(name for row in rows for name in row.measured if name != "fits"):
        repeats = [[row.measured[name] for row in members if name in row.measured] for members in groups.values()]
        if (floor := spread(repeats)) is not None:
            floors[name] = floor
    return floors


def compared(name: str, answered: Answered, predicted: Predicted, rows: Sequence[Row]) -> RivalResult:
    """A rival's errors and opcast's on the rows and quantities that the rival answered."""
    theirs, unsupported = answered
    ours = {key: {q: v for q, v in predicted.get(key, {}).items() if q in values} for key, values in theirs.items()}
    return RivalResult(name, score(joined(theirs, rows)), score(joined(ours, rows)), unsupported)


def per_row(answers: Predictions, rows: Sequence[Row]) -> tuple[dict[str, Any], ...]:
    """Each simulated row with what was predicted, its 90 % interval where there is one, and what was measured."""
    lines, predicted = [], answers.predicted
    for row in rows:
        if row.id not in predicted:
            continue
        quantities: dict[str, dict[str, Any]] = {}
        for name, measured in row.measured.items():
            value = predicted[row.id].get(name)
            if value is None:
                continue
            quantities[name] = {"predicted": value, "measured": measured}
            quantities[name] |= {"right": value == measured} if name == "fits" else {"ape": ape(value, measured)}
            if (interval := answers.intervals[row.id].get(name)) is not None:
                quantities[name] |= dict(zip(("low", "high"), interval, strict=True))
        lines.append({"id": row.id, **described(row), "quantities": quantities})
    return tuple(lines)


def described(row: Row) -> dict[str, Any]:
    """What a row ran, in words."""
    facts: dict[str, Any] = {"devices": row.hardware.devices, **row.tags}
    if isinstance(row, TrainingRow):
        facts |= {"layout": str(row.layout), "seq_len": row.seq_len, "recompute": row.recompute}
        facts |= {"micro_batch": row.micro_batch, "global_batch": row.global_batch}
    return facts
