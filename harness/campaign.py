"""Runs a plan into a store: resumable after any end, whatever a case does to the process that runs it.

Cases run in a child process (:mod:`.supervisor`), batch by batch; the rows of a batch are written at its end, each
kind's in one atomic file. A campaign's *run id* is a hash of the plan, the device and the software, so that the same
command finds what it has already measured, and measures only the rest; another environment starts anew.

A canary is measured again in every round; each round has a run id of its own, made from the campaign's.
A part of a campaign (:mod:`.parts`) is one node's share of it, under the same run id. What a run says of itself while
it goes on is a file of its own (:mod:`.sessions`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..datasets.device_names import figures_of_file
from ..datasets.ops import KINDS
from .environment import ALLOCATOR
from .formats import WRITTEN_FOR, in_format_of
from .ledger import CampaignError, CampaignLedger, claim
from .parts import CampaignPart, campaign_id, cut
from .plan import CampaignPlan, Case
from .plan_order import FIRST_OF_KIND
from .rank_map import localize_plan
from .sessions import Heart, Progress, TakenOverError
from .supervisor import InterruptError, Supervisor

if TYPE_CHECKING:
    from ..datasets.store import Store

__all__ = ["CampaignError", "Measurer", "Progress", "Summary", "canary_run_id", "run", "run_id"]

ENVIRONMENT_KEYS = ("device_id", "opcast_version", "torch", "cuda", "driver", "nccl", "link", "ranks_per_node")
WHERE_KNOWN = ("power_limit_w", "ecc", "clock_limit_mhz", "cudnn", "cublas", "triton")  # of the environment, too
MOST_DEATHS_IN_A_ROW = 20
WHOLE = CampaignPart()


@dataclass(frozen=True)
class Summary:
    """What a run of a campaign did; ``done`` of ``total`` cases, canary rounds included, are in the store.

    ``outcome`` is ``complete``, ``interrupted`` (by a signal) or ``deadline``. ``drift`` gives, for each canary
    measured more than once by this run, the largest relative deviation of a round from the median over the rounds.
    """

    run_id: str
    device_id: str
    outcome: str
    total: int
    done: int
    measured: int
    statuses: Mapping[str, int]
    restarts: int
    drift: Mapping[str, float]
    elapsed_s: float

    @property
    def remaining(self) -> int:
        """Cases that another run of the same plan will measure."""
        return self.total - self.done


class Measurer(Protocol):
    """What runs the cases: a supervised child process, or the ranks of torchrun."""

    restarts: int

    def interrupt(self) -> None:
        """Make the other methods raise InterruptError soon. Safe in a signal handler."""

    def start(self) -> dict[str, Any]:
        """Provenance columns of a ready worker."""

    def probe(self) -> dict[str, Any]:
        """The figures of the device that is measured."""

    def ask(self, case: Case, lost: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """The measured columns of one case. Who must end with the case calls ``lost`` with them instead."""

    def close(self) -> None:
        """End it."""


def run(
    plan: CampaignPlan,
    store: Store,
    progress: Callable[[Progress], None] | None = None,
    measurer: Measurer | None = None,
    part: CampaignPart = WHOLE,
) -> Summary:
    """Measure what the store lacks of a plan, or of a part of it. Call it from a thread that lives at least as long.

    SIGINT and SIGTERM end it early, with everything measured so far in the store; before the first case they raise
    KeyboardInterrupt. Raises CampaignError when the campaign cannot run here or another process is running it, and
    the store's errors.
    """
    started = time.monotonic()
    measurer = measurer or Supervisor(plan.settings, _ranks(plan))
    with contextlib.closing(measurer), _signals_interrupt(measurer):
        try:
            environment = measurer.start()
            campaign = campaign_id(plan)
            plan = in_device_formats(localize_plan(plan, environment), environment)
            identifier = run_id(plan, environment)
            path = Path("runs") / f"{identifier}.json"
            record = {"environment": environment, "allocator": dict(ALLOCATOR), "plan": json.loads(plan.to_json())}
            part_label = str(part).replace("/", "of") if part.count > 1 else ""
            with claim(Path(store.path) / path, record, part_label) as locked:
                _ensure_figures(store, measurer, environment)
                case_s = plan.settings.case_timeout_s
                with _beating(store, campaign, identifier, part, environment, case_s, locked) as heart:
                    offset = heart.session.clock_offset_s
                    ledger = CampaignLedger(
                        store, environment, path.as_posix(), clock_offset_s=offset, fence=heart.fence
                    )
                    ledger.sweep(identifier, shared=part.count > 1)
                    return _Run(
                        identifier, cut(plan, part), measurer, ledger, progress, started, heart, part_label
                    ).go()
        except InterruptError:
            raise KeyboardInterrupt from None  # before the first case: there is nothing to sum up


def run_id(plan: CampaignPlan, environment: Mapping[str, Any]) -> str:
    """The name of a campaign: the plan's, and a hash of its content and of what it runs in."""
    software = {key: environment[key] for key in WHERE_KNOWN if environment.get(key) is not None}
    described = [plan.identity, dict(ALLOCATOR), {key: environment.get(key) for key in ENVIRONMENT_KEYS} | software]
    return f"{plan.name}-{hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]}"


def canary_run_id(identifier: str, number: int, part: str = "") -> str:
    """The run id of a round of a campaign's (a part's) canaries, numbered from 1."""
    return f"canary{number:03d}_{part and part + '_'}{identifier}"


@contextlib.contextmanager
def _beating(
    store: Store,
    campaign: str,
    identifier: str,
    part: CampaignPart,
    environment: Mapping[str, Any],
    case_s: float,
    locked: bool,
) -> Iterator[Heart]:
    """This run's word in the store, once nobody else is at the same part; an error that ends the run is in it."""
    heart = Heart.start(Path(store.path), campaign, identifier, part, environment, case_s, locked)
    try:
        heart.wait_for_others()
        yield heart
    except BaseException as error:
        heart.end("failed", f"{type(error).__name__}: {error}")
        raise


def _ranks(plan: CampaignPlan) -> int:
    return max((case.op.ranks for case in (*plan.cases, *plan.canaries) if KINDS[case.op.kind].collective), default=1)


def in_device_formats(plan: CampaignPlan, environment: Mapping[str, Any]) -> CampaignPlan:
    """The plan in the formats that this device has units for: on T4 and V100 bf16 is only emulated."""
    if plan.settings.formats == "planned":
        return plan
    return in_format_of(plan, environment.get("format") or WRITTEN_FOR)


def _ensure_figures(store: Store, measurer: Measurer, environment: Mapping[str, Any]) -> None:
    """A device that has no file is measured once for a store. The store notes that this machine has it."""
    device_id = environment["device_id"]
    if not figures_of_file(device_id) and store.device(device_id) is None:
        from ..datasets.devices import Device

        store.save_device(Device(**measurer.probe()))
    store.note_machine(environment["node"], device_id)


@contextlib.contextmanager
def _signals_interrupt(measurer: Measurer) -> Iterator[None]:
    """SIGINT and SIGTERM interrupt the measurer; a second one does what it did before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handler(number: int, _: object) -> None:
        signal.signal(number, before[signal.Signals(number)])
        measurer.interrupt()

    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@dataclass
class _Run:
    """One run of a campaign: what is to do, and what was counted so far."""

    id: str
    plan: CampaignPlan
    measurer: Measurer
    ledger: CampaignLedger
    report: Callable[[Progress], None] | None
    started: float
    heart: Heart
    part: str = ""
    todo: list[tuple[str, tuple[Case, ...]]] = field(default_factory=list)  # run id and cases of each batch
    total: int = 0
    left: int = 0  # cases to do that are not measured yet
    statuses: Counter[str] = field(default_factory=Counter)
    of_kind: Counter[str] = field(default_factory=Counter)  # cases measured, earlier runs included
    canaries: dict[str, list[float]] = field(default_factory=dict)
    deaths: int = 0  # of workers, in a row
    measuring_s: float = 0.0

    def __post_init__(self) -> None:
        lacking = set(self.ledger.lacking(self.id, self.plan.cases))
        self.of_kind.update(case.op.kind for case in self.plan.cases if case not in lacking)
        for batch in self.plan.batches():
            if batch.round:
                identifier = canary_run_id(self.id, batch.round, self.part)
                cases = self.ledger.lacking(identifier, batch.cases)
            else:
                identifier, cases = self.id, tuple(case for case in batch.cases if case in lacking)
            self.todo.append((identifier, cases))
            self.total += len(batch.cases)
            self.left += len(cases)

    def go(self) -> Summary:
        """Measure batch by batch, until all are through or something ends the run."""
        outcome = "complete"
        try:
            outcome = self._batches()
        except InterruptError:
            outcome = "interrupted"
        except TakenOverError:
            self.ledger.waiting.clear()  # the other process measures these cases
            raise
        finally:
            self.ledger.held = 0
            self.ledger.write()
        self._report("")
        self.heart.end(outcome, total=self.total, done=self._done(), statuses=dict(self.statuses))
        return self._summary(outcome)

    def _batches(self) -> str:
        self._report("")
        left_out = False
        for identifier, cases in self.todo:
            for case in cases:
                if self._too_late(identifier, case):
                    left_out = True
                else:
                    self._measure(identifier, case)
            self.ledger.write()
        return "deadline" if left_out else "complete"

    def _too_late(self, identifier: str, case: Case) -> bool:
        """Whether the deadline has passed, and the case is not among the few that every kind gets all the same."""
        limit = self.plan.settings.deadline_s
        if not limit or self.measuring_s <= limit:
            return False
        return identifier != self.id or self.of_kind[case.op.kind] >= FIRST_OF_KIND

    def _measure(self, identifier: str, case: Case) -> None:
        start = time.monotonic()

        def lost(columns: dict[str, Any]) -> None:
            self.ledger.add(identifier, case, columns)
            self.ledger.write()

        columns = self.measurer.ask(case, lost)
        self.deaths = self.deaths + 1 if columns.get("died") else 0
        self.ledger.held = max(0, self.deaths - 1)
        self.ledger.add(identifier, case, columns)
        self.ledger.held = self.deaths
        self.left -= 1
        self.of_kind[case.op.kind] += identifier == self.id
        self.statuses[columns["status"]] += 1
        self.measuring_s += time.monotonic() - start
        if identifier != self.id and columns["status"] == "ok":
            self.canaries.setdefault(f"{case.op} {case.backend} {case.cache}", []).append(columns["latency_us"])
        self._end_when_hopeless(columns)
        self._report(str(case.op))

    def _end_when_hopeless(self, columns: Mapping[str, Any]) -> None:
        """CampaignError when the device is ill and stays it, or case after case ends its worker."""
        if columns.get("device_healthy") is False:
            self.measurer.start()  # says so, and what to do
        if self.deaths >= MOST_DEATHS_IN_A_ROW:
            self.ledger.drop_held()
            raise CampaignError(
                f"{self.deaths} cases in a row ended their worker; the last: {columns.get('error')}. "
                "What was measured before them is in the store"
            )

    def _done(self) -> int:
        return self.total - self.left - len(self.ledger.waiting)

    def _report(self, case: str) -> None:
        measured = sum(self.statuses.values())
        eta = self.measuring_s / measured * self.left if measured else None
        elapsed = time.monotonic() - self.started
        waiting = len(self.ledger.waiting)
        progress = Progress(self.id, self.total, self._done(), waiting, dict(self.statuses), case, elapsed, eta)
        self.heart.beat(progress)
        if self.report is not None:
            self.report(progress)

    def _summary(self, outcome: str) -> Summary:
        drift = {}
        for name, values in self.canaries.items():
            middle = statistics.median(values)
            if len(values) > 1:
                drift[name] = max(abs(value / middle - 1) for value in values)
        return Summary(
            run_id=self.id,
            device_id=self.ledger.environment["device_id"],
            outcome=outcome,
            total=self.total,
            done=self._done(),
            measured=sum(self.statuses.values()),
            statuses=dict(self.statuses),
            restarts=self.measurer.restarts,
            drift=drift,
            elapsed_s=time.monotonic() - self.started,
        )
