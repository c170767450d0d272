"""Foreign measurements into a store: what every source shares, and the contract of a source module.

A source is a module of this folder, named in :data:`SOURCES`, with::

    VERSION = 1                      # raise it when the same file shall mean other rows
    OPTIONS = {"systems": "…"}       # settings that it takes, each with a line of help
    MEANING = ("mapping",)           # those of OPTIONS that change what rows mean (not mere filters)

    def files(path: Path | None, options: ImportOptions) -> list[Path]: ...
    def read(file: Path, options: ImportOptions) -> Iterator[RowBatch]: ...

``files`` lists what to read in a fixed order (SourceError when ``path`` cannot be used); ``read`` turns one file into
:class:`RowBatch` es of columns in the terms of the store: dims of the kind, dtypes, ``device_id``, us, bytes. Units
and conventions are converted there and nowhere else. Rows that ``read`` cannot map it counts as :class:`Rejected`.
A source whose settings name files of devices lists these as well (``devices(options) -> list[Device]``).
An exception of Arrow, of the file system or a SourceError in ``read`` costs that file alone.

The rest is done here, the same for all: rows that cannot be (:func:`.plausible.sift`) are kept out, rows of one
identity merged, and what remains is written once. A run's id is a hash of the file's content, so that importing again
finds the rows in place; a file's rows of one kind and device land in one atomic write, so that an import which was
killed goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..columns import matching
from ..counts import counted
from ..devices import Device, known_devices
from ..files import locked
from ..loading import nearest
from ..reading import UNREADABLE
from ..row_checks import Finding, Rows, slow_links
from ..store import Store
from .merging import merged
from .options import ImportOptions
from .plausible import sift
from .tables import Rejected, RowBatch, SourceError, combined

__all__ = ["SOURCES", "ImportReport", "Rejected", "RowBatch", "SourceError", "import_into", "load_source"]

SOURCES: dict[str, tuple[str, str]] = {
    "aiconfigurator": ("aiconfigurator", "NVIDIA's operator tables (a folder, or the package aiconfigurator-core)"),
    "vidur": ("vidur", "Vidur's profiles of layers and of networks, CSV"),
    "neusight": ("neusight", "NeuSight's operator timings, CSV"),
    "nccl-tests": ("nccl_tests", "what nccl-tests prints"),
    "kineto": ("kineto", "PyTorch profiler traces with shapes, JSON"),
    "bundle": ("bundle", "bundles of other sites (`opcast data bundle`)"),
    "csv": ("csv_mapping", "any table, by a mapping file"),
}
"""Name of a source: its module, and what it reads."""

Progress = Callable[[str, int, int], None]
"""Called with a file's name, how many files are done, and how many there are."""


@dataclass
class ImportReport:
    """What an import did. Every row read is written, merged into another, already there (skipped), or rejected.

    ``flagged`` says which of the written rows look like those of an odd machine.
    """

    source: str
    files: int = 0
    rows_read: int = 0
    rows_written: int = 0
    merged: int = 0
    skipped: int = 0
    rejected: list[Rejected] = field(default_factory=list)
    flagged: list[Finding] = field(default_factory=list)
    written: dict[tuple[str, str], int] = field(default_factory=dict)
    wall_time_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; ``by_kind_and_device`` has one entry per pair that rows were written for."""
        return {
            **{name: getattr(self, name) for name in ("source", "files", "rows_read", "rows_written", "merged")},
            "skipped": self.skipped,
            "rejected": [{"reason": r.reason, "rows": r.rows, "example": r.example} for r in self.rejected],
            "flagged": [{"where": f.where, "what": f.what, "do": f.do} for f in self.flagged],
            "by_kind_and_device": [
                {"kind": kind, "device": device, "rows": rows} for (kind, device), rows in sorted(self.written.items())
            ],
            "wall_time_s": round(self.wall_time_s, 2),
        }


def load_source(name: str) -> ModuleType:
    """The module of a source; SourceError names the nearest known one."""
    if name not in SOURCES:
        raise SourceError(f"unknown source {name!r}; {nearest(name, SOURCES, 'one of')}")
    return importlib.import_module(f".{SOURCES[name][0]}", __package__)


NO_OPTIONS = ImportOptions()


def import_into(
    store: Store,
    source: str,
    path: str | Path | None = None,
    options: ImportOptions = NO_OPTIONS,
    progress: Progress | None = None,
) -> ImportReport:
    """Import what ``source`` reads at ``path`` into a store.

    SourceError when source, path or options cannot be used, or when no
    row was usable at all: then nothing was written.
    """
    started = time.perf_counter()
    module = load_source(source)
    options.check(source, module.OPTIONS)
    files: list[Path] = module.files(None if path is None else Path(path).expanduser(), options)
    for device in getattr(module, "devices", _devices)(options):
        _keep(store, device)
    report = ImportReport(source, files=len(files))
    root = os.path.commonpath([file.parent for file in files])
    for number, file in enumerate(files):
        if progress is not None:
            progress(file.name, number, len(files))
        _import_file(store, source, module, file, os.path.relpath(file, root), options, report)
    if progress is not None:
        progress("", len(files), len(files))
    report.rejected = _by_reason(report.rejected)
    report.wall_time_s = time.perf_counter() - started
    if not report.rows_written and not report.skipped:
        raise SourceError(f"nothing usable in {_where(path, files)}: {_why(report)}")
    return report


def _devices(options: ImportOptions) -> list[Device]:
    """The devices that came with their figures."""
    return [options.device] if isinstance(options.device, Device) else []


def _keep(store: Store, device: Device) -> None:
    """Keep the figures of a device of the user's own, so that every verb knows its id from now on.

    A device of opcast's stays as it ships, also where a file changes some of its figures: rows are of its id.
    """
    if device.id not in known_devices():
        store.save_device(device)


def _import_file(
    store: Store,
    source: str,
    module: ModuleType,
    file: Path,
    where: str,
    options: ImportOptions,
    report: ImportReport,
) -> None:
    batches, refused = _read(module, file, options)
    report.rejected += refused
    report.rows_read += sum(len(batch) for batch in batches) + sum(r.rows for r in refused)
    if not any(len(batch) for batch in batches):
        return
    for device in module.devices_of(file) if hasattr(module, "devices_of") else ():
        if device.id not in known_devices() and store.device(device.id) is None:
            store.save_device(device)
    run_id = f"{source}-{_fingerprint(module, file, options)}"
    for kind_name, table, problems in combined(batches, source, file):
        report.rejected += problems
        table, problems = sift(store, kind_name, table, where, "device" in module.OPTIONS)
        report.rejected += problems
        table, gone, odd = merged(kind_name, table)
        report.merged += gone
        if odd:
            what_tells = "they are merged: if something tells them apart that is no dim, put it into the backend's name"
            report.flagged.append(Finding("warning", f"{kind_name} in {where}", odd, what_tells))
        for device_id, rows_of_device in _by_device(table):
            _write(store, kind_name, device_id, rows_of_device, run_id, report)


def _write(store: Store, kind_name: str, device_id: str, table: pa.Table, run_id: str, report: ImportReport) -> None:
    """Add a file's rows of one kind and device, unless they are there."""
    with locked(store.path / ".import.lock"):
        there = any((store.path / f"op={kind_name}" / f"device={device_id}").glob(f"{run_id}-*.parquet"))
        if there:
            report.skipped += len(table)
            return
        store.write((kind_name, table), run_id)
    report.rows_written += len(table)
    report.flagged += slow_links(Rows(kind_name, device_id, table, store.known_device(device_id)))
    key = (kind_name, device_id)
    report.written[key] = report.written.get(key, 0) + len(table)


def _read(module: ModuleType, file: Path, options: ImportOptions) -> tuple[list[RowBatch], list[Rejected]]:
    """Batches of one file, and what was refused of it; a file that cannot be read is refused as a whole."""
    try:
        batches = list(module.read(file, options))
    except (pa.ArrowException, OSError, *UNREADABLE) as error:  # a foreign file may hold anything
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
        text = reason if isinstance(error, SourceError) else f"the file is damaged ({reason})"
        return [], [Rejected(text.replace(str(file), file.name), 0, str(file))]
    return [batch for batch in batches if batch.kind], [r for batch in batches for r in batch.rejected if r]


def _by_device(table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    devices = sorted(pc.unique(table["device_id"]).to_pylist())
    for device_id in devices:
        yield device_id, table if len(devices) == 1 else matching(table, "device_id", device_id)


def _fingerprint(module: ModuleType, file: Path, options: ImportOptions) -> str:
    """A hash of a file's content and of what its rows' meaning depends on."""
    digest = hashlib.sha256(f"{module.VERSION}".encode())
    for name in sorted(getattr(module, "MEANING", ())):
        value = options.device_id if name == "device" else getattr(options, name)
        if isinstance(value, str) and Path(value).is_file():
            value = hashlib.sha256(Path(value).read_bytes()).hexdigest()
        digest.update(f"|{name}={value}".encode())
    digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _by_reason(rejected: list[Rejected]) -> list[Rejected]:
    """One entry a reason with the first example, most rows first."""
    by_reason: dict[str, Rejected] = {}
    for one in rejected:
        before = by_reason.get(one.reason)
        by_reason[one.reason] = Rejected(one.reason, before.rows + one.rows, before.example) if before else one
    return sorted(by_reason.values(), key=lambda r: -r.rows)


def _where(path: str | Path | None, files: list[Path]) -> str:
    return counted(len(files), "file") + (f" of {path}" if path is not None else "")


def _why(report: ImportReport) -> str:
    if not report.rejected:
        return "they hold no rows"
    worst = report.rejected[0]
    return f"{worst.reason} ({worst.example})" + (f", {counted(worst.rows, 'row')}" if worst.rows else "")
