"""The measurement store: a directory of Parquet that only ever grows.

``<store>/op=<kind>/device=<device_id>/<run_id>-<part>.parquet``. Writers in any number of processes never meet: a
part's name is random. Nothing is edited or deleted; a correction is a new row and a note in ``manifest.json``.
Devices whose figures were measured, the CPU for one, or come from a user's file, are kept beside the rows as
``devices/<device_id>.json``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .columns import group_keys, matching, number_array, numbers, text_array, values, without
from .devices import Device, DeviceError, load_device
from .files import StoreError, locked, read_parquet, write_atomically, write_parquet
from .ops import KINDS, Op
from .reading import read_json
from .row_clocks import STEADY, burst_mhz, relative_clocks
from .schema import ENVIRONMENT, Measurement, SchemaError, check_values, conform, row_ops, schema_for, table_from

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FORMAT", "Exact", "Store", "StoreError", "newest_rows"]

MANIFEST = "manifest.json"
FORMAT = 1
KEPT = 256  # kinds on devices whose exact measurements stay in memory
ILL_TIMES = 2  # a case that failed so often while its device was ill is at fault itself
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Exact(NamedTuple):
    """Measured latency of one op: median, 10th and 90th percentile, in microseconds; who measured it, at which clock.

    ``clock`` is relative to that of bursts (:func:`.row_clocks.relative_clocks`).
    """

    latency_us: float
    low_us: float
    high_us: float
    backend: str
    source: str = "harness"
    clock: float = 1.0


Measured = tuple[Mapping[tuple[Any, ...], list[Exact]], Mapping[str, int]]  # by op; rows by backend


class Store:
    """A measurement store at ``path``; the directory is made at the first write.

    Raises StoreError when ``path`` is no store, or one that a newer opcast wrote.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"store {self.path} is a file: give a directory")
        self._manifest()

    # --- writing ---------------------------------------------------------------------------------------

    def write(self, rows: Iterable[Measurement] | tuple[str, pa.Table], run_id: str) -> list[Path]:
        """Add measurements, or a whole table of one kind as ``(kind, table)``; returns the files written.

        Rows of one call, kind and device land together or not at all. A table may lack ``run_id``. Raises StoreError
        when the store cannot be written, SchemaError when rows do not fit: then nothing of the call is written.
        """
        if isinstance(rows, tuple):
            tables = [(rows[0], conform(rows[0], _with_run_id(rows[1], run_id)))]
        else:
            ordered = sorted(rows, key=lambda row: row.op.kind)
            grouped = groupby(ordered, key=lambda row: row.op.kind)
            tables = [(kind_name, table_from(kind_name, group)) for kind_name, group in grouped]
        parts = [batch for kind_name, table in tables for batch in _parts(kind_name, table, run_id)]
        if parts:
            self._prepare()
        written = []
        for kind_name, device_id, batch in parts:
            folder = self.path / f"op={kind_name}" / f"device={device_id}"
            written.append(write_parquet(batch, folder / f"{run_id}-{uuid.uuid4().hex[:12]}.parquet"))
        return written

    # --- reading ---------------------------------------------------------------------------------------

    def kinds(self) -> list[str]:
        """Kinds that the store holds rows of, those that only another version of opcast knows included."""
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
        all_nodes: bool = False,
    ) -> pa.Table:
        """Rows of a kind, optionally of one device, one run, and with some columns only.

        ``status=None`` takes failures too. ``newest`` keeps the newest row per (op, device, backend, cache,
        environment), one of a throttled device only where there is no other. A damaged file raises StoreError, or is
        passed over with ``on_corrupt="skip"``. Good rows of nodes that were set aside (:meth:`set_aside`) are left out,
        unless ``all_nodes`` or every status is asked for.
        """
        import pyarrow as pa

        schema = schema_for(kind_name)
        names = schema.names if columns is None else list(columns)
        filters = ["status"] * (status is not None) + ["run_id"] * (run_id is not None)
        aside = [] if all_nodes or status is None else self.aside()
        places = ["node", "gpu", "device_id"] if aside else []
        ranks = (*identity(kind_name), "throttled") if newest else ()
        needed = list(dict.fromkeys([*names, *filters, *places, *ranks]))
        parts = []
        for path in self.files(kind_name, device):
            if run_id is not None and not path.name.startswith(f"{run_id}-"):
                continue
            try:
                parts.append(read_parquet(path, kind_name, needed))
            except StoreError:
                if on_corrupt != "skip":
                    raise
        table = pa.concat_tables(parts) if parts else schema.empty_table().select(needed)
        if run_id is not None:
            table = matching(table, "run_id", run_id)
        if status is not None:
            table = matching(table, "status", status)
        if aside:
            table = table.take(number_array(_not_of(table, aside)))
        if newest:
            table = newest_rows(kind_name, table)
        return table.select(names)

    def done(self, device_id: str, run_id: str | None = None) -> set[tuple[Op, str, str]]:
        """The (op, backend, cache) that have a row on a device, in one run or in any.

        Of any status; but one error or timeout of a time when the device was ill does not count: another run measures
        the case again, and its newer row is then the one that counts.
        """
        states: set[tuple[Op, str, str]] = set()
        for kind_name in self.kinds():
            if kind_name not in KINDS:
                continue
            columns = [*KINDS[kind_name].names, "dtype", "out_dtype", "backend", "cache", "status", "device_healthy"]
            table = self.read(kind_name, device_id, status=None, newest=False, run_id=run_id, columns=columns)
            keys = list(zip(row_ops(kind_name, table), values(table["backend"]), values(table["cache"]), strict=True))
            ill = _of_an_ill_device(table).tolist()
            doubtful = Counter(key for key, in_doubt in zip(keys, ill, strict=True) if in_doubt)
            states.update(key for key, in_doubt in zip(keys, ill, strict=True) if not in_doubt)
            states.update(key for key, times in doubtful.items() if times >= ILL_TIMES)
        return states

    def lookup(self, kind_name: str, device_id: str, cache: str) -> Mapping[tuple[Any, ...], list[Exact]]:
        """Exact measurements by ``(*dims, dtype, out_dtype)``: one entry per backend and environment, newest first.

        Where percentiles were not kept, they are the median. What was timed with the host's dispatch, or on a throttled
        device, is left out. Kept as long as the files are the same: who asks again must not change it.
        """
        return self._exact(kind_name, device_id)[cache][0]

    def backend_rows(self, kind_name: str, device_id: str, cache: str) -> Mapping[str, int]:
        """How many of the measurements of :meth:`lookup` each backend has."""
        return self._exact(kind_name, device_id)[cache][1]

    def _exact(self, kind_name: str, device_id: str) -> Mapping[str, Measured]:
        folder = self.path / f"op={kind_name}" / f"device={device_id}"
        if not folder.is_dir():
            return NOTHING
        stamp = tuple((path.name, *_stamp(path)) for path in self.files(kind_name, device_id))
        return _exact(self.path.absolute(), kind_name, device_id, stamp) if stamp else NOTHING

    def fingerprint(self, kind_name: str | None = None, device_id: str | None = None) -> str:
        """A hash of the content of the files that hold a kind's rows of a device, whatever their names."""
        digest = hashlib.sha256()
        for one in sorted(hashlib.sha256(path.read_bytes()).digest() for path in self.files(kind_name, device_id)):
            digest.update(one)
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
            return Device(**read_json(path, StoreError, "a device's figures"))
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            reason = error if isinstance(error, DeviceError) else "no JSON of a device"
            raise StoreError(f"{path} is damaged ({reason}): remove it and measure the device again") from None

    def known_device(self, device_id: str) -> Device:
        """A device's figures, measured into this store or shipped. DeviceError for an unknown one."""
        return self.device(device_id) or load_device(device_id)

    def measured_devices(self) -> list[str]:
        """Ids of the devices whose figures are kept in this store."""
        return sorted(path.stem for path in self.path.glob("devices/*.json"))

    def save_device(self, device: Device) -> Path:
        """Keep a device's figures: those measured on this machine, or those of a file that a user wrote."""
        _check_name("device_id", device.id)
        self._prepare()
        return _write_json(self.path / "devices" / f"{device.id}.json", device.to_dict())

    def note_machine(self, node: str, device_id: str) -> None:
        """Remember which device a machine, by the name that hides its own, was last measured on."""
        _check_name("node", node)
        if self.machine(node) != device_id:
            self._prepare()
            _write_json(self.path / "machines" / f"{node}.json", {"device": device_id})

    def machine(self, node: str) -> str | None:
        """The device that a machine was last measured on into this store, or None."""
        path = self.path / "machines" / f"{node}.json"
        if not path.exists():
            return None
        values = read_json(path, StoreError, "a machine's device")
        if not isinstance(values, dict) or not isinstance(values.get("device"), str):
            raise StoreError(f"{path} is damaged: remove it and measure on this machine again")
        return str(values["device"])

    def aside(self) -> list[dict[str, str]]:
        """Nodes whose rows are not handed out: ``node``, ``gpu``, ``device``, ``why`` and ``at`` of each."""
        return list(self._manifest().get("aside", []))

    def set_aside(self, node: str, gpu: str | None, device_id: str, why: str) -> bool:
        """Hand out no more rows of a node's GPU, whose measurements are unlike the others'; False where it was so."""
        self._prepare()
        with locked(self.path / f".{MANIFEST}.lock"):
            manifest = self._manifest()
            entries = manifest.get("aside", [])
            source = {"node": node, "gpu": gpu or "", "device": device_id}
            if any(source.items() <= former.items() for former in entries):
                return False
            entry = {**source, "why": why, "at": datetime.now(UTC).isoformat(timespec="seconds")}
            _write_json(self.path / MANIFEST, {**manifest, "aside": [*entries, entry]})
        return True

    def take_back(self, node: str) -> bool:
        """Hand out a node's rows again; False where they were never set aside."""
        with locked(self.path / f".{MANIFEST}.lock"):
            manifest = self._manifest()
            entries = [entry for entry in manifest.get("aside", []) if entry["node"] != node]
            if len(entries) == len(manifest.get("aside", [])):
                return False
            _write_json(self.path / MANIFEST, {**manifest, "aside": entries})
        return True

    def _prepare(self) -> None:
        if (self.path / MANIFEST).exists():
            return
        with locked(self.path / f".{MANIFEST}.lock"):
            if not (self.path / MANIFEST).exists():
                manifest = {"format": FORMAT, "created_at": datetime.now(UTC).isoformat(timespec="seconds")}
                _write_json(self.path / MANIFEST, manifest)

    def _manifest(self) -> dict[str, Any]:
        path = self.path / MANIFEST
        try:
            values = read_json(path.read_text("utf-8"), StoreError, MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}; choose another store=…") from None
        except ValueError:
            raise StoreError(
                f"{path} is damaged: remove it; the rows are not in it, only which nodes are set aside is lost"
            ) from None
        if not isinstance(values, dict) or not isinstance(values.get("format"), int):
            raise StoreError(f"{path} is no manifest of opcast: choose another store=…")
        if values["format"] > FORMAT:
            raise StoreError(f"{path} has format {values['format']}, this opcast reads {FORMAT}: update opcast")
        return values


def _not_of(table: pa.Table, aside: Iterable[Mapping[str, str]]) -> np.ndarray:
    """Positions of the rows of no place that was set aside."""
    places = zip(*(values(table[name]) for name in ("node", "gpu", "device_id")), strict=True)
    gone = {(entry["node"], entry["gpu"], entry["device"]) for entry in aside}
    mask = np.array([(node or "", gpu or "", device) not in gone for node, gpu, device in places], dtype=bool)
    return np.flatnonzero(mask)


def _of_an_ill_device(table: pa.Table) -> np.ndarray:
    """Bool [rows]: failures that may be the device's rather than the case's."""
    import pyarrow.compute as pc

    failed = numbers(pc.is_in(table["status"], text_array(["error", "timeout"])))
    checked = numbers(pc.is_valid(table["device_healthy"]))
    return failed & checked & ~numbers(table["device_healthy"])


NOTHING: Mapping[str, Measured] = {"warm": ({}, {}), "cold": ({}, {})}


def _stamp(path: Path) -> tuple[int, int]:
    """What changes with a file's content."""
    try:
        status = path.stat()
    except OSError:  # moved away meanwhile: reading says so
        return 0, 0
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=KEPT)
def _exact(
    store: Path, kind_name: str, device_id: str, stamp: tuple[Any, ...]
) -> dict[str, tuple[dict[tuple[Any, ...], list[Exact]], dict[str, int]]]:
    """Measurements by op, and rows by backend, of each cache state. ``stamp`` is that of the files."""
    key = [*KINDS[kind_name].names, "dtype", "out_dtype"]
    latencies = ["latency_us", "latency_p10_us", "latency_p90_us"]
    columns = ["backend", "source", "cache", "timer", "measured_at", "throttled", "clocks", "sm_clock_mhz"]
    rows = without(Store(store).read(kind_name, device_id, columns=[*key, *latencies, *columns]), "timer", "eager")
    rows = rows.take(number_array(np.flatnonzero(~numbers(rows["throttled"]).astype(bool))))
    words, mhz = _clocks(rows)
    top_mhz = burst_mhz(words, mhz, _usual_mhz(Store(store), device_id) if STEADY in words else math.nan)
    by_key = {}
    for cache in NOTHING:
        table = matching(rows, "cache", cache).sort_by([("measured_at", "descending")])
        median, low, high = (numbers(table[name]) for name in latencies)
        low, high = np.where(np.isnan(low), median, low), np.where(np.isnan(high), median, high)
        backends = values(table["backend"])
        origins = backends, values(table["source"]), relative_clocks(*_clocks(table), top_mhz).tolist()
        exact = map(Exact, median.tolist(), low.tolist(), high.tolist(), *origins)
        answers: dict[tuple[Any, ...], list[Exact]] = {}
        for op, value in zip(zip(*(values(table[name]) for name in key), strict=True), exact, strict=True):
            answers.setdefault(op, []).append(value)
        by_key[cache] = answers, dict(Counter(backends))
    return by_key


def _clocks(rows: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """The words of the column ``clocks`` [n], and the MHz that were counted."""
    return np.array(values(rows["clocks"]), dtype=object), numbers(rows["sm_clock_mhz"])


def _usual_mhz(store: Store, device_id: str) -> float:
    """The clock of bursts by a device's figures; NaN where nobody has them."""
    try:
        return store.known_device(device_id).clock_mhz
    except DeviceError:
        return math.nan


def identity(kind_name: str) -> list[str]:
    """Columns that tell whether two rows measured the same in the same environment, and when."""
    dims = KINDS[kind_name].names
    return [*dims, "dtype", "out_dtype", "device_id", "backend", "cache", *ENVIRONMENT, "measured_at"]


def newest_rows(kind_name: str, table: pa.Table) -> pa.Table:
    """The newest row per (op, device, backend, cache, environment), in the order of time; of equals the last.

    A row of a throttled device counts as older than all others.
    """
    at = numbers(table["measured_at"])
    order = np.lexsort((at, ~numbers(table["throttled"]).astype(bool)))
    keys = group_keys(table, identity(kind_name)[:-1])[order]
    _, last = np.unique(keys[::-1], return_index=True)
    newest = np.sort(order[len(order) - 1 - last])
    return table.take(number_array(newest[np.argsort(at[newest], kind="stable")]))


def _parts(kind_name: str, table: pa.Table, run_id: str) -> list[tuple[str, str, pa.Table]]:
    """(kind, device, rows) of a table of one run, every value checked."""
    import pyarrow.compute as pc

    _check_name("run_id", run_id)
    check_values(kind_name, table)
    others = [name for name in pc.unique(table["run_id"]).to_pylist() if name != run_id]
    if others:
        raise SchemaError(f"rows of run {others[0]!r} cannot be written under run {run_id!r}")
    devices = pc.unique(table["device_id"]).to_pylist()
    for device_id in devices:
        _check_name("device_id", device_id)
    return [(kind_name, device_id, matching(table, "device_id", device_id)) for device_id in devices]


def _with_run_id(table: pa.Table, run_id: str) -> pa.Table:
    if "run_id" in table.column_names:
        return table
    return table.append_column("run_id", text_array([run_id] * len(table)))


def _write_json(path: Path, values: Mapping[str, Any]) -> Path:
    text = json.dumps(values, indent=1, ensure_ascii=False)
    return write_atomically(path, lambda temporary: temporary.write_text(text, "utf-8"))


def _check_name(what: str, value: str) -> None:
    if not SAFE_NAME.fullmatch(value):
        raise StoreError(f"{what}={value!r} must be letters, digits, '.', '_' and '-'")
