"""What a validation found, ready for JSON: errors by quantity and group, and what they are to be judged beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...datasets.truth import FailedRow, UnsupportedRow
from ..report.step import plain

Metrics = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class RivalResult:
    """Another tool's errors on the same rows; ``opcast`` are opcast's on the rows that both answered."""

    name: str
    metrics: Metrics
    opcast: Metrics
    unsupported: tuple[UnsupportedRow, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "metrics": dict(self.metrics),
            "opcast_on_same_rows": dict(self.opcast),
            "unsupported": [vars(row) for row in self.unsupported],
        }


@dataclass(frozen=True)
class Validation:
    """The answer of ``opcast validate``.

    ``unsupported`` rows are beyond what opcast simulates; ``failed`` ones met an error of opcast's own. ``by_group``
    is metrics by tag and its value. ``baseline`` is what a constant MFU scores beside opcast on the same rows,
    ``rank_correlation`` Spearman's of layouts within a model, ``noise_floor`` the spread of repeats. ``refused`` counts
    the unsupported rows by reason. ``with_refused`` are metrics that count, too, the ``refused_by_outcome`` rows: those
    refused because of their measured result (None without any). ``half`` is that of the sources (empty: all).
    """

    table: str
    kind: str
    rows: int
    simulated: int
    unsupported: tuple[UnsupportedRow, ...]
    metrics: Metrics
    by_group: Mapping[str, Mapping[str, Metrics]]
    failed: tuple[FailedRow, ...] = ()
    baseline: Mapping[str, Any] | None = None
    rank_correlation: Mapping[str, Any] | None = None
    noise_floor: Metrics = field(default_factory=dict)
    rival: RivalResult | None = None
    per_row: tuple[Mapping[str, Any], ...] | None = None
    wall_time_s: float = 0.0
    half: str = ""
    refused: Mapping[str, int] = field(default_factory=dict)
    refused_by_outcome: int = 0
    with_refused: Metrics | None = None

    def without_rows(self) -> Validation:
        """Scores alone, without what tells single rows: all that is said of sources that nobody looks into."""
        failed = tuple(replace(row, id="") for row in self.failed)
        return replace(self, unsupported=(), failed=failed, by_group={}, rank_correlation=None, per_row=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``per_row`` and ``rival`` only where they were asked for."""
        values: dict[str, Any] = plain(self, drop=("rival", "per_row"))
        if self.rival is not None:
            values["rival"] = self.rival.to_dict()
        if self.per_row is not None:
            values["per_row"] = plain(self.per_row)
        return values

    def to_pandas(self) -> Any:
        """``per_row`` as a pandas DataFrame: a row per row and quantity (empty without details)."""
        import pandas as pd

        return pd.DataFrame(
            [
                {"id": row["id"], "quantity": name, **values}
                for row in self.per_row or ()
                for name, values in row["quantities"].items()
            ]
        )
