"""Files that other tools write as text: plain or gzip, a table or not, whole or refused.

A reader asks a table for its columns by name; a missing one is an error that names it and those that are there.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq

from .tables import SourceError

GZIP = b"\x1f\x8b"


def content(file: Path) -> bytes:
    """All bytes of a file, uncompressed. SourceError where the compressed stream is cut or damaged."""
    raw = file.read_bytes()
    if not raw.startswith(GZIP):
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SourceError(f"{file.name} is truncated or damaged ({error})") from None


def read_table(file: Path) -> pa.Table:
    """A CSV (also ``.gz``) or Parquet file. The second of two CSV columns of one name gets ``#2`` after it, and so on.

    SourceError where a CSV is no table; Arrow's errors where it is damaged.
    """
    if file.suffix == ".parquet":
        return pq.read_table(file)
    data = content(file)
    header, _, body = data.partition(b"\n")
    names = next(csv.reader([header.decode("utf-8-sig").strip()]), [])
    if not body.strip():
        raise SourceError(f"{file.name} holds no rows")
    options = arrow_csv.ReadOptions(column_names=_unique(names), use_threads=False)
    return arrow_csv.read_csv(io.BytesIO(body), options)


def listed(path: Path | None, patterns: Iterable[str], what: str) -> list[Path]:
    """The files to read: ``path`` itself, or those below it whose names fit a pattern, in a fixed order."""
    if path is None:
        raise SourceError(f"give path=… of {what}")
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise SourceError(f"there is no {path}: give path=… of {what}")
    matches = sorted({file for pattern in patterns for file in path.rglob(pattern) if file.is_file()})
    if not matches:
        raise SourceError(f"{path} holds no {' or '.join(patterns)}: give path=… of {what}")
    return matches


def require(table: pa.Table, names: Iterable[str], file: Path) -> None:
    """SourceError naming the first column that a table lacks."""
    for name in names:
        if name not in table.column_names:
            first_columns = ", ".join(table.column_names[:12]) + (", …" if len(table.column_names) > 12 else "")
            raise SourceError(f"{file.name} lacks the column {name!r} (it has {first_columns})")


def floats(table: pa.Table, name: str) -> np.ndarray:
    """A column as float64 [n]; NaN where there is no number."""
    column = table[name]
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return as_floats(column.to_pylist())
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    return column.cast(pa.float64(), safe=False).to_numpy()


def as_floats(texts: Iterable[str | None]) -> np.ndarray:
    """Numbers as text as float64 [n]; NaN where there is no number."""
    return np.array([_float(text) for text in texts], dtype=np.float64)


def texts(table: pa.Table, name: str) -> np.ndarray:
    """A column as str [n], empty where nothing stands."""
    return np.array(["" if value is None else str(value) for value in table[name].to_pylist()], dtype=object)


def written_at(file: Path) -> datetime:
    """When a file was last changed: what is known of a measurement whose own time is not told."""
    return datetime.fromtimestamp(int(file.stat().st_mtime), UTC)


def moment(value: object) -> datetime:
    """A date, with or without a time, as a moment in UTC. SourceError where it is none."""
    try:
        time = datetime.fromisoformat(value.isoformat() if isinstance(value, date) else str(value))
    except ValueError:
        raise SourceError(f"measured_at: {value!r} is no date such as 2025-01-31") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _unique(names: list[str]) -> list[str]:
    counts: dict[str, int] = {}
    names_once = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        names_once.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return names_once


def _float(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return float("nan")
