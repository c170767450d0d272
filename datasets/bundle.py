"""Measurements as one file to share: rows by kind and device, figures of measured devices, a manifest with checksums.

A bundle is a gzipped tar of ``manifest.json``, ``rows/<kind>/<device>.parquet``, ``devices/<device>.json`` and what was
put beside them as it is, ``attached/<name>``: reports, logs, what a machine says of itself. Names of
nodes and GPUs are hashed again with a salt that nobody keeps, so that they tell rows apart and nothing else; messages
of failures and references to files, which may name paths, are left out.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .columns import values
from .files import StoreError, write_atomically
from .ops import KINDS
from .reading import read_json
from .store import Store
from .version import __version__

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1
MANIFEST = "manifest.json"
SITE = re.compile(r"[a-z0-9][a-z0-9._-]{0,40}")
LARGEST = 2 * 2**30  # bytes of one member


class BundleError(ValueError):
    """A bundle that cannot be made or read. The message says why."""


@dataclass(frozen=True)
class Manifest:
    """What a bundle holds: the ``site`` that measured, a ``license``, and each member's checksum and rows."""

    site: str
    license: str
    made_at: str
    opcast_version: str
    files: dict[str, dict[str, Any]]
    format: int = FORMAT


def pack(
    store: Store, path: Path, site: str, license_name: str, run: str = "", attached: Sequence[Path] = ()
) -> Manifest:
    """Write what a store has measured itself (of one campaign: run ids that begin with ``run``), and files beside it.

    BundleError.
    """
    if not SITE.fullmatch(site):
        raise BundleError(f"site={site!r} must be a short word of lower case letters, digits, dots and dashes")
    if not license_name.strip():
        raise BundleError("a bundle needs a license: license=Apache-2.0, or whatever the rows are shared under")
    members: dict[str, bytes] = {}
    files: dict[str, dict[str, Any]] = {}
    salt = os.urandom(16)
    for kind_name in sorted(set(store.kinds()) & set(KINDS)):
        for device_id in store.devices(kind_name):
            rows = _shared(store.read(kind_name, device_id, status=None, newest=False), run, salt, license_name)
            if not len(rows):
                continue
            name = f"rows/{kind_name}/{device_id}.parquet"
            members[name] = _parquet(rows)
            files[name] = {"kind": kind_name, "device": device_id, "rows": len(rows)}
            measured = store.device(device_id)
            if measured is not None:
                members[f"devices/{device_id}.json"] = json.dumps(measured.to_dict()).encode()
    if not members:
        raise BundleError(f"store {store.path} has no measurements of its own" + (f" of {run}" if run else ""))
    members |= _beside(attached)
    for name, content in members.items():
        files.setdefault(name, {})["sha256"] = hashlib.sha256(content).hexdigest()
    manifest = Manifest(site, license_name, datetime.now(UTC).isoformat(timespec="seconds"), __version__, files)
    members = {MANIFEST: json.dumps(asdict(manifest), indent=1).encode(), **members}
    write_atomically(path, lambda temporary: _write_tar(temporary, members), BundleError, "the bundle ")
    return manifest


def _beside(attached: Sequence[Path]) -> dict[str, bytes]:
    """The content of files by the names that they get. BundleError for one that cannot be read, or a name met twice."""
    members: dict[str, bytes] = {}
    for path in attached:
        name = f"attached/{path.name}"
        if name in members:
            raise BundleError(f"attach: two files are called {path.name}")
        try:
            members[name] = path.read_bytes()
        except OSError as error:
            raise BundleError(f"attach: {path} cannot be read: {error.strerror}") from None
    return members


def read(path: Path) -> tuple[Manifest, dict[str, bytes]]:
    """A bundle's manifest and members, every checksum compared. BundleError for what is none, or is damaged."""
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as bundle:
            for member in bundle:
                if member.isfile() and member.size <= LARGEST:
                    file = bundle.extractfile(member)
                    members[member.name] = file.read() if file else b""
    except (OSError, EOFError, tarfile.TarError, ValueError) as error:
        raise BundleError(f"{path} is no bundle: {str(error) or type(error).__name__}") from None
    if MANIFEST not in members:
        raise BundleError(f"{path} is no bundle: it has no {MANIFEST}")
    manifest = _manifest(members.pop(MANIFEST), path)
    for name, entry in manifest.files.items():
        if hashlib.sha256(members.get(name, b"")).hexdigest() != entry.get("sha256"):
            what = "is damaged" if name in members else "is missing"
            raise BundleError(f"{path}: {name} {what}: get the bundle again")
    return manifest, {name: members[name] for name in manifest.files}


def tables(manifest: Manifest, members: dict[str, bytes]) -> Iterator[tuple[str, pa.Table]]:
    """(kind, rows) of each member with rows, kinds that this version does not know left out."""
    import pyarrow.parquet as pq

    for name, entry in manifest.files.items():
        if name.startswith("rows/") and entry.get("kind") in KINDS:
            yield str(entry["kind"]), pq.read_table(io.BytesIO(members[name]))


def _shared(rows: pa.Table, run: str, salt: bytes, license_name: str) -> pa.Table:
    """Rows that were measured here, without what tells where."""
    import pyarrow as pa

    runs, sources = values(rows["run_id"]), values(rows["source"])
    columns = [
        i for i, (name, source) in enumerate(zip(runs, sources, strict=True)) if source == "harness" and _of(name, run)
    ]
    rows = rows.take(pa.array(columns, pa.int64()))
    for name in ("node", "gpu"):
        hashed = [_hashed(plain, salt) for plain in values(rows[name])]
        rows = rows.set_column(
            rows.schema.get_field_index(name), rows.schema.field(name), pa.array(hashed, pa.string())
        )
    for name, value in (("error", None), ("source_ref", None), ("license", license_name)):
        column = pa.array([value] * len(rows), pa.string())
        rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), column)
    return rows


def _of(run_id: str, run: str) -> bool:
    return not run or run_id.startswith(run) or run_id.partition("_")[2].startswith(run)


def _hashed(name: str | None, salt: bytes) -> str | None:
    if not name:
        return name
    return f"{name.partition('-')[0]}-{hashlib.sha256(salt + name.encode()).hexdigest()[:10]}"


def _parquet(rows: pa.Table) -> bytes:
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(rows, out, compression="zstd")
    return out.getvalue()


def _write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as bundle:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            bundle.addfile(member, io.BytesIO(content))


def _manifest(text: bytes, path: Path) -> Manifest:
    content = read_json(text, BundleError, f"the manifest of {path}")
    try:
        manifest = Manifest(**content)
    except TypeError:
        raise BundleError(f"{path} is no bundle: its manifest lacks a field or has another") from None
    if not isinstance(manifest.files, dict) or not isinstance(manifest.site, str) or not SITE.fullmatch(manifest.site):
        raise BundleError(f"{path} is no bundle: its manifest names no site or no files")
    if manifest.format > FORMAT:
        raise BundleError(f"{path} has format {manifest.format}, this opcast reads {FORMAT}: update opcast")
    return manifest


__all__ = ["BundleError", "Manifest", "StoreError", "pack", "read", "tables"]
