"""Traces of requests: CSV or JSON lines with arrivals and lengths, and the formats of Azure, Splitwise and Mooncake."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..question.traffic import RequestTraffic
from .streams import SECOND_US, RequestStream, chunk

if TYPE_CHECKING:
    import pandas as pd

MOONCAKE_BLOCK = 512  # tokens of one of its hashes
MOST_TOKENS = 1 << 30
FORMATS: Mapping[str, tuple[str, str, str, float]] = {  # format -> columns of arrival, input, output; seconds of a unit
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens", 1.0),
    "splitwise": ("arrival_timestamp", "prompt_size", "token_size", 1.0),
    "mooncake": ("timestamp", "input_length", "output_length", 1e-3),
    "vidur": ("arrived_at", "num_prefill_tokens", "num_decode_tokens", 1.0),
    "columns": ("arrival_s", "input_tokens", "output_tokens", 1.0),
}


class RequestTraceError(ValueError):
    """A trace that cannot be read. The message names file, row and value."""


def trace_stream(traffic: RequestTraffic) -> RequestStream:
    """All requests of a trace file. RequestTraceError names the first bad row."""
    assert traffic.trace is not None
    path = Path(traffic.trace).expanduser()
    table = _table(path)
    kind = _format(path, table, traffic.trace_format)
    arrival, prompt, output, unit_s = FORMATS[kind]
    times = _times(path, table, arrival) * unit_s
    times = (times - times[0]) / traffic.speed * SECOND_US
    inputs, outputs = _tokens(path, table, prompt), _tokens(path, table, output)
    more: dict[str, Any] = {}
    keys, prefix, shared = np.zeros(0, np.int64), None, None
    if "hash_ids" in table.columns:
        hashes = [_hashes(path, row, ids) for row, ids in enumerate(table["hash_ids"], 1)]
        keys = np.concatenate([*hashes, np.zeros(0, np.int64)])
        more["keys"] = np.cumsum([0, *map(len, hashes)])[:-1].astype(np.int64)
        shared = np.minimum(inputs, np.array([len(row_hashes) for row_hashes in hashes]) * MOONCAKE_BLOCK)
    elif "prefix_id" in table.columns:
        prefix = table["prefix_id"].factorize()[0].astype(np.int64)  # NONE where there is none
        shared = inputs
        if "prefix_tokens" in table:
            columns = table.assign(prefix_tokens=table["prefix_tokens"].where(prefix >= 0, 0))
            shared = np.minimum(_tokens(path, columns, "prefix_tokens", 0), inputs)
        shared = np.where(prefix < 0, 0, shared)
    shares = shared is not None and bool((shared > 0).any())
    requests = chunk(times, inputs, outputs, prefix, shared, **more)
    longest, answers, mean = int((inputs + outputs).max()), float(outputs.sum()), float(inputs.mean())
    return RequestStream(
        iter([requests]), len(table), traffic.concurrency, longest, answers, mean, shares, keys, MOONCAKE_BLOCK
    )


def _table(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        lines = path.suffix in (".jsonl", ".json", ".ndjson")
        table = pd.read_json(path, lines=True, convert_dates=False) if lines else pd.read_csv(path, low_memory=False)
    except FileNotFoundError:
        raise RequestTraceError(f"traffic.trace={path} does not exist") from None
    except (ValueError, OSError) as error:
        why = (_bad_line(path) if lines else "") or f" cannot be read: {str(error).splitlines()[0]}"
        raise RequestTraceError(f"{path}{why}") from None
    if table.empty:
        raise RequestTraceError(f"{path} has no requests")
    return table


def _bad_line(path: Path) -> str:
    """What to say of the first line of a file that is no JSON, empty where there is none."""
    with contextlib.suppress(OSError, UnicodeDecodeError), path.open(encoding="utf-8") as file:
        for row, line in enumerate(filter(str.strip, file), 1):
            try:
                json.loads(line)
            except ValueError:
                return f" row {row} is no JSON: {line.strip()[:60]}"
    return ""


def _hashes(path: Path, row: int, hash_ids: Any) -> np.ndarray:
    """The contents of a request's blocks, int64. RequestTraceError for what is no list of whole numbers."""
    if not isinstance(hash_ids, list) or not all(
        type(hash_id) is int and abs(hash_id) < MOST_TOKENS**2 for hash_id in hash_ids
    ):
        raise RequestTraceError(f"{path} row {row}: hash_ids={str(hash_ids)[:60]} must be a list of whole numbers")
    return np.array(hash_ids, np.int64)


def _format(path: Path, table: pd.DataFrame, format_name: str) -> str:
    """The format whose columns the file has."""
    for kind, columns in FORMATS.items():
        if format_name in ("auto", kind) and set(columns[:3]) <= set(table.columns):
            return kind
    required = FORMATS["columns" if format_name == "auto" else format_name][:3]
    has = ", ".join(map(str, table.columns[:8]))
    raise RequestTraceError(f"{path} lacks the columns {', '.join(required)}: it has {has}")


def _times(path: Path, table: pd.DataFrame, name: str) -> np.ndarray:
    """Arrivals in the file's unit, ascending. Dates become seconds."""
    import pandas as pd

    values = table[name]
    if not pd.api.types.is_numeric_dtype(values):
        dates = pd.to_datetime(values, errors="coerce", utc=True, format="ISO8601")
        if dates.isna().any():
            dates = dates.fillna(pd.to_datetime(values[dates.isna()], errors="coerce", utc=True, format="mixed"))
        if dates.notna().sum() > pd.to_numeric(values, errors="coerce").notna().sum():
            _complain(path, table, name, dates.isna().to_numpy(), "is no time")
            times = (dates - dates.iloc[0]).dt.total_seconds().to_numpy()
            return _ascending(path, table, name, times)
    times = _numbers(path, table, name)
    _complain(path, table, name, times < 0, "is negative")
    return _ascending(path, table, name, times)


def _ascending(path: Path, table: pd.DataFrame, name: str, times: np.ndarray) -> np.ndarray:
    back = np.concatenate([[False], np.diff(times) < 0])
    _complain(path, table, name, back, "is before the row above: sort the trace by it")
    return times


def _tokens(path: Path, table: pd.DataFrame, name: str, least: int = 1) -> np.ndarray:
    """Token counts, int64."""
    tokens = _numbers(path, table, name)
    bad = (tokens < least) | (tokens > MOST_TOKENS) | (tokens != np.floor(tokens))
    _complain(path, table, name, bad, f"must be a whole number ≥ {least} and ≤ {MOST_TOKENS:,}")
    return tokens.astype(np.int64)


def _numbers(path: Path, table: pd.DataFrame, name: str) -> np.ndarray:
    import pandas as pd

    numbers = pd.to_numeric(table[name], errors="coerce").to_numpy(float)
    _complain(path, table, name, ~np.isfinite(numbers), "is no number")
    return numbers


def _complain(path: Path, table: pd.DataFrame, name: str, bad: np.ndarray, why: str) -> None:
    """RequestTraceError that names the first bad row, counted from 1 without the heading."""
    if bad.any():
        row = int(np.argmax(bad))
        others = f" ({int(bad.sum())} rows like it)" if bad.sum() > 1 else ""
        raise RequestTraceError(f"{path} row {row + 1}: {name}={table[name].iloc[row]} {why}{others}")
