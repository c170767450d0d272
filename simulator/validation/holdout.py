"""Runs answered as if nobody had seen them: without their table, framework or chip, half of all groups, or any run.

What is left out leaves no trace: the run is simulated anew, under effects and factors on hosts that were fitted on the
other runs, and under its stack without the figures that were read off a table of what is left out
(:class:`~...datasets.figure_sources.FigureSource`).
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...datasets.own_warnings import own_warnings
from ...datasets.truth import InferenceRow, TrainingRow, TruthError
from ..question.calibration import NONE, UNKNOWN, Calibration
from ..question.plan import Plan
from ..question.stack import EVERY_TABLE, without_figures_of
from ..timing.modifiers import MODIFIERS
from .answers import Engines
from .baseline import roofline_engine
from .calibration import as_json, half_of, known_of
from .cases import ValidationSettings
from .intervals import NOTHING
from .metrics import grouped
from .observed import ObservedStep, observe

PHYSICS, ROOFLINE, CONSTANT_SHARE = "physics", "roofline", "constant_share"
AT_ONCE = 50  # rows that a process answers before it reports
HostsOf = Callable[[Sequence[ObservedStep]], Mapping[str, float]]
Rows = Mapping[str, Sequence[TrainingRow | InferenceRow]]
WAYS: Mapping[str, Callable[[ObservedStep], str]] = {
    "halves": half_of,
    "table": lambda step: step.table,
    "framework": lambda step: step.framework,
    "chip": lambda step: step.chip,
}


@dataclass(frozen=True)
class Holdout:
    """Runs that are answered together, by id: under a calibration, without the figures read off some tables.

    ``without`` are modifiers that are off (:mod:`..timing.modifiers`).
    """

    way: str
    ids: frozenset[str]
    calibration: Calibration
    tables: Collection[str]
    without: tuple[str, ...] = ()


def holdouts(observed: Sequence[ObservedStep], hosts_of: HostsOf, start: Calibration = NOTHING) -> Iterator[Holdout]:
    """Every way of leaving runs out, and physics. ``hosts_of`` says what factors on hosts some runs alone ask for."""
    for way, by in WAYS.items():
        for members in grouped(observed, by).values():
            yield holdout(way, members, observed, hosts_of, start)
    yield physics(observed)


def holdout(
    way: str,
    members: Sequence[ObservedStep],
    observed: Sequence[ObservedStep],
    hosts_of: HostsOf,
    start: Calibration = NOTHING,
) -> Holdout:
    """Some of the runs left out, in one of :data:`WAYS`.

    A half of the groups knows its frameworks, so it keeps the figures that were read off their tables.
    """
    ids = frozenset(step.id for step in members)
    others = [step for step in observed if step.id not in ids]
    widths = start.widths or dict.fromkeys(UNKNOWN, 0.0)  # a file has some; nobody asks for an interval here
    calibration = replace(known_of(others, start), host={**start.host, **hosts_of(others)}, widths=widths)
    return Holdout(way, ids, calibration, () if way == "halves" else {step.table for step in members})


def physics(observed: Sequence[ObservedStep], without: tuple[str, ...] = (), way: str = PHYSICS) -> Holdout:
    """Runs answered without effects, and without any figure that was read off a table."""
    return Holdout(way, frozenset(step.id for step in observed), Calibration(), EVERY_TABLE, without)


def answer_rooflines(
    observed: Sequence[ObservedStep], rows: Rows, setting: ValidationSettings, advance: Callable[[int], None]
) -> dict[str, dict[str, float]]:
    """ln of measured over answered, by run, of two baselines: kernels at their :data:`ROOFLINE`, nothing else added;
    and a :data:`CONSTANT_SHARE` of it, the median over the runs of other frameworks of the same kind of step.
    """
    everything = tuple(modifier.name for modifier in MODIFIERS)
    case = physics(observed, everything, ROOFLINE)
    answers = answer_holdouts([case], rows, replace(setting, engine=roofline_engine), advance)[ROOFLINE]
    shares: dict[str, float] = {}
    for members in grouped(observed, lambda step: (step.framework, step.setting.regime)).values():
        of = members[0]
        others = [
            step for step in observed if step.setting.regime == of.setting.regime and step.framework != of.framework
        ]
        usual = float(np.median([answers[step.id] for step in others])) if others else 0.0
        shares |= {step.id: answers[step.id] - usual for step in members}
    return {ROOFLINE: answers, CONSTANT_SHARE: shares}


def answer_holdouts(
    cases: Iterable[Holdout], rows: Rows, setting: ValidationSettings, advance: Callable[[int], None]
) -> dict[str, dict[str, float]]:
    """ln of measured over answered, by way and run. ``rows`` are those of each table; ``advance`` hears of each table.

    TruthError for a run that is simulated as shipped, and not without what was left out.
    """
    from joblib import Parallel, delayed

    errors: defaultdict[str, dict[str, float]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as folder:
        named = []
        for at, case in enumerate(cases):
            path = Path(folder) / f"{at}.json"
            path.write_text(as_json(case.calibration))
            named.append((case, str(path) if case.calibration.effects else NONE))
        parts = [
            (table, rows_of_table[at : at + AT_ONCE])
            for table, rows_of_table in sorted(rows.items(), key=lambda item: -len(item[1]))
            for at in range(0, len(rows_of_table), AT_ONCE)
        ]
        tasks = (delayed(_answer)(table, rows_of_part, setting, named) for table, rows_of_part in parts)
        for (table, rows_of_part), answers in zip(
            parts, Parallel(n_jobs=-1, batch_size=1, return_as="generator")(tasks), strict=True
        ):
            for way, of in answers.items():
                errors[way] |= of
            advance(int(rows_of_part[-1] is rows[table][-1]))
    for case, _ in named:
        if lost := case.ids - errors[case.way].keys():
            raise TruthError(f"{min(lost)} cannot be simulated without what was left out ({case.way})")
    return dict(errors)


@own_warnings()
def _answer(
    table: str,
    rows: Sequence[TrainingRow | InferenceRow],
    setting: ValidationSettings,
    named: Sequence[tuple[Holdout, str]],
) -> dict[str, dict[str, float]]:
    """The errors of some rows of a table in all ways: what is laid out and timed once serves them all."""
    engines, errors = Engines(setting), defaultdict[str, dict[str, float]](dict)
    for row in rows:
        for case, calibration in named:
            if f"{table} {row.id}" not in case.ids:
                continue

            def changed(plan: Plan, case: Holdout = case, calibration: str = calibration) -> Plan:
                options = {**plan.options, "without": case.without} if case.without else plan.options
                stack = without_figures_of(plan.stack, case.tables)
                return replace(plan, calibration=calibration, stack=stack, options=options)

            for step in observe(table, [row], setting, engines, changed):
                errors[case.way][step.id] = float(np.log(step.measured / step.predicted))
    return dict(errors)
