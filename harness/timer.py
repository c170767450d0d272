"""How long one call takes: samples until the median is known well enough, or the time budget ends.

Cold and warm are separate protocols. *Warm* repeats the call on the same inputs. *Cold* makes sure that no input
is in the last-level cache: a CPU rotates over distinct inputs (and keeps each result, so that results are written
to cold memory too); a GPU has its L2 overwritten before each sample, outside the timed region.

On CUDA a call is captured in a graph, many times over when it is short, and its replay is timed with events; what
cannot be captured is launched behind a kernel that keeps the device busy meanwhile, and timed with events. On a
CPU the clock is ``perf_counter_ns``.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .cuda_timer import FALL, REST_S, counted_clock, cuda_sampler
from .energy import Joules, mean_power_w
from .host_timer import cold_sampler, host_work_sampler, warm_sampler
from .sampler import Clock, Sampler, SpinClock, Take
from .stopping import MedianWidth, StoppingRule

if TYPE_CHECKING:
    from .cases.base import Prepared

MOST_SAMPLES = 2000
MOST_RETRIES = 8  # batches at throttled clocks that are thrown away before their samples are kept after all
RETRY_PAUSE_S = 0.25
MOST_LOST_S = 4.0  # of a case, for retries and what they throw away
MOST_RESTS = 6
SETTLING_S = 0.25  # of work until the limiter has settled, 100 ms on an H100
CLOCKS_EVERY_NS = 50_000_000  # readings of the clocks: NVML takes milliseconds for one, and the device idles meanwhile
WARMUP_SHARE = 0.1  # of the time budget
LONGEST_WARMUP_S = 0.2
LEAST_SHARE = 0.2  # of the time budget that samples are spread over, so that a busy moment does not decide
LEAST_S = 0.05  # and never longer than this


class ClockState(Protocol):
    """What the timer asks of a reading of the device's clocks."""

    @property
    def throttled(self) -> bool | None:
        """Whether the device ran slower than it should; None when unknown."""


@dataclass(frozen=True)
class Timing:
    """One measurement. Latencies are microseconds for one call; names are those of the store's columns.

    ``iterations`` counts timed calls and ``samples`` their groups; ``converged`` says whether the stopping rule
    was met within the budget; ``throttled`` that samples at throttled clocks had to be kept; ``discarded`` how
    many were thrown away.
    """

    latency_us: float
    latency_p10_us: float
    latency_p90_us: float
    latency_min_us: float
    latency_mean_us: float
    latency_std_us: float
    iterations: int
    timer: str
    cache: str
    throttled: bool
    samples: int
    converged: bool
    discarded: int
    power_w: float | None = None  # of the device, repeating the call
    clocks: str | None = None  # at boost clocks (burst), or at those that the power limit leaves (steady)
    sm_clock_mhz: float | None = None  # while the samples were taken
    event_overhead_us: float | None = None  # that was taken off each sample

    def columns(self) -> dict[str, Any]:
        """The fields that a row of the store has."""
        aside = ("samples", "converged", "discarded")
        return {name: value for name, value in asdict(self).items() if name not in aside}


@dataclass(frozen=True)
class Collected:
    """Samples in microseconds, and how their collection went."""

    values: np.ndarray
    converged: bool
    throttled: bool
    discarded: int
    settled: bool = False  # at the clock that the power limit leaves
    clock_mhz: float | None = None


def measure(
    prepared: Prepared,
    *,
    cache: str = "warm",
    ci_width: float = 0.01,
    budget_s: float = 1.0,
    stopping: StoppingRule | None = None,
    clocks: Callable[[], ClockState] | None = None,
    energy_j: Joules | None = None,
    energy_s: float = 0.0,
    now_ns: Clock = time.perf_counter_ns,
    pause: Callable[[float], None] = time.sleep,
) -> Timing:
    """Time a prepared op.

    Stops when ``stopping`` says so (by default: when the median's 95 % confidence interval is no wider than
    ``ci_width`` of it), though not before samples are spread over :data:`LEAST_SHARE` of the budget, or after
    ``budget_s`` seconds, warm-up included but not the making of inputs, nor what is thrown away. ``clocks`` is read
    every :data:`CLOCKS_EVERY_NS` and at the end: what was taken since the reading before one of throttled clocks is
    discarded and taken again, :data:`MOST_RETRIES` times at most. A GPU's samples are all taken at its boost clock, or
    all at the one that the power limit leaves (:func:`collect`).
    Where ``energy_s`` is above 0, a call that was captured and finds its inputs warm is then repeated for so many
    seconds, for its watts by ``energy_j``: in other protocols the device does other things between the calls.
    ``now_ns`` and ``pause`` are the host's clock and how it waits.
    """
    if cache not in ("cold", "warm"):
        raise ValueError(f"cache={cache!r} is neither cold nor warm")
    if cache == "cold" and prepared.device == "cpu":
        _ = prepared.rotate  # made here, so that making inputs is not on the budget
    on_device = prepared.device == "cuda" and prepared.clock == "device"
    spin = counted_clock(pause) if on_device else None
    deadline = now_ns() + round(budget_s * 1e9)
    with prepared.context(), collector_off():
        sampler = make_sampler(prepared, cache, budget_s, now_ns)
        earliest = now_ns() + round(min(LEAST_S, LEAST_SHARE * budget_s) * 1e9)
        rule = stopping or MedianWidth(ci_width)
        deadline = max(deadline, earliest)
        samples = collect(sampler.take, rule, deadline, clocks, now_ns, pause, sampler.batch, earliest, spin)
        watts = None
        if energy_j and energy_s and sampler.timer == "cuda_graph" and cache == "warm":
            watts = mean_power_w(sampler, energy_j, energy_s, now_ns)
    timing = summarise(samples, sampler.calls, sampler.timer, cache)
    return replace(timing, power_w=watts, event_overhead_us=sampler.overhead_us)


def summarise(samples: Collected, calls: int, timer: str, cache: str) -> Timing:
    """Statistics of samples that each averaged over ``calls`` calls."""
    low, middle, high = np.percentile(samples.values, [10, 50, 90])
    return Timing(
        latency_us=float(middle),
        latency_p10_us=float(low),
        latency_p90_us=float(high),
        latency_min_us=float(samples.values.min()),
        latency_mean_us=float(samples.values.mean()),
        latency_std_us=float(samples.values.std()),
        iterations=len(samples.values) * calls,
        timer=timer,
        cache=cache,
        throttled=samples.throttled,
        samples=len(samples.values),
        converged=samples.converged,
        discarded=samples.discarded,
        clocks=None if samples.clock_mhz is None else "steady" if samples.settled else "burst",
        sm_clock_mhz=samples.clock_mhz,
    )


def collect(
    take: Take,
    stopping: StoppingRule,
    deadline_ns: int,
    clocks: Callable[[], ClockState] | None = None,
    now_ns: Clock = time.perf_counter_ns,
    pause: Callable[[float], None] = time.sleep,
    batch: int = 1,
    earliest_ns: int = 0,
    spin: SpinClock | None = None,
) -> Collected:
    """Batches of samples until the rule is met, but not before ``earliest_ns``, or the deadline has passed.

    A batch is a quarter of the samples so far, and ``batch`` at least. Samples are thrown away when a reading of the
    clocks finds the device throttled, and a batch when ``spin`` finds the clock lower than it was before: then the
    device rests. Rests, and what was thrown away, are not on the budget: the deadline moves with them. What cannot be
    had at the clock of the beginning is had at the one that the power limit leaves, all of it, once that has settled.
    """
    collection = _Collection(pause, now_ns, spin)
    while True:
        collection.add(take(max(batch, len(collection.values) // 4)))
        now = now_ns()
        over = now >= deadline_ns + collection.lost_ns or len(collection.values) >= MOST_SAMPLES
        array = np.array(collection.values)
        enough = len(array) > 0 and now >= earliest_ns + collection.lost_ns and stopping(array)
        if collection.slowed(batch, take):
            continue
        if (
            clocks is not None
            and (over or enough or now - collection.read_ns >= CLOCKS_EVERY_NS)
            and collection.throttled(clocks())
        ):
            continue
        if over or enough:
            return Collected(
                array, enough, collection.hot, collection.discarded, collection.settled, collection.clock_mhz()
            )


@dataclass
class _Collection:
    """Samples so far: which of them are sure, and what was spent on those that were thrown away."""

    pause: Callable[[float], None]
    now_ns: Clock
    spin: SpinClock | None
    values: list[float] = field(default_factory=list)
    sure: int = 0  # samples that a reading of the clocks has covered
    fresh: int = 0  # samples before the last batch
    discarded: int = 0
    retries: int = 0
    rests: int = 0
    began_ns: int = 0
    batch_ns: int = 0  # when the last batch began
    lost_ns: int = 0
    sure_ns: tuple[int, int] = (0, 0)  # when the sure samples were in, and what was lost by then
    read_ns: int = 0  # the last reading of the clocks
    hot: bool = False
    settled: bool = False
    seen_mhz: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.began_ns = self.batch_ns = self.now_ns()
        self.sure_ns = self.began_ns, 0
        self.read_ns = self.began_ns - CLOCKS_EVERY_NS  # a reading follows the first batch

    def add(self, samples: Sequence[float]) -> None:
        """A batch."""
        self.fresh = len(self.values)
        self.values += samples

    def slowed(self, batch: int, take: Take) -> bool:
        """Whether the last batch was taken at a lower clock than the case began with: it is thrown away then."""
        began, self.batch_ns = self.batch_ns, self.now_ns()
        if self.spin is None:
            return False
        mhz = self.spin.mhz()
        self.spin.fastest_mhz = max(self.spin.fastest_mhz, mhz)
        if self.settled or mhz >= (1.0 - FALL) * self.spin.fastest_mhz:
            self.seen_mhz.append(mhz)
            return False
        if self.rests < MOST_RESTS:
            self.rests += 1
            self._drop(self.fresh, self.lost_ns, began, REST_S)
            self.sure = min(self.sure, len(self.values))
            return True
        self.settled, self.sure = True, 0
        settles = self.now_ns() + round(SETTLING_S * 1e9)
        while self.now_ns() < settles:
            take(batch)
        self._drop(0, 0, self.began_ns, 0.0)
        self.seen_mhz.clear()
        return True

    def throttled(self, reading: ClockState) -> bool:
        """Whether samples since the last reading were thrown away because the device was throttled."""
        slow, self.read_ns = bool(reading.throttled), self.now_ns()
        if slow and self.retries < MOST_RETRIES and self.lost_ns < MOST_LOST_S * 1e9:
            self.retries += 1
            since, lost = self.sure_ns
            self._drop(self.sure, lost, since, RETRY_PAUSE_S)
            return True
        self.hot, self.sure, self.sure_ns = self.hot or slow, len(self.values), (self.read_ns, self.lost_ns)
        return False

    def clock_mhz(self) -> float | None:
        """The clock at which the samples were taken; None where it was not measured."""
        return float(np.median(self.seen_mhz)) if self.seen_mhz else None

    def _drop(self, first: int, lost_ns: int, since_ns: int, seconds: float) -> None:
        """Throw away samples from the ``first`` on, taken since then, and rest; none of it is on the budget.

        ``lost_ns`` was lost before.
        """
        self.discarded += len(self.values) - first
        del self.values[first:]
        if seconds:
            self.pause(seconds)
        self.batch_ns = self.now_ns()
        self.lost_ns = lost_ns + self.batch_ns - since_ns


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection meanwhile: a pass over torch's objects takes longer than most ops."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def make_sampler(prepared: Prepared, cache: str, budget_s: float, now_ns: Clock) -> Sampler:
    """What takes samples of this op under the protocol, warmed up."""
    warmup_s = min(WARMUP_SHARE * budget_s, LONGEST_WARMUP_S)
    if prepared.device == "cuda" and prepared.clock == "device":
        return cuda_sampler(prepared, cache, warmup_s, now_ns)
    if prepared.clock == "host":
        return host_work_sampler(prepared, warmup_s, now_ns)
    if cache == "cold":
        return cold_sampler(prepared, warmup_s, now_ns)
    return warm_sampler(prepared.run, warmup_s, now_ns)
