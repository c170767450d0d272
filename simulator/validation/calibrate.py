"""Calibrates opcast on tables of known runs: simulate, fit, simulate under what was fitted, fit again, score."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ...datasets.own_warnings import own_warnings
from ...datasets.truth import InferenceRow, TrainingRow, TruthError, read_table
from ...datasets.truth.cells import FILL, REFUSE
from ...datasets.truth.halves import HALVES, UNSEEN
from ..question.calibration import NONE, UNKNOWN, Calibration, load_calibration
from ..question.plan import Plan, PlanError
from .answers import Engines
from .calibration import as_json, corrected, halves, known_of, score
from .cases import ValidationSettings
from .holdout import WAYS, answer_holdouts, answer_rooflines, holdouts
from .intervals import NOTHING, fit_spread, fit_widths, interval_score, stated, without_source
from .metrics import grouped
from .observed import ObservedStep, group_of, observe, quantity

HOSTS = (1.0, 2.0, 3.0, 5.0)  # times that a framework's host may take, as often as PyTorch's of today
NEARLY = 1.1  # a faster host is taken that does nearly as well as the best
ALIKE = 0.02  # ln: errors that are no further apart are alike
FELT = 1.05  # times longer under the slowest host: less says nothing of it
MOST_MISSED = 1.0  # ln: a run that nothing explains counts no more
LEAST = 4  # runs
EACH_TABLE = "tables"  # scores in which each table counts alike
INTERVAL = ("coverage", "width", "interval_score")
ROUNDS = 1  # of simulating under what was fitted
COMPOSED = "composed"  # times that another tool put together: nothing is fitted to them
Errors = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Calibrating:
    """What was fitted, and the errors of every run (ln of measured over answered) by how it was answered.

    ``fitted`` under all effects; ``physics``, ``halves``, ``table``, ``framework`` and ``chip`` by what was left out of
    what it was answered by (:mod:`.holdout`); ``roofline`` and ``constant_share`` are baselines.
    """

    calibration: Calibration
    observed: tuple[ObservedStep, ...]
    errors: Errors
    start: Calibration = NOTHING
    unanswered: Mapping[str, int] = field(default_factory=dict)  # rows of each table without a time or an answer

    def scores(self) -> dict[str, dict[str, dict[str, float]]]:
        """Median, mean, p90 and bias in percent, by table and by how runs were answered.

        ``all`` is of every run; ``tables`` is the mean of the tables' figures, in which a large table counts no more
        than another, ``looked_at`` and ``unseen`` the same over the runs whose source is in that half; ``unseen TABLE``
        is of such runs of a table. Of what was left out also how the 90 % intervals did
        (:func:`.intervals.interval_score`).
        """
        tables = grouped(self.observed, lambda each: each.table)
        calibrations = without_source(self.observed, self.errors, self.start)
        half_widths = {how: stated(self.observed, calibrations, how) for how in WAYS}

        def scored(steps: Sequence[ObservedStep]) -> dict[str, dict[str, float]]:
            ids = [step.id for step in steps]
            return {
                how: score(errors[key] for key in ids) | _intervals(errors, half_widths.get(how, {}), ids)
                for how, errors in self.errors.items()
            }

        scores = {table: scored(steps) for table, steps in sorted(tables.items())}
        means = {EACH_TABLE: _mean_scores(list(scores.values()))}
        for half in HALVES:
            steps = [step for step in self.observed if step.half == half]
            if steps:
                parts = {table: scored(of) for table, of in sorted(grouped(steps, lambda step: step.table).items())}
                means |= {f"{half} {table}": of for table, of in parts.items()} if half == UNSEEN else {}
                means[half] = _mean_scores(list(parts.values()))
        return scores | {"all": scored(self.observed)} | means


def _mean_scores(scores: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """The mean of each figure over tables; rows are added up."""
    return {
        how: {
            name: round(sum(values) / (1 if name == "rows" else len(values)), 3 if name in INTERVAL else 1)
            for name in first
            if (values := [of[how][name] for of in scores if name in of[how]])
        }
        for how, first in scores[0].items()
    }


def _intervals(errors: Mapping[str, float], half_widths: Mapping[str, float], ids: Sequence[str]) -> dict[str, float]:
    stated_ids = [key for key in ids if key in half_widths]
    return (
        interval_score([errors[key] for key in stated_ids], [half_widths[key] for key in stated_ids])
        if stated_ids
        else {}
    )


def calibrate(
    tables: Sequence[Path],
    setting: ValidationSettings,
    most: int,
    progress: Callable[[int], AbstractContextManager[Callable[[int], None]]],
    start: str = NONE,
) -> Calibrating:
    """Effects on the rows of tables of published results, at most so many of each.

    ``start`` is the calibration that the rows join: a name or a file. ``progress`` opens a bar of so many readings of
    tables, which is told of those done. TruthError for two tables of one name.
    """
    names = [path.stem for path in tables]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise TruthError(f"two tables are called {twice}: name each once, and rename one if they differ")
    with progress(len(tables) * (len(HOSTS) + ROUNDS + 2)) as advance:
        return _calibrated(tables, setting, most, advance, start)


def _calibrated(
    tables: Sequence[Path], setting: ValidationSettings, most: int, advance: Callable[[int], None], start: str
) -> Calibrating:
    from joblib import Parallel, delayed

    def simulated(
        calibration: str, hosts: Mapping[str, float], only: Mapping[str, set[str]] | None = None
    ) -> list[ObservedStep]:
        jobs = (
            delayed(_observed)(path, setting, most, calibration, dict(hosts), only and only.get(path.stem, set()))
            for path in tables
        )
        observed: list[ObservedStep] = []
        for steps_of_job in Parallel(n_jobs=-1, batch_size=1, return_as="generator")(jobs):
            observed += steps_of_job
            advance(1)
        return observed

    try:
        begun = load_calibration(start)
    except PlanError as error:
        raise PlanError(str(error).replace("calibration=", "start=", 1)) from None
    usual, *others, slowest = HOSTS
    by_host = {usual: simulated(NONE, {"": usual})}
    if len(by_host[usual]) < LEAST:
        raise TruthError(
            f"{len(by_host[usual])} rows of {', '.join(path.name for path in tables)} are steps with a time that can "
            f"be simulated; a calibration needs {LEAST} (`opcast validate` says why rows are left out)"
        )
    by_host[slowest] = simulated(NONE, {"": slowest})
    felt = held_up(by_host)
    ids_of_tables = {
        path.stem: {key.partition(" ")[2] for key in felt if key.startswith(f"{path.stem} ")} for path in tables
    }
    for factor in others:
        by_id = {step.id: step for step in simulated(NONE, {"": factor}, ids_of_tables)}
        by_host[factor] = [by_id.get(step.id, step) for step in by_host[usual]]
    hosts = chosen_hosts(by_host, begun)
    observed = [step for factor, steps in by_host.items() for step in steps if hosts[step.framework] == factor]
    for _ in range(ROUNDS):
        calibration_of_run = _calibration(observed, hosts, begun)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "steps.json"
            path.write_text(as_json(calibration_of_run))
            observed = simulated(str(path), {})
    rows = {path.stem: sampled(read_table(path, None, "tables", setting.rules).rows, most) for path in tables}
    cases = holdouts(observed, lambda others: hosts_of(others, by_host, begun), begun)
    held_out = answer_holdouts(cases, rows, setting, advance)
    calibration_of_run, errors = concluded(observed, held_out, hosts, begun)
    errors = {**errors, **answer_rooflines(observed, rows, setting, advance)}
    made_by = f"opcast calibrate tables=[{','.join(path.name for path in tables)}] rows={most}"
    final = replace(calibration_of_run, made_by=made_by + ("" if start == NONE else f" start={start}"))
    counts = Counter(step.table for step in observed)
    return Calibrating(final, tuple(observed), errors, begun, _unanswered(tables, setting, most, counts))


def concluded(
    observed: Sequence[ObservedStep], held_out: Errors, hosts: Mapping[str, float], begun: Calibration = NOTHING
) -> tuple[Calibration, Errors]:
    """What simulated runs say: effects and widths, and the errors of each run by what was left out.

    ``held_out`` are errors of :func:`.holdout.answer_holdouts`, ``hosts`` the factors of frameworks.
    """
    calibration = _calibration(observed, hosts, begun)
    errors = {**held_out, "fitted": {step.id: corrected(step, calibration) for step in observed}}
    rows = {name: len(members) for name, members in sorted(grouped(observed, lambda step: step.table).items())}
    spread = dict(begun.spread) if begun.widths else fit_spread(observed, errors["table"])
    widths = fit_widths(observed, errors, spread, begun)
    return replace(calibration, widths=widths, spread=spread, rows={**begun.rows, **rows}), errors


def hosts_of(
    observed: Sequence[ObservedStep], by_host: Mapping[float, Sequence[ObservedStep]], begun: Calibration = NOTHING
) -> dict[str, float]:
    """The factors of frameworks that some runs alone ask for, those of 1 left out; ``by_host`` are all runs."""
    ids = {step.id for step in observed}
    chosen = chosen_hosts({host: [step for step in of if step.id in ids] for host, of in by_host.items()}, begun)
    return _slower(chosen)


def _unanswered(
    tables: Sequence[Path], setting: ValidationSettings, most: int, rows: Mapping[str, int]
) -> dict[str, int]:
    """How many rows of each table have no time, or were drawn and could not be simulated."""
    reasons = {}
    for path in tables:
        content = read_table(path, setting="tables", rules=setting.rules)
        timed = sampled(content.rows, len(content.rows))
        untimed = len(content.rows) + len(content.unsupported) + len(content.failed) - len(timed)
        reasons[path.stem] = untimed + len(sampled(timed, most)) - rows.get(path.stem, 0)
    return reasons


def held_up(by_host: Mapping[float, Sequence[ObservedStep]]) -> set[str]:
    """The runs that take longer under a slower host."""
    usual = {step.id: step.predicted for step in by_host[min(by_host)]}
    slowest = {step.id: step.predicted for step in by_host[max(by_host)]}
    return {key for key, least in usual.items() if slowest.get(key, least) > FELT * least}


def chosen_hosts(by_host: Mapping[float, Sequence[ObservedStep]], start: Calibration = NOTHING) -> dict[str, float]:
    """By framework: how many times longer its host takes than PyTorch's of today, of those that were simulated.

    Each is judged by its errors on the half of a framework's groups that its effects were not fitted on, over the runs
    whose time depends on it: those that no host holds up say nothing, and fewer than :data:`LEAST` say too little.
    """
    felt = held_up(by_host)
    errors: dict[str, dict[float, float]] = {}
    for factor, steps in by_host.items():
        for framework, steps_of_framework in grouped(steps, lambda step: step.framework).items():
            half_errors = halves(steps_of_framework, start)
            held_up_ids = [step.id for step in steps_of_framework if step.id in felt]
            if len(held_up_ids) < LEAST and factor != min(by_host):
                continue
            missed = np.abs([half_errors[key] for key in held_up_ids] or [0.0])
            errors.setdefault(framework, {})[factor] = float(np.mean(np.minimum(missed, MOST_MISSED)))
    best = {framework: min(tried.values()) for framework, tried in errors.items()}
    return {
        framework: min(
            factor for factor, error in tried.items() if error <= max(NEARLY * best[framework], best[framework] + ALIKE)
        )
        for framework, tried in errors.items()
    }


def _calibration(observed: Sequence[ObservedStep], hosts: Mapping[str, float], start: Calibration) -> Calibration:
    calibration = known_of(observed, start)
    return replace(
        calibration, host={**start.host, **_slower(hosts)}, widths=start.widths or dict.fromkeys(UNKNOWN, 0.0)
    )


def _slower(hosts: Mapping[str, float]) -> dict[str, float]:
    return {framework: factor for framework, factor in sorted(hosts.items()) if factor != 1.0}


@own_warnings()
def _observed(
    path: Path,
    setting: ValidationSettings,
    most: int,
    calibration: str,
    hosts: Mapping[str, float],
    only: Collection[str] | None,
) -> list[ObservedStep]:
    """The runs of one table, simulated under a calibration, or with the ``hosts`` of frameworks (``""``: of all).

    ``only`` names the rows wanted, where not all are.
    """
    table = read_table(path, setting="tables", rules=setting.rules, outcomes=(FILL, REFUSE))  # effects may know results
    rows = [row for row in sampled(table.rows, most) if only is None or row.id in only]

    def changed(plan: Plan) -> Plan:
        factor = hosts.get("", 1.0)
        if factor != 1.0 and plan.stack.cuda_graph:
            raise PlanError("kernels of a CUDA graph wait for no host")  # so that the row is left out
        scale = {plan.cluster.device: {"host": factor}} if factor != 1.0 else {}
        return replace(plan, calibration=calibration, stack=replace(plan.stack, scale=scale))

    return observe(path.stem, rows, setting, Engines(setting), changed)


def sampled(rows: Iterable[Any], most: int) -> list[TrainingRow | InferenceRow]:
    """At most so many rows that have a measured time: whole groups, by a hash of their names."""
    timed = [
        row
        for row in rows
        if isinstance(row, (TrainingRow, InferenceRow)) and quantity(row) and row.tags.get("times") != COMPOSED
    ]
    groups = grouped(timed, group_of)
    order = sorted(groups, key=lambda name: sha256(name.encode()).digest()) if len(timed) > most else list(groups)
    sample: list[TrainingRow | InferenceRow] = []
    for name in order:
        if sample and len(sample) + len(groups[name]) > most:
            continue
        sample += groups[name]
    return sample
