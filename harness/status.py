"""How far campaigns are, from a store alone: its announcements, what the processes said of themselves, and the rows."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.columns import values
from ..datasets.ops import KINDS
from .parts import CampaignPart, announcements, cut
from .plan import CampaignPlan
from .sessions import RUNNING, WAITING, Session, sessions

if TYPE_CHECKING:
    from ..datasets.store import Store


@dataclass(frozen=True)
class PartStatus:
    """A part by the last process that ran it, not one that was refused. ``state`` is the process's outcome, or
    ``silent`` when it went quiet."""

    part: str
    node: str
    job: str
    device_id: str
    state: str
    done: int
    total: int
    statuses: Mapping[str, int]
    starts: int  # processes that have run it so far
    busy_s: float  # of all of them
    left_s: float | None
    heard_s: float  # since its last word
    clock_offset_s: float
    error: str


@dataclass(frozen=True)
class CampaignStatus:
    """A campaign over all its parts. ``device_s`` is how long devices were held for it, ``failures`` rows by status."""

    campaign: str
    where: str
    cases: int
    done: int
    failures: Mapping[str, int]
    device_s: float
    left_s: float | None
    parts: Sequence[PartStatus] = field(default_factory=tuple)
    not_started: int = 0

    @property
    def complete(self) -> bool:
        return self.done >= self.cases


def status(store: Store, now: float | None = None) -> list[CampaignStatus]:
    """All campaigns that were announced in a store, in order of their names. StoreError for a damaged record."""
    spoken = sessions(Path(store.path))
    now_s = time.time() if now is None else now
    return [
        _campaign(
            store, name, record, {path: session for path, session in spoken.items() if session.campaign == name}, now_s
        )
        for name, record in announcements(Path(store.path)).items()
    ]


def _campaign(
    store: Store, name: str, record: Mapping[str, Any], spoken: Mapping[Path, Session], now: float
) -> CampaignStatus:
    plan = CampaignPlan.from_json(plan_text(record))
    count = int(record["parts"])
    runs = {(session.device_id, session.run_id) for session in spoken.values()}
    plan = _as_run(Path(store.path), plan, [run_id for _, run_id in sorted(runs)])
    done, failures = _rows(store, plan, runs)
    by_part: dict[str, list[tuple[Path, Session]]] = {}
    for path, session in sorted(spoken.items(), key=lambda item: item[1].started_at):
        by_part.setdefault(session.part, []).append((path, session))
    parts = [
        _part(starts, now) for _, starts in sorted(by_part.items(), key=lambda item: CampaignPart.parse(item[0]).index)
    ]
    unheard = [i for i in range(count) if str(CampaignPart(i, count)) not in by_part]
    return CampaignStatus(
        name,
        str(record.get("where") or "here"),
        len(plan.cases),
        done,
        failures,
        sum(part.busy_s for part in parts),
        _left(spoken.values(), parts, [len(cut(plan, CampaignPart(i, count)).cases) for i in unheard]),
        tuple(parts),
        len(unheard),
    )


def plan_text(record: Mapping[str, Any]) -> str:
    """The plan of an announced campaign as text."""
    return json.dumps(record["plan"])


def _as_run(store: Path, plan: CampaignPlan, runs: Sequence[str]) -> CampaignPlan:
    """The plan as it runs: with the links, ranks and formats of the device, which its announcement does not know."""
    for run_id in runs:
        path = store / "runs" / f"{run_id}.json"
        with contextlib.suppress(OSError, ValueError, KeyError):
            return CampaignPlan.from_json(plan_text(json.loads(path.read_text("utf-8"))))
    return plan


def _rows(store: Store, plan: CampaignPlan, runs: Iterable[tuple[str, str]]) -> tuple[int, dict[str, int]]:
    """Cases that have a row, and rows by every status but ok, of all runs of a plan (one for each environment)."""
    keys: set[Any] = set()
    failures: Counter[str] = Counter()
    collective = {case.op.kind for case in plan.cases if KINDS[case.op.kind].collective}
    for device_id, run_id in sorted(runs):
        keys |= store.done(device_id, run_id)
        for kind_name in {case.op.kind for case in plan.cases} & set(store.kinds()):
            rows = store.read(kind_name, device_id, status=None, newest=False, columns=["status"], run_id=run_id)
            failures.update(name for name in values(rows["status"]) if name != "ok")
    planned = {case.key for case in plan.cases}
    done = sum(key in planned for key in keys)
    done += min(sum(key[0].kind in collective and key not in planned for key in keys), len(planned) - done)
    return done, dict(failures)


def _part(starts: Sequence[tuple[Path, Session]], now: float) -> PartStatus:
    path, last = ([start for start in starts if start[1].ran or start[1].outcome != "failed"] or starts)[-1]
    heard_s = max(now - _written_at(path), 0.0)
    silent = last.outcome in (RUNNING, WAITING) and heard_s > last.lease_s
    pace = last.busy_s / last.measured if last.measured else None
    going = last.outcome in (RUNNING, WAITING) and not silent
    return PartStatus(
        last.part,
        last.node,
        last.job,
        last.device_id,
        "silent" if silent else last.outcome,
        last.done,
        last.total,
        dict(last.statuses),
        len(starts),
        sum(session.busy_s for _, session in starts),
        pace * (last.total - last.done) if pace and going else None,
        heard_s,
        last.clock_offset_s,
        last.error,
    )


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _left(spoken: Iterable[Session], parts: Sequence[PartStatus], unheard: Sequence[int]) -> float | None:
    """Seconds until the last running part is through and those that wait have had their turn; None when unknown."""
    all_sessions = list(spoken)
    measured, busy = sum(session.measured for session in all_sessions), sum(session.busy_s for session in all_sessions)
    running = [part.left_s for part in parts if part.left_s is not None]
    idle = sum(unheard) + sum(
        part.total - part.done for part in parts if part.left_s is None and part.state != "complete"
    )
    if not idle:
        return max(running, default=0.0)
    if not measured:
        return None
    return max(running, default=0.0) + busy / measured * idle / max(len(running), 1)
