"""``opcast import``: foreign measurements into a store. Importing again adds nothing; a killed import goes on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.counts import counted
from ..datasets.devices import Device, known_devices, load_device, overridden
from ..datasets.loading import load
from ..datasets.sources.options import ImportOptions
from ..datasets.store import Store
from ..simulator.question.canonical import RequestError
from .requests import ImportRequest
from .show import BadInputError, print_json, say, table, wants_json

if TYPE_CHECKING:
    from ..datasets.sources.importing import ImportReport, Progress

SUBJECT = "source"
SHARED = ("home", "store", "predictors", "format", "source", "path", "hydra")
"""Settings that are no option of a source."""
FREE_CHOICE = {"device": "++device.id"}
LISTS = ("systems", "tables", "frameworks")
LONGEST = 40  # reasons shown on a terminal; format=json has all


def run(config: dict[str, Any]) -> int:
    """Import and print the report; returns the exit code."""
    from ..datasets.sources.importing import SOURCES, import_into

    as_json = wants_json(config)
    if config["source"] in (None, "???"):
        raise BadInputError(f"say what to import: source={'|'.join(SOURCES)}")
    store = Store(Path(config["store"]).expanduser())
    chosen = load(ImportOptions, options(config, store), RequestError, "import")
    own = {name: config[name] for name in ("source", "path", "store")}
    request = load(ImportRequest, {**own, "options": chosen}, RequestError, "import")
    with progress_bar() as progress:
        report = import_into(store, request.source, request.path, request.options, progress)
    if as_json:
        print_json({**report.to_dict(), "store": str(store.path)})
    else:
        show(report, store)
    return 0


def options(config: dict[str, Any], store: Store) -> dict[str, Any]:
    """The settings that a source may take: a known device as its id, a single name as a list of it.

    DeviceError for a device that neither opcast nor the store knows, or whose figures are none.
    """
    chosen = {name: value for name, value in config.items() if name not in SHARED}
    chosen |= {name: [chosen[name]] for name in LISTS if isinstance(chosen.get(name), str)}
    for name in LISTS:
        if not isinstance(chosen.get(name) or [], list):
            raise RequestError(f"{name}={chosen[name]!r} must be a list of names, as {name}=[a,b]")
    if isinstance(given := chosen.get("device"), dict):
        device_id = str(given.get("id"))
        if set(given) == {"id"}:
            chosen["device"] = store.known_device(device_id).id
        elif device_id in known_devices():  # some of its figures changed, as `predict` takes it: rows are of that id
            chosen["device"] = overridden(load_device(device_id), given).id
        else:
            chosen["device"] = Device.from_dict(given)
    return chosen


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """A bar on stderr where that is a terminal, else None."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


def show(report: ImportReport, store: Store) -> None:
    """The report as tables."""
    heads = ("kind", "device", "rows written")
    rows = [(kind, device, f"{count:,}") for (kind, device), count in sorted(report.written.items())]
    table(str(store.path), heads, rows or [("nothing new", "", "0")])
    if report.rejected:
        reasons = [(f"{one.rows:,}", one.reason, one.example) for one in report.rejected[:LONGEST]]
        table("kept out", ("rows", "why", "for example"), reasons)
    if report.flagged:
        table("doubtful", ("where", "what", "do"), [(f.where, f.what, f.do) for f in report.flagged])
    refused = sum(one.rows for one in report.rejected)
    say(
        f"{counted(report.rows_read, 'row')} of {counted(report.files, 'file')} read in {report.wall_time_s:.1f} s: "
        f"{report.rows_written:,} written, {report.merged:,} repeats merged, {report.skipped:,} already there, "
        f"{refused:,} kept out"
    )
    if report.rows_written:
        say("next: `opcast train device=…`; then `opcast data gain report=gain.html` shows what became better")
