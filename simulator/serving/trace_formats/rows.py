"""Requests as a table with the names of their file, and complaints that name its row, column and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

MOST_TOKENS = 1 << 30
MOST_SECONDS = 1e11  # the year 5138 since 1970; of later times float64 does not hold single microseconds (1.5e-5 s)


class RequestTraceError(ValueError):
    """A trace that cannot be read. The message names file, row and value."""


@dataclass(frozen=True)
class RequestRows:
    """The requests of a file. The index of ``table`` is the place of a row in the file, from 0 on.

    ``arrival``, ``input`` and ``output`` are its columns; ``arrival`` None: the file has lengths alone. A unit of
    ``arrival`` is ``unit_s`` seconds. ``ordered``: rows must be in order of arrival, else they are sorted by it.
    ``notes`` are what a reader should know.
    """

    path: Path
    table: pd.DataFrame
    arrival: str | None
    input: str
    output: str
    unit_s: float = 1.0
    ordered: bool = True
    notes: tuple[str, ...] = ()


def field_at(record: Any, path: str) -> Any:
    """What stands at ``a.b`` of a record; None where nothing does. A metric's ``{value: …}`` is its value."""
    value = record
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value.get("value") if isinstance(value, dict) else value


def table_of(records: list[Any], columns: Mapping[str, tuple[str, ...]]) -> pd.DataFrame:
    """A table of what stands at the first path of each column that a record has."""
    import pandas as pd

    def value(record: Any, paths: tuple[str, ...]) -> Any:
        return next((field for path in paths if (field := field_at(record, path)) is not None), None)

    return pd.DataFrame({name: [value(record, paths) for record in records] for name, paths in columns.items()})


def without(table: pd.DataFrame, left_out: np.ndarray, why: str, path: Path) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The table without some rows, and the note about them. RequestTraceError where none is left."""
    if not left_out.any():
        return table, ()
    if left_out.all():
        raise RequestTraceError(f"{path}: none of its {len(table):,} requests is left: {why}")
    return table[~left_out], (f"{int(left_out.sum()):,} of {len(table):,} requests are left out: {why}",)


def arrivals(rows: RequestRows) -> np.ndarray:
    """Arrivals [n] in the file's unit, float64, dates as well. RequestTraceError for what is no time, for dates and
    numbers in one file, and for numbers so large that steps between them are lost."""
    assert rows.arrival is not None
    name, values = rows.arrival, rows.table[rows.arrival]
    as_number = ~np.isnan(as_numbers(values))
    if not as_number.all():
        dates = _dates(values.mask(as_number))
        as_date = dates.notna().to_numpy()
        if as_date.any():
            complain(rows, name, ~(as_date | as_number), "is no time")
            kinds = ("a date", "a number") if as_date[0] else ("a number", "a date")
            complain(rows, name, as_date != as_date[0], f"is {kinds[1]}, the first is {kinds[0]}: write all alike")
            return _ascending(rows, (dates - dates.iloc[0]).dt.total_seconds().to_numpy() / rows.unit_s)
    times = numbers(rows, name)
    complain(rows, name, times < 0, "is negative")
    late = times * rows.unit_s > MOST_SECONDS
    complain(rows, name, late, f"is later than {MOST_SECONDS:.0e} s: check its unit, or count from the first request")
    return _ascending(rows, times)


def _dates(values: pd.Series) -> pd.Series:
    """Values as moments in UTC; NaT for what is none."""
    import pandas as pd

    dates = pd.to_datetime(values, errors="coerce", utc=True, format="ISO8601")
    if dates.isna().any():
        dates = dates.fillna(pd.to_datetime(values[dates.isna()], errors="coerce", utc=True, format="mixed"))
    return dates


def _ascending(rows: RequestRows, times: np.ndarray) -> np.ndarray:
    if rows.ordered:
        back = np.concatenate([[False], np.diff(times) < 0])
        complain(rows, str(rows.arrival), back, "is before the row above: sort the trace by it")
    return times


def tokens(rows: RequestRows, name: str, least: int = 1) -> np.ndarray:
    """Token counts [n], int64. RequestTraceError for what is none."""
    counts = numbers(rows, name)
    bad = (counts < least) | (counts > MOST_TOKENS) | (counts != np.floor(counts))
    complain(rows, name, bad, f"must be a whole number ≥ {least} and ≤ {MOST_TOKENS:,}")
    return counts.astype(np.int64)


def numbers(rows: RequestRows, name: str) -> np.ndarray:
    """A column as float64 [n]. RequestTraceError for what is no number, true and false included."""
    values = as_numbers(rows.table[name])
    complain(rows, name, ~np.isfinite(values), "is no number")
    return values


def as_numbers(values: pd.Series) -> np.ndarray:
    """Values as float64 [n]; NaN for what is no number: true, false, dates and lists are none."""
    import pandas as pd

    if pd.api.types.is_bool_dtype(values) or pd.api.types.is_datetime64_any_dtype(values):
        return np.full(len(values), np.nan)
    if values.dtype == object:
        values = values.mask(values.map(lambda value: isinstance(value, (bool, np.bool_))))
    return pd.to_numeric(values, errors="coerce").to_numpy(float, na_value=np.nan)


def labels(rows: RequestRows, name: str) -> pd.Series:
    """A column of names, or nothing where a row has none. RequestTraceError for lists and objects."""
    import pandas as pd

    values = rows.table[name]
    complain(rows, name, ~values.map(pd.api.types.is_scalar).to_numpy(bool), "is no name: write a text or a number")
    return values


def complain(rows: RequestRows, name: str, bad: np.ndarray, why: str) -> None:
    """RequestTraceError that names the first bad row, counted from 1 without the heading."""
    import pandas as pd

    if bad.any():
        row = int(np.argmax(bad))
        others = f" ({int(bad.sum())} rows like it)" if bad.sum() > 1 else ""
        value = rows.table[name].iloc[row]
        missing = pd.api.types.is_scalar(value) and pd.isna(value)
        complaint = f"has no {name}" if missing else f"{name}={str(value)[:60]} {why}"
        colon = "" if missing else ":"
        raise RequestTraceError(f"{rows.path} row {int(rows.table.index[row]) + 1}{colon} {complaint}{others}")
