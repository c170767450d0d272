"""What a measurement store holds and what is wrong with it. Reads only: a store is never edited.

:func:`summary` counts; :func:`check` looks for damage in files (truncated, foreign, misplaced, half written) and in
rows (duplicates, throttled clocks, impossible speed, outliers, drift, failures). Every finding says what to do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .devices import Device, DeviceError
from .files import StoreError, file_schema, read_parquet
from .ops import KINDS
from .row_checks import RULES, Finding, Rows, exceeded, row_costs
from .schema import impossible_values, schema_for
from .store import Store

__all__ = ["Finding", "SummaryRow", "check", "summary", "survey"]

SEVERITIES = ("error", "warning", "note")
LEFT_BEHIND_S = 60.0  # a temporary file older than this belongs to no writer: writing one takes milliseconds


@dataclass(frozen=True)
class SummaryRow:
    """What a store holds of one kind on one device and backend. ``size`` is the range of bytes an op moves."""

    kind: str
    device: str
    backend: str
    rows: int
    ok: int
    failed_share: float
    dtypes: str
    size: str
    newest: str


# --- the two questions ---------------------------------------------------------------------------------


def summary(store: Store) -> list[SummaryRow]:
    """What a store holds, one row per kind, device and backend. Unreadable files are left out; see :func:`survey`."""
    return survey(store)[0]


def survey(store: Store) -> tuple[list[SummaryRow], list[Finding]]:
    """What a store holds, and the files whose rows cannot be read."""
    summary: list[SummaryRow] = []
    damaged: list[Finding] = []
    for kind_name, device_id in _parts(store):
        table, wrong = _read(store, kind_name, device_id)
        damaged += [finding for finding in wrong if finding.where.endswith(".parquet") and finding.severity == "error"]
        table, _ = _possible(kind_name, device_id, table)
        summary += _summary_rows(kind_name, device_id, table)
    return summary, damaged


def check(store: Store) -> list[Finding]:
    """What is wrong with a store, worst first. An empty list means that nothing was found."""
    findings = [*_stray_files(store), *_unknown_kinds(store), *_measured_devices(store)]
    outrun: dict[str, list[tuple[str, int, float]]] = {}
    for kind_name, device_id in _parts(store):
        table, damaged = _read(store, kind_name, device_id)
        findings += damaged
        table, wrong = _possible(kind_name, device_id, table)
        findings += wrong
        if len(table):
            rows = Rows(kind_name, device_id, table, _figures(store, device_id))
            for rule in RULES:
                findings += rule(rows)
            if device_id in store.measured_devices():
                outrun.setdefault(device_id, []).extend(exceeded(rows))
    findings += _low_figures(store, outrun)
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def _parts(store: Store) -> Iterator[tuple[str, str]]:
    for kind_name in store.kinds():
        if kind_name in KINDS:
            for device_id in store.devices(kind_name):
                yield kind_name, device_id


def _figures(store: Store, device_id: str) -> Device | None:
    try:
        return store.known_device(device_id)
    except (StoreError, DeviceError):
        return None


def _summary_rows(kind_name: str, device_id: str, table: pa.Table) -> Iterator[SummaryRow]:
    for backend in sorted(pc.unique(table["backend"]).to_pylist()):
        rows_of_backend = table.filter(pc.equal(table["backend"], backend))
        ok = pc.sum(pc.equal(rows_of_backend["status"], "ok")).as_py()
        moved = sum(row_costs(kind_name, rows_of_backend)[1:])
        newest: datetime = pc.max(rows_of_backend["measured_at"]).as_py()
        yield SummaryRow(
            kind=kind_name,
            device=device_id,
            backend=backend,
            rows=len(rows_of_backend),
            ok=ok,
            failed_share=round(1.0 - ok / len(rows_of_backend), 4),
            dtypes=", ".join(sorted(pc.unique(rows_of_backend["dtype"]).to_pylist())),
            size=f"{_bytes(np.min(moved))} to {_bytes(np.max(moved))}",
            newest=newest.isoformat(timespec="seconds"),
        )


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


# --- files ---------------------------------------------------------------------------------------------


def _read(store: Store, kind_name: str, device_id: str) -> tuple[pa.Table, list[Finding]]:
    """The readable rows of a kind on a device, and what is wrong with its files."""
    tables, findings = [], []
    older: dict[str, list[Path]] = {}
    for path in store.files(kind_name, device_id):
        try:
            table, stored = read_parquet(path, kind_name), file_schema(path).names
        except StoreError as error:
            findings.append(_damage(path, error))
            continue
        elsewhere = len(table) - pc.sum(pc.equal(table["device_id"], device_id)).as_py() if len(table) else 0
        if elsewhere:
            what = f"{elsewhere} rows of another device lie under device={device_id}"
            findings.append(Finding("error", str(path), what, "move the file to the directory of its device"))
        for name in sorted(set(schema_for(kind_name).names) - set(stored)):
            older.setdefault(name, []).append(path)
        tables.append(table)
    for name, paths in older.items():
        what = f"{len(paths)} files of {kind_name} on {device_id} lack the column {name}, which reads as empty"
        findings.append(Finding("note", str(paths[0]), what, "nothing, or measure again with this version to fill it"))
    return pa.concat_tables(tables) if tables else schema_for(kind_name).empty_table(), findings


def _damage(path: Path, error: StoreError) -> Finding:
    what, _, do = str(error).removeprefix(f"{path} ").rpartition(": ")
    return Finding("error", str(path), what, do)


def _possible(kind_name: str, device_id: str, table: pa.Table) -> tuple[pa.Table, list[Finding]]:
    """The rows whose values can be, and what is wrong with the others."""
    findings = []
    while broken := list(impossible_values(kind_name, table)):
        for reason, rows in broken:
            runs = sorted(set(table["run_id"].filter(pa.array(rows)).to_pylist()), key=str)
            what = f"{rows.sum()} rows cannot be: {reason}; run {runs[0]}"
            do = "find out what wrote them, and move the files of that run out of the store"
            findings.append(Finding("error", f"{kind_name} on {device_id}", what, do))
        table = table.filter(pa.array(~np.logical_or.reduce([rows for _, rows in broken])))
    return table, findings


def _stray_files(store: Store) -> Iterator[Finding]:
    """Files of interrupted writers, and Parquet where no reader looks."""
    registered = set(store.files())
    strays: list[Path] = []
    for path in sorted(store.path.rglob("*")):
        if path.name.startswith(".") and path.name.endswith(".tmp"):
            strays += [path] if _age_s(path) > LEFT_BEHIND_S else []
        elif path.suffix == ".parquet" and path not in registered:
            what = "no reader looks here: files lie under op=<kind>/device=<id>/"
            yield Finding(
                "warning", str(path), what, "write its rows with `opcast import`, or move it out of the store"
            )
    if strays:
        what = f"{len(strays)} temporary files of writers that were killed; readers pass them over"
        yield Finding(
            "note", str(strays[0]), what, "delete them (.*.tmp) while no campaign runs, or resume the campaign"
        )


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:  # its writer finished meanwhile
        return 0.0


def _unknown_kinds(store: Store) -> Iterator[Finding]:
    for kind_name in store.kinds():
        if kind_name not in KINDS:
            where = str(store.path / f"op={kind_name}")
            yield Finding("warning", where, f"unknown op kind {kind_name!r}: nothing reads it", "update opcast")


def _measured_devices(store: Store) -> Iterator[Finding]:
    for device_id in store.measured_devices():
        path = store.path / "devices" / f"{device_id}.json"
        try:
            named = store.device(device_id)
        except StoreError as error:
            yield Finding("error", str(path), str(error), "remove it and measure the device again")
            continue
        if named is not None and named.id != device_id:
            yield Finding("error", str(path), f"holds the figures of {named.id}", f"rename it to {named.id}.json")


def _low_figures(store: Store, outrun: dict[str, list[tuple[str, int, float]]]) -> Iterator[Finding]:
    """Measured devices that ops outrun: the figures are to blame, one finding for all kinds."""
    for device_id, kinds in outrun.items():
        if kinds:
            count, ratio = sum(number for _, number, _ in kinds), max(most for *_, most in kinds)
            names = ", ".join(sorted(name for name, *_ in kinds))
            what = (
                f"measured figures are too low: {count} rows ({names}) are up to {ratio:.3g} x faster than they allow"
            )
            do = "delete this file and profile again while the machine is idle: that measures the device anew"
            yield Finding("warning", str(store.path / "devices" / f"{device_id}.json"), what, do)
