"""The answer about several chips: one row for each chip and power cap."""

from __future__ import annotations

from collections.abc import Callable
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
    measured = f"after {report.measure_minutes:g} min of measuring"
    columns: list[tuple[ViewColumn, Callable[[ChipRow], Any]]] = [
        (ViewColumn("cluster"), lambda row: row.cluster),
        (ViewColumn("cap, W", "count"), lambda row: row.cap_w),
        (ViewColumn("time", "seconds"), lambda row: row.time_s),
        (ViewColumn("tokens/s/GPU", "count"), lambda row: row.tokens_per_s_per_gpu),
        (ViewColumn("speed", "hundredths"), lambda row: row.speed),
        (ViewColumn("interval", "words"), lambda row: f"{row.speed_low:.2f} to {row.speed_high:.2f}"),
        (ViewColumn(measured, "words"), lambda row: f"{row.measured_speed_low:.2f} to {row.measured_speed_high:.2f}"),
        (ViewColumn("W", "count"), lambda row: row.power_w),
        (ViewColumn("J a token", "digits"), lambda row: row.joules),
        (ViewColumn("price of 1M tokens", "digits"), lambda row: row.price),
        (ViewColumn("break-even price of a GPU-hour", "words"), break_even_text),
        (ViewColumn("", "words"), lambda row: "DOES NOT FIT" if not row.fits else "front" if row.front else ""),
    ]
    return ViewTable.of(f"{report.workload} of {report.model}", report.rows, columns)


def break_even_text(row: ChipRow) -> str:
    """The price at which a chip is worth it, with its interval."""
    if row.break_even is None:
        return ""
    return f"{row.break_even:.3g} ({row.break_even_low:.3g} to {row.break_even_high:.3g})"
