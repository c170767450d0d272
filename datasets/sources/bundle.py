"""Bundles of other sites (:mod:`..bundle`): their rows as they are, with the site's name as their source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc

from .. import bundle
from ..columns import text_array
from ..devices import Device
from ..reading import read_json
from .options import ImportOptions
from .tables import RowBatch, SourceError

VERSION = 1
OPTIONS: dict[str, str] = {}
LEFT = ("run_id", "source")  # the store's own, or set here


def files(path: Path | None, options: ImportOptions) -> list[Path]:
    """The bundle, or those in a folder (``*.tar.gz``). SourceError when there is none."""
    if path is None:
        raise SourceError("source=bundle needs path=FILE.tar.gz, or a folder of such")
    archives = sorted(path.glob("*.tar.gz")) if path.is_dir() else [path] if path.is_file() else []
    if not archives:
        raise SourceError(f"path={path} is no bundle and has none (*.tar.gz)")
    return archives


def read(file: Path, options: ImportOptions) -> Iterator[RowBatch]:
    """Its rows by kind and device. BundleError for a damaged one."""
    manifest, members = bundle.read(file)
    for kind_name, rows in bundle.tables(manifest, members):
        good = rows.filter(_ok(rows))
        columns = {name: good[name] for name in good.column_names if name not in LEFT}
        yield RowBatch(kind_name, {**columns, "source": text_array([f"site:{manifest.site}"] * len(good))})


def devices_of(file: Path) -> list[Device]:
    """The figures of measured devices that travel with the rows. BundleError for a damaged file."""
    _, members = bundle.read(file)
    figures = (
        read_json(text, bundle.BundleError, name) for name, text in members.items() if name.startswith("devices/")
    )
    return [Device.from_dict(device) for device in figures]


def _ok(rows: object) -> object:
    return pc.equal(rows["status"], "ok")  # type: ignore[index]
