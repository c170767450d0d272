"""The answer before an upgrade: what may move, and what a few minutes of measuring leave of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..report.display import display_html
from ..report.step import plain
from ..report.view import ViewColumn, ViewTable


@dataclass(frozen=True)
class UpgradeRow:
    """Ops of one kind of one library. ``share`` is that of the step's kernel time, of ``ops`` distinct ops.

    ``move_percent`` is what a release moved such kernels by, one standard deviation; ``before_percent`` what the step
    may move by because of them, ``after_percent`` what is left of that once ``measured`` of the ops are measured in
    ``seconds``.
    """

    kind: str
    library: str
    touched: bool
    share: float
    ops: int
    move_percent: float
    before_percent: float
    after_percent: float
    measured: int
    seconds: float


@dataclass(frozen=True)
class UpgradeReport:
    """What may move in a step. ``low_s`` to ``high_s`` is today's interval, ``unmeasured_*`` after the upgrade,
    ``measured_*`` once the ops of ``measure`` are measured with the new versions, which also settles what was not known
    of them before (:mod:`..report.worth`); all hold ``coverage``.

    ``measure`` are ops in the order of their worth. ``seconds`` is what they take.
    """

    model: str
    workload: str
    device: str
    changes: tuple[str, ...]
    step_time_s: float
    coverage: float
    low_s: float
    high_s: float
    unmeasured_low_s: float
    unmeasured_high_s: float
    measured_low_s: float
    measured_high_s: float
    rows: tuple[UpgradeRow, ...]
    measure: tuple[Mapping[str, Any], ...]
    seconds: float
    notes: tuple[str, ...]
    wall_time_s: float = field(default=0.0, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return plain(self)

    def _repr_html_(self) -> str:
        return display_html(f"{self.workload} of {self.model}", [], table(self), " ".join(self.notes))


def headline(report: UpgradeReport) -> str:
    """The step today, after the upgrade, and once it is measured."""
    spans = [
        f"{name} {_ms(low)} to {_ms(high)} ms"
        for name, low, high in (
            ("today", report.low_s, report.high_s),
            ("after the upgrade", report.unmeasured_low_s, report.unmeasured_high_s),
            ("measured", report.measured_low_s, report.measured_high_s),
        )
    ]
    return f"{report.workload} of {report.model} takes {_ms(report.step_time_s)} ms; {', '.join(spans)}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def table(report: UpgradeReport) -> ViewTable:
    """The rows for a terminal, those with most to move first."""
    columns: list[tuple[ViewColumn, Callable[[UpgradeRow], Any]]] = [
        (ViewColumn("op"), lambda row: row.kind),
        (ViewColumn("library"), lambda row: row.library),
        (ViewColumn("share", "share", bar=True), lambda row: row.share),
        (ViewColumn("releases moved it by, %", "tenths"), lambda row: row.move_percent if row.touched else None),
        (ViewColumn("moves the step by, %", "hundredths"), lambda row: row.before_percent if row.touched else None),
        (ViewColumn("measured, %", "hundredths"), lambda row: row.after_percent if row.touched else None),
        (
            ViewColumn("ops to measure", "words"),
            lambda row: f"{row.measured} of {row.ops}" if row.touched else "not touched",
        ),
        (ViewColumn("seconds", "count"), lambda row: row.seconds or None),
    ]
    changes = ", ".join(report.changes)
    return ViewTable.of(f"what another {changes} may move (one standard deviation)", report.rows, columns)
