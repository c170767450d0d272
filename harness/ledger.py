"""A campaign's side of the store: what it lacks, rows on their way into it, and the record that names the campaign."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..datasets.schema import Measurement
from .plan import Case

if TYPE_CHECKING:
    from ..datasets.store import Store

FLUSH_S = 30.0  # measured rows wait at most about this long to be written


class CampaignError(ValueError):
    """A campaign that cannot run here. The message says why and what to do."""


@dataclass
class CampaignLedger:
    """Rows of one device and environment on their way into a store. A case is done when its row is on disk."""

    store: Store
    environment: Mapping[str, Any]
    source_ref: str
    waiting: list[Measurement] = field(default_factory=list)
    held: int = 0  # of the last rows, how many are kept back: nobody knows yet whether they are worth keeping
    written_at: float = field(default_factory=time.monotonic)

    def sweep(self, run_id: str) -> None:
        """Remove what a killed run of this campaign left half written. Only for the one who claimed it."""
        for path in Path(self.store.path).glob(f"op=*/device=*/.*{run_id}-*.tmp"):
            path.unlink(missing_ok=True)

    def lacking(self, run_id: str, cases: Sequence[Case]) -> tuple[Case, ...]:
        """Those cases that have no row under this run id, or one of a time when the device was ill."""
        done = self.store.done(self.environment["device_id"], run_id)
        return tuple(case for case in cases if case.key not in done)

    def add(self, run_id: str, case: Case, columns: Mapping[str, Any]) -> None:
        """Keep a row for the next write; write now when rows have waited for :data:`FLUSH_S`."""
        known = {f.name for f in fields(Measurement)}
        values = {name: value for name, value in (*self.environment.items(), *columns.items()) if name in known}
        self.waiting.append(
            Measurement(
                op=case.op,
                backend=case.backend,
                cache=case.cache,
                run_id=run_id,
                measured_at=datetime.now(UTC),
                source_ref=self.source_ref,
                **values,
            )
        )
        if time.monotonic() - self.written_at > FLUSH_S:
            self.write()

    def drop_held(self) -> None:
        """Forget the failures among the rows that are kept back; what was measured among them stays."""
        start = len(self.waiting) - self.held
        self.waiting[start:] = [row for row in self.waiting[start:] if row.status == "ok"]
        self.held = 0

    def write(self) -> None:
        """Put the waiting rows on disk, each kind's in one atomic file per run id; those kept back go on waiting."""
        end = len(self.waiting) - self.held
        ordered = sorted(self.waiting[:end], key=lambda row: row.run_id)
        for run_id, rows in groupby(ordered, key=lambda row: row.run_id):
            self.store.write(list(rows), run_id)
        del self.waiting[:end]
        self.written_at = time.monotonic()


@contextlib.contextmanager
def claim(path: Path, record: Mapping[str, Any]) -> Iterator[None]:
    """Hold a campaign's record locked, so that no second process runs it, and bring it up to date.

    The kernel drops the lock with the process. Systems without ``fcntl`` are not protected.
    Raises CampaignError when another process holds it.
    """
    with _opened(path) as file:
        _lock(file, path)
        text = json.dumps(record).encode()
        file.seek(0)
        if file.read() != text:
            file.truncate(0)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        yield


def _opened(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a+b")
    except OSError as error:
        raise CampaignError(f"the store cannot be written: {path}: {error.strerror}") from None


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise CampaignError(f"campaign {path.stem} is running in this store already: wait for it or stop it") from None
