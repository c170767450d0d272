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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .cuda_timer import cuda_sampler
from .energy import Joules, mean_power_w
from .host_timer import cold_sampler, host_work_sampler, warm_sampler
from .sampler import Clock, Sampler, Take
from .stopping import MedianWidth, StoppingRule

if TYPE_CHECKING:
    from .cases.base import Prepared

MOST_SAMPLES = 2000
MOST_RETRIES = 8  # batches at throttled clocks that are thrown away before their samples are kept after all
RETRY_PAUSE_S = 0.25
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
    ``budget_s`` seconds, warm-up included but not the making of inputs. ``clocks`` is read every
    :data:`CLOCKS_EVERY_NS` and at the end: what was taken since the reading before one of throttled clocks is discarded
    and taken again, :data:`MOST_RETRIES` times at most.
    Where ``energy_s`` is above 0, a call that was captured and finds its inputs warm is then repeated for so many
    seconds, for its watts by ``energy_j``: in other protocols the device does other things between the calls.
    ``now_ns`` and ``pause`` are the host's clock and how it waits.
    """
    if cache not in ("cold", "warm"):
        raise ValueError(f"cache={cache!r} is neither cold nor warm")
    if cache == "cold" and prepared.device == "cpu":
        _ = prepared.rotate  # made here, so that making inputs is not on the budget
    deadline = now_ns() + round(budget_s * 1e9)
    with prepared.context(), collector_off():
        sampler = make_sampler(prepared, cache, budget_s, now_ns)
        earliest = now_ns() + round(min(LEAST_S, LEAST_SHARE * budget_s) * 1e9)
        rule = stopping or MedianWidth(ci_width)
        found = collect(sampler.take, rule, deadline, clocks, now_ns, pause, sampler.batch, earliest)
        watts = None
        if energy_j and energy_s and sampler.timer == "cuda_graph" and cache == "warm":
            watts = mean_power_w(sampler, energy_j, energy_s, now_ns)
    return replace(summarise(found, sampler.calls, sampler.timer, cache), power_w=watts)


def summarise(found: Collected, calls: int, timer: str, cache: str) -> Timing:
    """Statistics of samples that each averaged over ``calls`` calls."""
    low, middle, high = np.percentile(found.values, [10, 50, 90])
    return Timing(
        latency_us=float(middle),
        latency_p10_us=float(low),
        latency_p90_us=float(high),
        latency_min_us=float(found.values.min()),
        latency_mean_us=float(found.values.mean()),
        latency_std_us=float(found.values.std()),
        iterations=len(found.values) * calls,
        timer=timer,
        cache=cache,
        throttled=found.throttled,
        samples=len(found.values),
        converged=found.converged,
        discarded=found.discarded,
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
) -> Collected:
    """Batches of samples until the rule is met, but not before ``earliest_ns``, or the deadline has passed.

    A batch is a quarter of the samples so far, and ``batch`` at least.
    """
    values: list[float] = []
    sure = discarded = retries = 0  # of the samples, those that a reading of the clocks has covered
    read_ns: int | None = None
    throttled = False
    while True:
        values += take(max(batch, len(values) // 4))
        now = now_ns()
        array = np.array(values)
        over = now >= deadline_ns or len(values) >= MOST_SAMPLES
        enough = now >= earliest_ns and stopping(array)
        if clocks is not None and (over or enough or read_ns is None or now - read_ns >= CLOCKS_EVERY_NS):
            slow, read_ns = bool(clocks().throttled), now_ns()
            if slow and retries < MOST_RETRIES and now < deadline_ns:
                discarded, retries = discarded + len(values) - sure, retries + 1
                del values[sure:]
                pause(RETRY_PAUSE_S)
                continue
            throttled, sure = throttled or slow, len(values)
        if over or enough:
            return Collected(array, enough, throttled, discarded)


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
