"""NVIDIA's operator tables (Apache-2.0, https://github.com/ai-dynamo/aiconfigurator): a folder, or the PyPI package.

One Parquet file is one table of one system, framework and version. It is found by its place, either
``<system>/<family>/<framework>/<version>/<table>_perf.parquet`` as in the package ``aiconfigurator-core``, or
``<system>__<table>__<framework>__<version>.parquet``; a ``manifest.json`` above it gives commit, date and origin.
What the columns mean stands in :mod:`.aiconfigurator_tables`.

The collector repeats a call 36 times, a *burst* at boost clocks, unless it measures watts: then for a second, at the
*steady* clocks that the power limit leaves. So rows with watts are steady.

The backend of a row is ``<framework>-<version>:<kernel source>``; what the row says counts before its folder:
NCCL tables filed under 2.27 say 2.29.2 inside and agree with the 2.29.2 files within 1.3 % in the median, those that
say 2.27.5 or 2.28.9 do not. The device is the one that the rows name (an A100 by its memory), else the system's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from ..installing import install_command
from ..reading import read_json
from .aiconfigurator_sheet import Origin, Sheet, system_device
from .aiconfigurator_tables import REFUSED, TABLES
from .options import ImportOptions
from .tables import Rejected, RowBatch, SourceError

VERSION = 1
OPTIONS = {
    "systems": "only these systems, by their or opcast's name: [h100_sxm,l40s]",
    "tables": "only these tables: [gemm,nccl]",
    "frameworks": "only these frameworks: [vllm,trtllm,sglang,nccl]",
}
PACKAGE = "aiconfigurator_core"
FLAT = re.compile(r"(?P<system>\w+?)__(?P<table>\w+?)__(?P<framework>\w+?)__(?P<version>.+)\.parquet")
NESTED = re.compile(r"(?P<system>\w+)/\w+/(?P<framework>\w+)/(?P<version>[^/]+)/(?P<table>\w+)_perf\.parquet")


def files(path: Path | None, options: ImportOptions) -> list[Path]:
    """The tables under ``path`` (or that one file), without ``path`` those of the installed package.

    SourceError when there are none, or none that the options ask for.
    """
    root = _package_data() if path is None else path
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise SourceError(f"{root} does not exist: give the folder of aiconfigurator's tables, or no path")
    origins = {file: _place(file) for file in sorted(root.rglob("*.parquet"))}
    if not any(origins.values()):
        raise SourceError(
            f"{root} holds no table of aiconfigurator (<system>__<table>__<framework>__<version>.parquet)"
        )
    filters = {"system": {*options.systems}, "table": {*options.tables}, "framework": {*options.frameworks}}
    chosen = [file for file, origin in origins.items() if origin is None or _matches(origin, filters)]
    if not any(origins[file] for file in chosen):
        raise SourceError(_nothing_matches([origin for origin in origins.values() if origin], filters))
    return chosen if not any(filters.values()) else [file for file in chosen if origins[file]]


def read(file: Path, options: ImportOptions) -> Iterator[RowBatch]:
    """Rows of one table. SourceError when it is none, or lacks a column."""
    origin = _place(file)
    if origin is None:
        raise SourceError(f"{file.name} is no table of aiconfigurator: its name does not say system, table and version")
    name = origin["table"]
    if name not in TABLES:
        rows = pq.read_metadata(file).num_rows
        reason = next((reason for pattern, reason in REFUSED.items() if re.search(pattern, name)), "no kind for it")
        yield RowBatch(rejected=(Rejected(f"table {name}: {reason}", rows, _below_package(file.resolve())),))
        return
    sheet = Sheet(pq.read_table(file), _origin(file, origin))
    for batch in TABLES[name](sheet):
        yield RowBatch(batch.kind, {**sheet.shared, **batch.columns}, batch.rejected)


_FILTERS = {"system": "systems", "table": "tables", "framework": "frameworks"}


def _place(file: Path) -> dict[str, str] | None:
    """System, table, framework and version from a file's path; None when it does not say."""
    match = FLAT.fullmatch(file.name) or NESTED.search(file.resolve().as_posix())
    return match.groupdict() if match else None


def _matches(origin: Mapping[str, str], filters: Mapping[str, set[str]]) -> bool:
    return all(
        not names or origin[part] in names or system_device(origin[part]) in names for part, names in filters.items()
    )


def _nothing_matches(places: list[dict[str, str]], filters: Mapping[str, set[str]]) -> str:
    for part, names in filters.items():
        choices = sorted({origin[part] for origin in places})
        wrong = sorted(name for name in names if name not in choices and name not in map(system_device, choices))
        if wrong:
            return f"no table for {_FILTERS[part]}={wrong[0]}; there are {', '.join(choices)}"
    return "no table for these systems, tables and frameworks together"


def _origin(file: Path, fields_of_path: Mapping[str, str]) -> Origin:
    path = file.resolve()
    folder = next((one for one in (path.parent, path.parent.parent) if (one / "manifest.json").is_file()), None)
    manifest = _manifest(folder / "manifest.json") if folder else {}
    entry = manifest.get("files", {}).get(path.relative_to(folder).as_posix(), {}) if folder else {}
    version = f"@{manifest['commit'][:12]}" if "commit" in manifest else ""
    date = manifest.get("commit_date")
    day = datetime.fromisoformat(date) if date else datetime.fromtimestamp(int(path.stat().st_mtime), UTC)
    reference = entry.get("source_path") or _below_package(path)
    return Origin(
        **fields_of_path, reference=reference + version, measured_at=day if day.tzinfo else day.replace(tzinfo=UTC)
    )


@lru_cache
def _manifest(path: Path) -> dict[str, Any]:
    """Commit, date and the files by their path; nothing of a manifest that says other things."""
    manifest = read_json(path, SourceError)
    try:
        return {**manifest, "files": {entry["file"]: entry for entry in manifest["files"]}}
    except (TypeError, KeyError):
        return {}


def _below_package(file: Path) -> str:
    parts = file.resolve().parts
    start = parts.index(PACKAGE) if PACKAGE in parts else len(parts) - 1
    return "/".join(parts[start:])


def _package_data() -> Path:
    """Where the installed package keeps its tables; it is not imported."""
    from importlib.util import find_spec

    spec = find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    data = [Path(package) / "systems" / "data" for package in places]
    folders = [folder for folder in data if folder.is_dir()]
    if not folders:
        raise SourceError(f"give path=…, or install the tables: {install_command('data')} (aiconfigurator-core)")
    return folders[0]
