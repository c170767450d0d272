"""The answer about several chips: one row for each chip and power cap."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..report.display import display_html
from ..report.step import plain
from ..report.view import ViewColumn, ViewTable


@dataclass(frozen=True)
class ChipRow:
    """A workload on one chip under one cap (None: its own limit).

    ``speed`` is tokens/s of a GPU over those of the first row, with its interval; ``measured_speed_low`` to
    ``measured_speed_high`` is what is left of that once both chips were measured for ``measure_minutes``. ``price`` is
    of a million tokens, with electricity where that is paid for. ``break_even`` is the price of a GPU-hour at which a
    token costs what it does in the first row; measuring narrows it as it does the speed. ``joules`` are of a token.
    ``front`` says that no row of the same chip is both faster and more frugal.
    """

    cluster: str
    device: str
    devices: int
    cap_w: float | None
    time_s: float
    low_s: float
    high_s: float
    tokens_per_s_per_gpu: float
    speed: float
    speed_low: float
    speed_high: float
    measured_speed_low: float
    measured_speed_high: float
    power_w: float | None
    joules: float | None
    price_per_gpu_hour: float | None
    price: float | None
    break_even: float | None
    break_even_low: float | None
    break_even_high: float | None
    peak_gib: float
    fits: bool
    front: bool


@dataclass(frozen=True)
class ChipsReport:
    """All rows, the first of which the others are compared with."""

    model: str
    workload: str
    coverage: float
    rows: tuple[ChipRow, ...]
    measure_minutes: float
    notes: tuple[str, ...]
    wall_time_s: float = field(default=0.0, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return plain(self)

    def _repr_html_(self) -> str:
        return display_html(f"{self.workload} of {self.model}", [], table(self), " ".join(self.notes))


def table(report: ChipsReport) -> ViewTable:
    """The rows for a terminal."""
    columns = [
        ViewColumn("cluster"),
        ViewColumn("cap, W", "count"),
        ViewColumn("time", "seconds"),
        ViewColumn("tokens/s/GPU", "count"),
        ViewColumn("speed", "hundredths"),
        ViewColumn("interval", "words"),
        ViewColumn(f"after {report.measure_minutes:g} min of measuring", "words"),
        ViewColumn("W", "count"),
        ViewColumn("J a token", "digits"),
        ViewColumn("price of 1M tokens", "digits"),
        ViewColumn("break-even price of a GPU-hour", "words"),
        ViewColumn("", "words"),
    ]
    rows = [
        (
            row.cluster,
            row.cap_w,
            row.time_s,
            row.tokens_per_s_per_gpu,
            row.speed,
            f"{row.speed_low:.2f} to {row.speed_high:.2f}",
            f"{row.measured_speed_low:.2f} to {row.measured_speed_high:.2f}",
            row.power_w,
            row.joules,
            row.price,
            break_even_text(row),
            "DOES NOT FIT" if not row.fits else "front" if row.front else "",
        )
        for row in report.rows
    ]
    return ViewTable(f"{report.workload} of {report.model}", columns, rows)


def break_even_text(row: ChipRow) -> str:
    """The price at which a chip is worth it, with its interval."""
    if row.break_even is None:
        return ""
    return f"{row.break_even:.3g} ({row.break_even_low:.3g} to {row.break_even_high:.3g})"
