"""``opcast data gain``: what the rows of a store make better, by kind of op and by step.

*Before* is what opcast says without this store and its predictors; *after* is what the predictors that were trained
with the rows say of rows that were left out. Steps have no truth here: times and intervals stand side by side.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..datasets.counts import counted
from ..datasets.store import Store
from ..simulator.report.view import Toned, ViewColumn, ViewTable
from .planning import answer_step, planned_steps
from .show import print_json, say, show

TONES = {"better": "good", "new": "good", "no better": "poor"}
MOST_ROWS = 2000  # of a table that are asked about: more do not move a median
ENGINES = {"order": ["measured", "learned", "transfer", "network", "analytical"]}


@dataclass(frozen=True)
class KindGain:
    """One kind, backend and device: median errors in percent, and the share of rows inside the intervals."""

    kind: str
    backend: str
    device: str
    rows: int
    before_ape: float | None
    before_coverage: float | None
    after_ape: float | None
    after_coverage: float | None

    @property
    def verdict(self) -> str:
        """What became of it, in a word or two."""
        if self.after_ape is None:
            return "not trained: `opcast train`"
        if self.before_ape is None:
            return "new"
        return "better" if self.after_ape < self.before_ape else "no better"


@dataclass(frozen=True)
class StepGain:
    """One step: milliseconds with their interval before and after; None where opcast had no answer."""

    step: str
    before_ms: tuple[float, float, float] | None
    after_ms: tuple[float, float, float]


def run(store: Store, config: dict[str, Any], as_json: bool) -> int:
    """Print what became better, and write the page where one is asked for; returns the exit code."""
    kinds = list(kind_gains(store, Path(config["predictors"]).expanduser()))
    steps = step_gains(config)
    page = Path(str(config["report"])).expanduser() if config["report"] else None
    by_kind, by_step = kinds_table(store, kinds), steps_table(steps)
    if page is not None:
        from ..simulator.html import gain, write

        better = sum(row.verdict in ("better", "new") for row in kinds)
        facts = counted(sum(row.rows for row in kinds), "row"), f"{better} of {len(kinds)} tables are better"
        write(gain.page(str(store.path), facts, by_kind, by_step), page)
    if as_json:
        values = [{**asdict(kind), "verdict": kind.verdict} for kind in kinds]
        print_json({"store": str(store.path), "kinds": values, "steps": [asdict(step) for step in steps]})
        return 0
    show(by_kind)
    show(by_step)
    if page is not None:
        say(f"report: {page}")
    return 0


def kinds_table(store: Store, gains: Sequence[KindGain]) -> ViewTable:
    """What became better, a row for each kind, backend and device."""
    names = [ViewColumn(title, "words") for title in ("op", "backend", "device")]
    errors = [
        column
        for when in ("before", "after")
        for column in (ViewColumn(f"{when} %", "tenths", bar=True), ViewColumn("inside", "percent"))
    ]
    rows = []
    for gain in gains:
        figures = gain.before_ape, gain.before_coverage, gain.after_ape, gain.after_coverage
        verdict = Toned(gain.verdict, TONES.get(gain.verdict, "fair"))
        rows.append([gain.kind, gain.backend, gain.device, gain.rows, *figures, verdict])
    columns = [*names, ViewColumn("rows", "count"), *errors, ViewColumn("", "words")]
    nothing = [["no rows", *([None] * (len(columns) - 1))]]
    return ViewTable(f"{store.path}: median error of one op", columns, rows or nothing)


def steps_table(gains: Sequence[StepGain]) -> ViewTable:
    """The times of each step."""
    rows = [[gain.step, milliseconds(gain.before_ms), milliseconds(gain.after_ms)] for gain in gains]
    return ViewTable("steps, in ms", [ViewColumn("step", "words"), ViewColumn("before"), ViewColumn("after")], rows)


def milliseconds(answer: tuple[float, float, float] | None) -> str:
    """A time with its interval."""
    return "no answer" if answer is None else "{:.4g} ({:.4g} to {:.4g})".format(*answer)


def kind_gains(store: Store, predictors: Path) -> Iterator[KindGain]:
    """Every table of the store that can be learned, by kind; ``predictors`` are those that were trained with it."""
    from ..models.registry import Registry
    from ..models.table import tables
    from ..simulator.engines import build_engine
    from ..simulator.workbench import SHIPPED_PREDICTORS, SHIPPED_STORE

    trained = Registry(predictors)
    for kind in store.kinds():
        for device_id in store.devices(kind):
            device = store.known_device(device_id)
            engine = build_engine(device, [SHIPPED_STORE], [SHIPPED_PREDICTORS], ENGINES["order"])
            for measured in tables(kind, store.read(kind, device_id), device):
                predictor = trained.find(kind, device_id, measured.backend)
                card: Mapping[str, Any] = predictor.card if predictor is not None else {}
                before = errors_of(engine, measured)
                after = card.get("test_median_ape"), card.get("coverage")
                yield KindGain(kind, measured.backend, device_id, len(measured), *before, *after)


def errors_of(engine: Any, measured: Any) -> tuple[float | None, float | None]:
    """Median error in percent of an engine on a table, and its coverage; None where it answers nothing."""
    some = np.random.default_rng(0).permutation(len(measured))[:MOST_ROWS]
    part = measured.take(np.sort(some))
    errors, inside = np.full(len(part), np.nan), np.zeros(len(part), dtype=bool)
    for rows, ops in part.groups():
        answers = engine.answer(ops.kind, ops.columns, ops.dtype, ops.out_dtype, ops.cache)
        errors[rows] = np.abs(answers.latency_us / part.latency_us[rows] - 1.0)
        inside[rows] = (answers.low_us <= part.latency_us[rows]) & (part.latency_us[rows] <= answers.high_us)
    finite = np.isfinite(errors)
    return (100.0 * float(np.median(errors[finite])), float(inside[finite].mean())) if finite.any() else (None, None)


def step_gains(config: Mapping[str, Any]) -> list[StepGain]:
    """The steps that were asked for, without the store and with it."""
    from . import resolve

    steps = planned_steps(config)
    with tempfile.TemporaryDirectory() as empty:
        nothing = {**config, "engine": ENGINES, "store": empty, "predictors": empty}
        befores: list[tuple[float, float, float] | None] = []
        for step in steps:
            try:
                befores.append(_milliseconds(answer_step(resolve.bench(nothing), step, nothing).report))
            except ValueError:  # a device that only the store knows
                befores.append(None)
    bench = resolve.bench({**config, "engine": ENGINES})
    afters = (_milliseconds(answer_step(bench, step, config).report) for step in steps)
    return [StepGain(*answers) for answers in zip(steps, befores, afters, strict=True)]


def _milliseconds(report: Any) -> tuple[float, float, float]:
    if hasattr(report, "step_time_s"):
        return 1e3 * report.step_time_s, 1e3 * report.low_s, 1e3 * report.high_s
    return report.e2e_ms, report.low_ms, report.high_ms
