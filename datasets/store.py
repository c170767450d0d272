"""The measurement store: a directory of Parquet that only ever grows.

``<store>/op=<kind>/device=<device_id>/<run_id>-<part>.parquet``. A file is written under a temporary name, flushed to
disk and renamed, so a reader sees all of it or nothing. Writers in any number of processes never meet: a part's name
carries a random suffix. Nothing is edited or deleted; a correction is a new row and a note in ``manifest.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .devices import Device, DeviceError
from .ops import KINDS, Op
from .schema import (
    ENVIRONMENT,
    Measurement,
    SchemaError,
    check_file_schema,
    conform,
    row_ops,
    schema_for,
    table_from,
)

if TYPE_CHECKING:
    import pyarrow as pa

MANIFEST = "manifest.json"
FORMAT = 1
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class StoreError(ValueError):
    """A store that cannot be read or written. The message names the file and the way out."""


@dataclass(frozen=True)
class Exact:
    """Measured latencies of one op: median, 10th and 90th percentile, in microseconds."""

    latency_us: float
    low_us: float
    high_us: float
    backend: str


class Store:
    """A measurement store at ``path``; the directory is made at the first write."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"store {self.path} is a file: give a directory")
        self._check_manifest()

    # --- writing ---------------------------------------------------------------------------------------

    def write(self, rows: Iterable[Measurement] | tuple[str, pa.Table], run_id: str) -> list[Path]:
        """Add measurements, or a whole table of one kind as ``(kind, table)``; returns the files written.

        Rows of one call and one (kind, device) land together or not at all. Raises StoreError when the store cannot
        be written and SchemaError when rows do not fit.
        """
        if isinstance(rows, tuple):
            kind_name, table = rows
            return self._write_table(kind_name, conform(kind_name, table), run_id)
        ordered = sorted(rows, key=lambda row: row.op.kind)
        written: list[Path] = []
        for kind_name, group in groupby(ordered, key=lambda row: row.op.kind):
            written += self._write_table(kind_name, table_from(kind_name, group), run_id)
        return written

    def _write_table(self, kind_name: str, table: pa.Table, run_id: str) -> list[Path]:
        import pyarrow.compute as pc

        _check_name("run_id", run_id)
        self._prepare()
        written = []
        for device_id in pc.unique(table["device_id"]).to_pylist():
            _check_name("device_id", device_id)
            part = table.filter(pc.equal(table["device_id"], device_id))
            folder = self.path / f"op={kind_name}" / f"device={device_id}"
            name = f"{run_id}-{uuid.uuid4().hex[:12]}.parquet"
            written.append(self._atomically(folder / name, lambda path, part=part: _write_parquet(part, path)))
        return written

    def _atomically(self, target: Path, write: Any) -> Path:
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                write(temporary)
                with open(temporary, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_directory(target.parent)
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(f"cannot write {target}: {reason}; nothing that was there is lost") from None
        return target

    def _prepare(self) -> None:
        if not (self.path / MANIFEST).exists():
            self._save_manifest({"format": FORMAT, "created_at": datetime.now(UTC).isoformat(), "notes": []})

    # --- reading ---------------------------------------------------------------------------------------

    def kinds(self) -> list[str]:
        """Kinds that the store holds rows of."""
        return sorted(p.name.removeprefix("op=") for p in self.path.glob("op=*") if any(p.glob("device=*/*.parquet")))

    def devices(self, kind_name: str | None = None) -> list[str]:
        """Devices that the store holds rows of (of one kind)."""
        pattern = f"op={kind_name or '*'}/device=*"
        return sorted({p.name.removeprefix("device=") for p in self.path.glob(pattern) if any(p.glob("*.parquet"))})

    def files(self, kind_name: str | None = None, device_id: str | None = None) -> list[Path]:
        """Parquet files of the store, in a fixed order."""
        return sorted(self.path.glob(f"op={kind_name or '*'}/device={device_id or '*'}/*.parquet"))

    def read(
        self,
        kind_name: str,
        device: str | None = None,
        *,
        status: str | None = "ok",
        newest: bool = True,
        columns: Iterable[str] | None = None,
        run_id: str | None = None,
        on_corrupt: str = "raise",
    ) -> pa.Table:
        """Rows of a kind, optionally of one device and one campaign.

        ``status=None`` takes failures too. ``newest`` keeps the newest row per (op, device, backend, cache,
        environment). A damaged file raises StoreError, or is passed over with ``on_corrupt="skip"``.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        parts = []
        for path in self.files(kind_name, device):
            if run_id is not None and not path.name.startswith(f"{run_id}-"):
                continue
            try:
                parts.append(read_file(path, kind_name))
            except (StoreError, SchemaError):
                if on_corrupt == "raise":
                    raise
        table = pa.concat_tables(parts) if parts else schema_for(kind_name).empty_table()
        if run_id is not None:
            table = table.filter(pc.equal(table["run_id"], run_id))
        if status is not None:
            table = table.filter(pc.equal(table["status"], status))
        if newest:
            table = newest_rows(kind_name, table)
        return table.select(list(columns)) if columns is not None else table

    def done(self, device_id: str, run_id: str | None = None) -> set[tuple[Op, str, str]]:
        """The (op, backend, cache) that have a row of any status on a device, in one campaign or in any."""
        found: set[tuple[Op, str, str]] = set()
        for kind_name in self.kinds():
            if kind_name not in KINDS:
                continue
            table = self.read(kind_name, device_id, status=None, newest=False, run_id=run_id)
            keys = zip(row_ops(kind_name, table), table["backend"].to_pylist(), table["cache"].to_pylist(), strict=True)
            found.update(keys)
        return found

    def lookup(self, kind_name: str, device_id: str, cache: str) -> Mapping[tuple[Any, ...], list[Exact]]:
        """Exact measurements by ``(*dims, dtype, out_dtype)``: one entry per backend and environment, newest first."""
        names = [*KINDS[kind_name].names, "dtype", "out_dtype"]
        wanted = [*names, "cache", "backend", "latency_us", "latency_p10_us", "latency_p90_us", "measured_at"]
        table = self.read(kind_name, device_id, columns=wanted).sort_by([("measured_at", "descending")])
        keys = zip(*(table[name].to_pylist() for name in names), strict=True)
        values = [table[name].to_pylist() for name in ("cache", "backend", *wanted[-4:-1])]
        found: dict[tuple[Any, ...], list[Exact]] = {}
        for key, state, backend, latency, low, high in zip(keys, *values, strict=True):
            if state == cache:
                exact = Exact(
                    latency, low if low is not None else latency, high if high is not None else latency, backend
                )
                found.setdefault(key, []).append(exact)
        return found

    def fingerprint(self, kind_name: str | None = None, device_id: str | None = None) -> str:
        """A hash of the files that hold a kind's rows of a device: changes whenever rows are added."""
        digest = hashlib.sha256()
        for path in self.files(kind_name, device_id):
            digest.update(f"{path.relative_to(self.path)} {path.stat().st_size}\n".encode())
        return digest.hexdigest()[:16]

    # --- measured devices and the manifest ----------------------------------------------------------------

    def device(self, device_id: str) -> Device | None:
        """The measured figures of a device, or None when it was never measured into this store."""
        if not SAFE_NAME.fullmatch(device_id):
            return None
        path = self.path / "devices" / f"{device_id}.json"
        if not path.exists():
            return None
        try:
            return Device.from_dict(json.loads(path.read_text()))
        except (OSError, json.JSONDecodeError, DeviceError) as error:
            raise StoreError(f"{path} is damaged ({error}): remove it and measure the device again") from None

    def measured_devices(self) -> list[str]:
        """Ids of the devices whose figures were measured into this store."""
        return sorted(path.stem for path in self.path.glob("devices/*.json"))

    def save_device(self, device: Device) -> Path:
        """Keep a device's measured figures."""
        _check_name("device_id", device.id)
        self._prepare()
        text = json.dumps(device.to_dict(), indent=1)
        return self._atomically(self.path / "devices" / f"{device.id}.json", lambda path: path.write_text(text))

    def notes(self) -> list[dict[str, str]]:
        """What people wrote about this store, oldest first."""
        return list(self._manifest().get("notes", []))

    def annotate(self, text: str) -> None:
        """Add a note to the manifest, as one does for a correction."""
        self._prepare()
        manifest = self._manifest()
        manifest["notes"] = [*manifest.get("notes", []), {"at": datetime.now(UTC).isoformat(), "text": text}]
        self._save_manifest(manifest)

    def _manifest(self) -> dict[str, Any]:
        try:
            values = json.loads((self.path / MANIFEST).read_text())
        except FileNotFoundError:
            return {}
        except (OSError, json.JSONDecodeError) as error:
            raise StoreError(f"{self.path / MANIFEST} is damaged ({error}): restore or remove it") from None
        if not isinstance(values, dict) or "format" not in values:
            raise StoreError(f"{self.path / MANIFEST} is no manifest of opcast: choose another store=…")
        return values

    def _save_manifest(self, values: Mapping[str, Any]) -> None:
        text = json.dumps(values, indent=1)
        self._atomically(self.path / MANIFEST, lambda path: path.write_text(text))

    def _check_manifest(self) -> None:
        made_by = self._manifest().get("format", FORMAT)
        if made_by > FORMAT:
            raise StoreError(f"store {self.path} has format {made_by}, this opcast reads {FORMAT}: update opcast")


def read_file(path: Path, kind_name: str) -> pa.Table:
    """One file's rows. StoreError when it is damaged, SchemaError when it is not ours, or newer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowInvalid, OSError) as error:
        reason = str(error).splitlines()[0]
        raise StoreError(f"{path} is damaged ({reason}): move it away and measure again") from None
    found = check_file_schema(table.schema, str(path))
    if found != kind_name:
        raise StoreError(f"{path} holds {found} rows but lies under op={kind_name}: move it")
    return conform(kind_name, table)


def newest_rows(kind_name: str, table: pa.Table) -> pa.Table:
    """The newest row per (op, device, backend, cache, environment), in the order of time."""
    import pyarrow as pa

    if len(table) < 2:
        return table
    identity = [*KINDS[kind_name].names, "dtype", "out_dtype", "device_id", "backend", "cache", *ENVIRONMENT]
    table = table.sort_by("measured_at")
    numbered = table.select(identity).append_column("row", pa.array(np.arange(len(table))))
    last = numbered.group_by(identity).aggregate([("row", "max")])["row_max"]
    return table.take(np.sort(last.to_numpy()))


def rows_of(store: Store, device: str | None = None) -> Iterator[tuple[str, pa.Table]]:
    """(kind, newest ok rows) for every kind of a store that this version knows."""
    for kind_name in store.kinds():
        if kind_name in KINDS:
            yield kind_name, store.read(kind_name, device)


def _write_parquet(table: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table, path, compression="zstd")


def _sync_directory(path: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _check_name(what: str, value: str) -> None:
    if not SAFE_NAME.fullmatch(value):
        raise StoreError(f"{what}={value!r} must be letters, digits, '.', '_' and '-'")
