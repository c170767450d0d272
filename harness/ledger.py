"""A campaign's side of the store: what it lacks, rows on their way into it, and the record that names the campaign."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..datasets.files import listed_anew, locked
from ..datasets.schema import Measurement
from .plan import Case

if TYPE_CHECKING:
    from ..datasets.store import Store

FLUSH_S = 30.0  # measured rows wait at most about this long to be written
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)  # of a file system without any
SWEEP_S = 600.0  # a half written file of this age is nobody's any more


class CampaignError(ValueError):
    """A campaign that cannot run here. The message says why and what to do."""


@dataclass
class CampaignLedger:
    """Rows of one device and environment on their way into a store. A case is done when its row is on disk."""

    store: Store
    environment: Mapping[str, Any]
    source_ref: str
    waiting: list[Measurement] = field(default_factory=list)
    clock_offset_s: float = 0.0  # of the store's file system against this node's clock
    held: int = 0  # of the last rows, how many are kept back: nobody knows yet whether they are worth keeping
    fence: Callable[[], None] = lambda: None  # raises where another process measures these cases now
    written_at: float = field(default_factory=time.monotonic)

    def sweep(self, run_id: str, shared: bool = False) -> None:
        """Remove what a killed run of this campaign left half written. Only for the one who claimed it.

        A ``shared`` run has other parts that are writing: only what is old goes. Rows that others wrote just now are
        seen from here on.
        """
        self._look_anew()
        before = time.time() + self.clock_offset_s - SWEEP_S
        for path in Path(self.store.path).glob(f"op=*/device=*/.*{run_id}-*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                if not shared or path.stat().st_mtime < before:
                    path.unlink()

    def _look_anew(self) -> None:
        """Have every folder of the device listed anew (:func:`...datasets.files.listed_anew`)."""
        listed_anew(Path(self.store.path))
        for kind in Path(self.store.path).glob("op=*"):
            listed_anew(kind)
            listed_anew(kind / f"device={self.environment['device_id']}")

    def lacking(self, run_id: str, cases: Sequence[Case]) -> tuple[Case, ...]:
        """Those cases that have no row under this run id, or one of a time when the device was ill."""
        done = self.store.done(self.environment["device_id"], run_id)
        return tuple(case for case in cases if case.key not in done)

    def add(self, run_id: str, case: Case, columns: Mapping[str, Any]) -> None:
        """Keep a row for the next write; write now when rows have waited for :data:`FLUSH_S`."""
        names = {f.name for f in fields(Measurement)}
        values = {name: value for name, value in (*self.environment.items(), *columns.items()) if name in names}
        self.waiting.append(
            Measurement(
                op=case.op,
                backend=case.backend,
                cache=case.cache,
                run_id=run_id,
                measured_at=datetime.now(UTC) + timedelta(seconds=self.clock_offset_s),
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
        if end:
            self.fence()
        ordered = sorted(self.waiting[:end], key=lambda row: row.run_id)
        for run_id, rows in groupby(ordered, key=lambda row: row.run_id):
            self.store.write(list(rows), run_id)
        del self.waiting[:end]
        self.written_at = time.monotonic()


@contextlib.contextmanager
def claim(path: Path, record: Mapping[str, Any], part: str = "") -> Iterator[bool]:
    """Hold a campaign's record locked, so that no second process runs it, and bring it up to date; whether it is.

    Of a campaign in parts, each holds a lock of its own, and the record together with the other parts. The kernel drops
    locks with the process. Without ``fcntl``, and on file systems without locks, it is False: nobody is kept away.
    Raises CampaignError when another process holds it.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_opened(path))
        held_alone = _lock(file, path, shared=bool(part))
        if part:
            part_lock = path.with_name(f"{path.stem}.{part.replace('/', 'of')}.lock")
            _lock(stack.enter_context(_opened(part_lock)), part_lock)
        text = json.dumps(record).encode()
        with locked(path.with_name(f".{path.stem}.lock")) if part else contextlib.nullcontext():
            file.seek(0)
            old_text = file.read()
            if old_text != text and not (part and old_text):  # nodes differ in their names alone: the first one's stays
                file.truncate(0)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        yield held_alone


def _opened(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a+b")
    except OSError as error:
        raise CampaignError(f"the store cannot be written: {path}: {error.strerror}") from None


def _lock(file: IO[bytes], path: Path, shared: bool = False) -> bool:
    """Lock an open file, for this process or with others; False where nothing can be locked. CampaignError."""
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CampaignError(f"campaign {path.stem} is running in this store already: wait for it or stop it") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise CampaignError(f"the store cannot be locked: {path}: {error.strerror}") from None
        return False
    return True
