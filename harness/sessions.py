"""What each process that runs a campaign says of itself, in a file of its own beside the rows of a shared store.

``<store>/sessions/<run_id>/<token>.json`` is written anew every few seconds: who runs which part where, how far it is,
since when. Who asks (:mod:`.status`) needs nothing but the store.

It is a lease as well. Locks (:mod:`.ledger`) keep two processes of one machine apart, and of several where the file
system locks across them; where it does not, a process waits until the file of the other one is old, and one that was
replaced meanwhile notices before it writes a row, and stops. Ages are taken by the clock of the file system, which
stamps all files alike whatever the clocks of the nodes say; a node whose own clock differs is told so, and its rows
carry the file system's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..datasets.files import StoreError, write_atomically
from ..datasets.reading import read_json
from .environment import job_name, machine_name, node_name
from .ledger import CampaignError
from .parts import CampaignPart

SESSIONS = "sessions"
BEAT_S = 2.0
LEASE_S = 60.0  # beside the time of a case: how long a silent process is taken to be alive
CLOCK_S = 2.0  # clocks that differ by less count as the same
WAITING, RUNNING = "waiting", "running"  # for another process of the same part, or at work


class TakenOverError(CampaignError):
    """Another process runs this part now, because this one was silent for too long."""


@dataclass(frozen=True)
class Progress:
    """How far a campaign is. ``done`` cases are in the store for good; ``waiting`` are measured, not yet written."""

    run_id: str
    total: int
    done: int
    waiting: int
    statuses: Mapping[str, int]  # of the cases measured by this run
    case: str  # the last one
    elapsed_s: float
    eta_s: float | None


@dataclass(frozen=True)
class Session:
    """One process's word. Times are seconds since 1970 by that node's clock plus ``clock_offset_s``."""

    campaign: str
    run_id: str
    part: str
    node: str
    machine: str
    job: str
    device_id: str
    gpu: str | None
    started_at: float
    at: float
    lease_s: float
    clock_offset_s: float = 0.0
    total: int = 0
    done: int = 0
    measured: int = 0
    statuses: Mapping[str, int] = field(default_factory=dict)
    outcome: str = WAITING  # then running, and at the end complete, interrupted, deadline or failed
    error: str = ""
    health: Mapping[str, Any] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)  # of the ranks of collectives
    ran: bool = False  # whether it got as far as measuring

    @property
    def busy_s(self) -> float:
        """How long the process has held its device."""
        return max(self.at - self.started_at, 0.0)


def read(path: Path) -> Session | None:
    """A session's file; None where it is gone, or not to be read (yet)."""
    try:
        values = read_json(path, StoreError, "a session")
        names = {member.name for member in fields(Session)}
        return Session(**{name: value for name, value in values.items() if name in names})
    except (OSError, StoreError, TypeError, AttributeError):
        return None


def sessions(store: Path) -> dict[Path, Session]:
    """All that can be read, by file."""
    by_path = {path: read(path) for path in sorted(store.glob(f"{SESSIONS}/*/*.json"))}
    return {path: session for path, session in by_path.items() if session is not None}


@dataclass
class Heart:
    """Writes this process's session: at once, every few seconds while cases run, and at the end."""

    path: Path
    session: Session
    locked: bool = True  # whether a lock keeps other processes of this machine away
    beaten_at: float = 0.0  # by the monotonic clock

    @classmethod
    def start(
        cls,
        store: Path,
        campaign: str,
        run_id: str,
        part: CampaignPart,
        environment: Mapping[str, Any],
        case_s: float,
        locked: bool = True,
    ) -> Heart:
        """The first word. StoreError when the store cannot be written."""
        now = time.time()
        path = store / SESSIONS / run_id / f"{part.index}of{part.count}-{uuid.uuid4().hex[:12]}.json"
        for leftover in path.parent.glob(f".{part.index}of{part.count}-*.tmp"):  # of a process that was killed
            if locked or now - _stamp(leftover) > LEASE_S:
                leftover.unlink(missing_ok=True)
        facts: dict[str, Any] = {
            "node": str(environment.get("node") or node_name()),
            "machine": machine_name(),
            "job": job_name(),
            "device_id": str(environment["device_id"]),
            "gpu": environment.get("gpu"),
            "health": environment.get("health") or {},
            "placement": environment.get("placement") or {},
        }
        session = Session(campaign, run_id, str(part), **facts, started_at=now, at=now, lease_s=LEASE_S + case_s)
        heart = cls(path, session, locked)
        heart._write()
        offset = path.stat().st_mtime - time.time()
        if abs(offset) > CLOCK_S:
            heart._say(clock_offset_s=offset, started_at=now + offset, at=now + offset)
        return heart

    def now(self) -> float:
        """Seconds since 1970 by the clock of the file system."""
        return time.time() + self.session.clock_offset_s

    def wait_for_others(self, pause: Callable[[float], None] = time.sleep) -> None:
        """Until no other process can still be at these cases. CampaignError when one goes on with them."""
        heard_at: dict[Path, float] = {}
        while waiting := self._alive_before():
            for path, session in waiting.items():
                if heard_at.setdefault(path, session.at) != session.at:
                    raise CampaignError(
                        f"part {session.part} of campaign {session.run_id} is running on {session.node} "
                        f"{session.job}".rstrip()
                        + ": wait for it or stop it"
                    )
            pause(1.0)
            self._say(at=self.now())
        self._say(at=self.now(), outcome=RUNNING, ran=True)

    def _alive_before(self) -> dict[Path, Session]:
        """Earlier sessions with cases of this part that have not ended, and said so not long ago."""
        mine = self.session.started_at, self.path.name
        return {
            path: other
            for path, other in self._of_these_cases().items()
            if other.outcome in (WAITING, RUNNING)
            and (other.started_at, path.name) < mine
            and self.now() - _stamp(path) < other.lease_s
        }

    def _of_these_cases(self) -> dict[Path, Session]:
        """Sessions of other processes that may have cases of this part: of the same part, or cut another way.

        Those of this machine only where no lock keeps them apart.
        """
        mine = CampaignPart.parse(self.session.part)
        others = {}
        for path in sorted(self.path.parent.glob("*.json")):
            cut = re.match(r"(\d+)of(\d+)-", path.name)
            if path == self.path or not cut or (int(cut[2]) == mine.count and int(cut[1]) != mine.index):
                continue
            other = read(path)
            if other is not None and not (self.locked and other.machine == self.session.machine):
                others[path] = other
        return others

    def beat(self, progress: Progress) -> None:
        """Say how far it is, if it was not said just now. TakenOverError when another process took this part over."""
        if time.monotonic() - self.beaten_at < BEAT_S:
            return
        self.fence()
        measured = sum(progress.statuses.values())
        progress_fields = {
            "total": progress.total,
            "done": progress.done,
            "measured": measured,
            "statuses": progress.statuses,
        }
        with contextlib.suppress(StoreError):  # the rows say it when the store cannot be written
            self._say(at=self.now(), **progress_fields)

    def fence(self) -> None:
        """TakenOverError when another process took these cases over, because this one was silent: write no row."""
        for path, other in self._of_these_cases().items():
            later = (other.started_at, path.name) > (self.session.started_at, self.path.name)
            if later and other.ran:
                own_part = self.session.part
                raise TakenOverError(f"part {own_part} was taken over by {other.node}, because this node was silent")

    def end(self, outcome: str, error: str = "", **told: Any) -> None:
        """The last word; nothing when the store cannot be written."""
        with contextlib.suppress(StoreError):
            self._say(at=self.now(), outcome=outcome, error=error[:300], **told)

    def _say(self, **changes: Any) -> None:
        self.session = Session(**{**vars(self.session), **changes})
        self._write()

    def _write(self) -> None:
        write_atomically(self.path, lambda file: file.write_text(json.dumps(asdict(self.session)), "utf-8"))
        self.beaten_at = time.monotonic()


def _stamp(path: Path) -> float:
    """When the file system says that a file was written; 0 when it is gone."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
