"""A file of traffic: what it holds (CSV, Parquet, JSON or JSON lines), and which family of formats it is of."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import access_logs, benchmark_runs
from .conversations import read_conversations
from .drawn import drawn_names
from .flat_tables import FLAT, read_flat
from .rows import RequestRows, RequestTraceError

if TYPE_CHECKING:
    import pandas as pd

JSON_NAMES = (".json", ".jsonl", ".ndjson")
Names = frozenset[str]
NESTED: Mapping[str, tuple[Callable[[Names], bool], Callable[[Path, list[Any]], RequestRows]]] = {
    "bench": (
        lambda names: "input_lens" in names or {"total_input_tokens", "completed"} <= names,
        benchmark_runs.read_engine_bench,
    ),
    "guidellm": (lambda names: "benchmarks" in names, benchmark_runs.read_guidellm),
    "aiperf": (lambda names: {"metadata", "metrics"} <= names, benchmark_runs.read_aiperf),
    "inference_perf": (lambda names: {"start_time", "info"} <= names, benchmark_runs.read_inference_perf),
}
"""Format -> whether a record with these names is of it, and what reads its records."""


def read_requests(path: Path, format_name: str = "auto", tokenizer: str | None = None) -> RequestRows:
    """The requests of a file. RequestTraceError for what cannot be read or is of no known format."""
    content = load(path)
    names = frozenset(content.columns if not isinstance(content, list) else content[0])
    kind = format_of(path, names, format_name)
    if kind in FLAT:
        return read_flat(path, as_table(content), kind)
    if kind == "log":
        return access_logs.read_log(path, content)
    if not isinstance(content, list):
        raise RequestTraceError(f"{path} is a table: traffic.trace_format={kind} is of JSON files")
    if kind == "sharegpt":
        return read_conversations(path, content, tokenizer)
    return NESTED[kind][1](path, content)


def format_of(path: Path, names: Names, format_name: str) -> str:
    """The format whose names a file has, or the one that is named. RequestTraceError where it lacks names."""
    for kind, columns in FLAT.items():
        if format_name in ("auto", kind) and set(columns[:3]) <= names:
            return kind
    for kind, (matches, _) in NESTED.items():
        if format_name in ("auto", kind) and matches(names):
            return kind
    if format_name in ("auto", "sharegpt") and names & {"conversations", "conversation"}:
        return "sharegpt"
    if format_name in ("auto", "log") and access_logs.is_log(names):
        return "log"
    has = ", ".join(sorted(map(str, names))[:8])
    if format_name not in ("auto", *FLAT):
        raise RequestTraceError(f"{path} is not of traffic.trace_format={format_name}: it has {has}")
    required = FLAT["columns" if format_name == "auto" else format_name][:3]
    raise RequestTraceError(
        f"{path} lacks the columns {', '.join(required)}: it has {has} (docs/serving.md names the formats)"
    )


def as_table(content: list[Any] | pd.DataFrame) -> pd.DataFrame:
    """Records as a table."""
    import pandas as pd

    return pd.DataFrame(content) if isinstance(content, list) else content


def load(path: Path) -> list[Any] | pd.DataFrame:
    """The records of a JSON file, or the table of another. RequestTraceError where it cannot be read."""
    import pandas as pd

    try:
        if path.suffix in JSON_NAMES:
            records = json_records(path)
        else:
            table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, low_memory=False)
            if table.empty:
                raise RequestTraceError(f"{path} has no requests")
            return table
    except FileNotFoundError:
        ships = ", ".join(drawn_names())
        raise RequestTraceError(f"traffic.trace={path} does not exist; by name there are {ships}") from None
    except RequestTraceError:
        raise
    except (ValueError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RequestTraceError(f"{path} cannot be read: {reason}") from None
    if not records:
        raise RequestTraceError(f"{path} has no requests")
    for row, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise RequestTraceError(f"{path} row {row} is no object of JSON: {str(record)[:60]}")
    return records


def json_records(path: Path) -> list[Any]:
    """The objects of a JSON file: those of its list, its one, or one in each line."""
    import msgspec

    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        document = msgspec.json.decode(content)
        return document if isinstance(document, list) else [document]
    except (msgspec.DecodeError, RecursionError):
        pass
    records = []
    for row, line in enumerate(filter(bytes.strip, content.splitlines()), 1):
        try:
            records.append(msgspec.json.decode(line))
        except (msgspec.DecodeError, RecursionError):
            text = line.strip()[:60].decode("utf-8", "replace")
            raise RequestTraceError(f"{path} row {row} is no JSON: {text}") from None
    return records
