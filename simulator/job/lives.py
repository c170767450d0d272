"""Lives of a job, many at once: steps until something happens, work that is lost, and the way back.

Events of a life come at moments that do not hang on what the job does, and one that comes while the job is down makes
it wait until that one is dealt with, too. So a life with one more interruption never ends earlier, and none ends
earlier with slower checkpoints: tests hold both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .failures import JobEvents, NextEvents
from .schedule import JobTimeline

MOST_EVENTS = 40_000  # of one life, after which it is taken not to end
MOST_LOST = 20.0  # times the undisturbed job: a life as long as that is given up, too


@dataclass
class LifeTrace:
    """The progress of a few lives for a picture: moments in seconds, and the tokens that were trained on by then."""

    moments_s: list[float] = field(default_factory=lambda: [0.0])
    tokens: list[float] = field(default_factory=lambda: [0.0])
    interruptions: list[int] = field(default_factory=list)  # places in the lists above


@dataclass(frozen=True)
class JobLives:
    """What came of each life, arrays [lives] in seconds that add up to ``total_s``.

    ``steps_s`` of steps that counted, ``other_s`` of evaluations and checkpoints that counted, ``lost_s`` of work that
    was done in vain, ``down_s`` from interruptions until the job ran again, ``held_s`` in which it stood still or was
    slowed down without losing work, ``begin_s`` before the first step. ``interruptions`` are those that lost work,
    ``events`` all that happened in all lives, by the number of their cause. ``given_up`` are lives that would not end.
    """

    total_s: np.ndarray
    steps_s: np.ndarray
    other_s: np.ndarray
    lost_s: np.ndarray
    down_s: np.ndarray
    held_s: np.ndarray
    begin_s: float
    interruptions: np.ndarray
    events: np.ndarray
    given_up: np.ndarray
    traces: tuple[LifeTrace, ...] = ()

    @property
    def goodput(self) -> np.ndarray:
        """The share of each life that steps which counted took."""
        return self.steps_s / self.total_s


@dataclass
class LifeProgress:
    """Where each life is, arrays [lives]: the checkpoint ``at`` that it goes on from at ``up_s``, the moment of its
    last event, its end (NaN until it is known), and sums as those of :class:`JobLives`."""

    at: np.ndarray
    up_s: np.ndarray
    now_s: np.ndarray
    total_s: np.ndarray
    lost_s: np.ndarray
    down_s: np.ndarray
    held_s: np.ndarray
    interruptions: np.ndarray

    @classmethod
    def at_start(cls, count: int, begin_s: float) -> LifeProgress:
        """Of so many lives that begin after ``begin_s``."""
        at, interruptions = np.zeros((2, count), dtype=np.int64)
        now_s, lost_s, down_s, held_s = np.zeros((4, count))
        begun_s, total_s = np.full(count, begin_s), np.full(count, np.nan)
        return cls(at, begun_s, now_s, total_s, lost_s, down_s, held_s, interruptions)


def live(
    job: JobTimeline,
    factors: np.ndarray,
    events: NextEvents,
    begin_s: float = 0.0,
    spares: int | None = None,
    repair_s: float = 0.0,
    traced: int = 0,
) -> JobLives:
    """Live through a job as often as there are ``factors`` [n], which say how much longer its steps take than expected.

    ``spares`` nodes stand by; one that is replaced is back after ``repair_s``. None: there is always another.
    """
    count = len(factors)
    lives = LifeProgress.at_start(count, begin_s)
    happened = np.zeros(0, dtype=np.int64)
    shelf_s = None if spares is None else np.zeros((count, max(spares, 1)))  # when each spare is ready
    traces = [LifeTrace() for _ in range(min(traced, count))]
    alive = np.arange(count)
    longest_s = MOST_LOST * job.undisturbed_s * max(float(factors.max()), 1.0)
    for _ in range(MOST_EVENTS):
        event = events(alive)
        lives.now_s[alive] += event.gap_s
        ends_s = lives.up_s[alive] + _until(job, factors[alive], lives.at[alive], job.checkpoints) + job.durable_s
        done = ends_s <= lives.now_s[alive]
        lives.total_s[alive[done]] = ends_s[done]
        endless = ~done & (lives.now_s[alive] > longest_s)
        lives.total_s[alive[endless]] = lives.now_s[alive[endless]]
        going = ~(done | endless)
        alive, event = alive[going], _of(event, going)
        if not len(alive):
            break
        happened = _counted(happened, event.cause)
        stands, hit = event.held_s > 0, event.down_s > 0
        if stands.any():
            _hold(job, factors, lives, alive[stands], event.held_s[stands])
        if hit.any():
            which, wait_s = alive[hit], np.zeros(int(hit.sum()))
            if shelf_s is not None:
                wait_s = _from_shelf(shelf_s, which, lives.now_s[which], event.replaced[hit], spares or 0, repair_s)
            _interrupt(job, factors, lives, which, wait_s + event.down_s[hit], traces)
    return _ended(job, factors, lives, longest_s, begin_s, happened, traces)


def _ended(
    job: JobTimeline,
    factors: np.ndarray,
    lives: LifeProgress,
    longest_s: float,
    begin_s: float,
    happened: np.ndarray,
    traces: list[LifeTrace],
) -> JobLives:
    """What came of lives of which none goes on."""
    given_up = np.isnan(lives.total_s)
    lives.total_s[given_up] = lives.now_s[given_up]
    given_up |= lives.total_s > longest_s
    last = job.checkpoints
    for number, trace in enumerate(traces):
        trace.moments_s += [float(lives.up_s[number]), float(lives.total_s[number])]
        trace.tokens += [float(job.tokens[lives.at[number]]), float(job.tokens[last])]
    steps_s = factors * job.steps_s[last]
    other_s = np.full(len(factors), job.other_s[last] + job.durable_s)
    parts_s = (lives.total_s, steps_s, other_s, lives.lost_s, lives.down_s, lives.held_s)
    return JobLives(*parts_s, begin_s, lives.interruptions, happened, given_up, tuple(traces))


def _interrupt(
    job: JobTimeline,
    factors: np.ndarray,
    lives: LifeProgress,
    which: np.ndarray,
    down_s: np.ndarray,
    traces: list[LifeTrace],
) -> None:
    """Lives lose what they have not saved, and go on so much later."""
    moment_s = lives.now_s[which]
    running, reached, kept_s = _saved(job, factors, lives, which)
    if traces:
        _trace(traces, job, factors, lives, which, running)
    lives.lost_s[which] += np.where(running, moment_s - lives.up_s[which] - kept_s, 0.0)
    back_s = np.maximum(lives.up_s[which], moment_s + down_s)
    lives.down_s[which] += back_s - np.maximum(lives.up_s[which], moment_s)
    lives.at[which], lives.up_s[which] = reached, back_s
    lives.interruptions[which] += 1


def _saved(
    job: JobTimeline, factors: np.ndarray, lives: LifeProgress, which: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whether lives run at their last event, the checkpoint that is written by then, and the seconds of work in it."""
    moment_s, up_s, at = lives.now_s[which], lives.up_s[which], lives.at[which]
    running = moment_s >= up_s
    reached = np.where(running, _reached(job, factors[which], at, moment_s - up_s - job.durable_s), at)
    return running, reached, _until(job, factors[which], at, reached)


def _counted(happened: np.ndarray, cause: np.ndarray) -> np.ndarray:
    """Events by cause, with some more."""
    more = np.bincount(cause, minlength=len(happened))
    more[: len(happened)] += happened
    return more


def _until(job: JobTimeline, factors: np.ndarray, start: np.ndarray, end: np.ndarray | int) -> np.ndarray:
    """Seconds from one checkpoint to another."""
    steps_s, other_s = job.steps_s, job.other_s
    return factors * (steps_s[end] - steps_s[start]) + (other_s[end] - other_s[start])


def _reached(job: JobTimeline, factors: np.ndarray, start: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The last checkpoint before the end that is written within so many seconds after ``start``, by bisection."""
    low, high = start.copy(), np.full(len(start), job.checkpoints - 1)
    high = np.maximum(high, low)
    while (low < high).any():
        middle = (low + high + 1) // 2
        there = _until(job, factors, start, middle) <= seconds
        low, high = np.where(there, middle, low), np.where(there, high, middle - 1)
    return low


def _hold(job: JobTimeline, factors: np.ndarray, lives: LifeProgress, which: np.ndarray, still_s: np.ndarray) -> None:
    """Lives stand still for a while: what they saved stays saved, and one that is down is down so long at least."""
    moment_s, up_s = lives.now_s[which], lives.up_s[which]
    running, reached, kept_s = _saved(job, factors, lives, which)
    down_until_s = np.maximum(up_s, moment_s + still_s)
    lives.held_s[which] += np.where(running, still_s, 0.0)
    lives.down_s[which] += np.where(running, 0.0, down_until_s - up_s)
    lives.up_s[which] = np.where(running, up_s + kept_s + still_s, down_until_s)
    lives.at[which] = reached


def _of(event: JobEvents, which: np.ndarray) -> JobEvents:
    """The events of some lives."""
    arrays = (event.gap_s, event.down_s, event.held_s, event.replaced, event.cause)
    return JobEvents(*(array[which] for array in arrays))


def _from_shelf(
    shelf_s: np.ndarray, which: np.ndarray, moment_s: np.ndarray, replaced: np.ndarray, spares: int, repair_s: float
) -> np.ndarray:
    """Seconds until a node takes the place of one that left: the spare that is ready first, or the repaired node."""
    wait_s = np.zeros(len(which))
    if not spares:
        wait_s[replaced] = repair_s
        return wait_s
    lives, moments_s = which[replaced], moment_s[replaced]
    first = shelf_s[lives].argmin(axis=1)
    taken_s = np.maximum(shelf_s[lives, first], moments_s)
    shelf_s[lives, first] = moments_s + repair_s
    shelf_s[lives, first] = np.maximum(shelf_s[lives, first], taken_s)
    wait_s[replaced] = taken_s - moments_s
    return wait_s


def _trace(
    traces: list[LifeTrace],
    job: JobTimeline,
    factors: np.ndarray,
    lives: LifeProgress,
    which: np.ndarray,
    running: np.ndarray,
) -> None:
    """Note how far the first lives came before they were interrupted."""
    for index, number in enumerate(which[: len(traces)]):
        if number >= len(traces) or not running[index]:
            continue
        at, up_s, moment_s = lives.at[number], float(lives.up_s[number]), float(lives.now_s[number])
        places_s = factors[number] * (job.steps_s - job.steps_s[at]) + (job.other_s - job.other_s[at])
        far = float(np.interp(moment_s - up_s, places_s, job.tokens))
        trace = traces[number]
        trace.moments_s += [up_s, moment_s]
        trace.tokens += [float(job.tokens[at]), far]
        trace.interruptions.append(len(trace.tokens) - 1)
