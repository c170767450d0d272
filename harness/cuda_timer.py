"""Timing on a CUDA device: graph replays between events, eager launches between events where a graph cannot be had.

A sample of short calls lasts about a millisecond, so that neither the resolution of events (half a microsecond)
nor the launch of the graph shows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING

import torch

from .gpu_cache import last_level_bytes
from .sampler import Clock, Sampler, warm_up

if TYPE_CHECKING:
    from .cases.base import Prepared

GRAPH_US = 1000.0  # what one replay of a graph of short calls lasts
MOST_GRAPH_CALLS = 1000
MOST_EAGER_CALLS = 100  # calls behind one blocking kernel: a few kernels each, and the launch queue holds 1024
NO_KERNEL_US = 0.3  # a graph whose calls add less each holds no kernels: the work went to another stream
PROBE_CALLS = 8
PROBE_REPLAYS = 5
PROBE_BLOCK_US = 100.0  # longer than the launch of a graph takes
SURELY_WORK_US = 20.0  # longer than the launch of an empty graph takes
RAMP_US = 20_000.0  # replays before the first sample: capturing left the device idle
FLUSH_CACHES = 3  # the buffer that empties the last-level cache is this many times as large
CYCLES_PER_US = 3500.0  # no GPU runs faster (RTX 40 and 50 reach 3100), so a wait in cycles is never too short
FIXED_CYCLES_PER_US = 100.0  # of the clock that torch's Sleep.cu reads on RDNA 3 (__GFX11__)
LONGEST_BLOCK_US = 20_000.0
LATE_TRIES = 3
MARGINS = (1.5, 3.0, 10.0)  # the device is kept busy so many times as long as issuing the calls should take
SPIN_CYCLES = 400_000  # 0.2 ms: long beside the launch, short beside a batch
OVERHEAD_EVERY_S = 60.0
FALL = 0.03  # of the clock, from which on the power limit has taken hold: boost steps are 15 MHz
REST_S = 0.1  # lets the limiter go: it averages over some tens of milliseconds
BOOST_MHZ: dict[int, float] = {}  # of each device when it was last rested
OVERHEADS: dict[int, tuple[float, float]] = {}  # when it was measured, and what it was, by device
CALIBRATION_CYCLES = 1000
CALIBRATION_CALLS = 200
CALIBRATION_SAMPLES = 50
BATCH = 10  # samples in flight before the host waits for them

FAILED_CAPTURES: list[str] = []
"""Why captures failed in this process. After one, several versions of torch free no more memory or assert: the process
should end with its case (pytorch #180395, #190348)."""

Run = Callable[[], object]


def cuda_sampler(prepared: Prepared, cache: str, warmup_s: float, now_ns: Clock) -> Sampler:
    """Samples of a prepared op on the current device.

    Capturing needs a stream of its own. All else stays on the current one, where autograd runs what it recorded.
    """
    call_us, host_us = _estimate(prepared.run, warmup_s, now_ns)
    sampler = _graph_sampler(prepared.run, cache, call_us) if prepared.capturable else None
    return sampler or _eager_sampler(prepared.run, cache, call_us, host_us)


def _estimate(run: Run, warmup_s: float, now_ns: Clock) -> tuple[float, float]:
    """Microseconds of one call until the device is done, and until the host is, after a warm-up."""

    def finished() -> None:
        run()
        torch.cuda.synchronize()

    call_us = warm_up(finished, warmup_s, now_ns)
    return call_us, warm_up(run, 0.0, now_ns)


# --- graphs --------------------------------------------------------------------------------------------


def capture(run: Run, calls: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph | None:
    """A graph of that many calls; None, and a note in :data:`FAILED_CAPTURES`, when the call cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(calls):
                run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        FAILED_CAPTURES.append((str(error).strip().splitlines() or [type(error).__name__])[0])
        torch.cuda.synchronize()
        return None
    return graph


def _graph_sampler(run: Run, cache: str, call_us: float) -> Sampler | None:
    """Samples by graph; None when nothing, or nothing complete, was captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        single = capture(run, 1, stream)
        if single is None:
            return None
        single_us = min(elapsed_us(single.replay, 2))
        if single_us < SURELY_WORK_US and not _holds_work(run, single, stream):
            return None
        if cache == "cold":
            return _cold_graph_sampler(single, single_us, stream)
        return _row_sampler(run, single, min(call_us, single_us), stream)


def _holds_work(run: Run, single: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> bool:
    """Whether more captured calls take longer than one, as they must when their kernels are in the graph.

    What a graph adds, several microseconds also to an empty one, is in both spans; what its launch takes is in neither,
    because the device is kept busy until the replay is issued.
    """
    graph = capture(run, PROBE_CALLS, stream)
    if graph is None:
        return False
    many, one = (
        min(elapsed_us(one_graph.replay, PROBE_REPLAYS, lambda: block(PROBE_BLOCK_US))) for one_graph in (graph, single)
    )
    return many - one >= (PROBE_CALLS - 1) * NO_KERNEL_US


def _row_sampler(run: Run, single: torch.cuda.CUDAGraph, call_us: float, stream: torch.cuda.Stream) -> Sampler | None:
    """As many calls in a row as make a good sample.

    Alone, a call's launch shows in its time; in a row it does not, so a second guess may need a longer row.
    """
    calls = graph_calls(call_us)
    graph = single if calls == 1 else capture(run, calls, stream)
    if graph is not None and calls > 1:
        better = graph_calls(min(elapsed_us(graph.replay, 2)) / calls)
        if better > 2 * calls:
            calls, graph = better, capture(run, better, stream)
    if graph is None:
        return None
    elapsed_us(graph.replay, max(1, int(RAMP_US / (call_us * calls))))
    return Sampler(_on(stream, graph.replay, calls), calls, "cuda_graph", _batch(call_us * calls))


def graph_calls(call_us: float) -> int:
    """Calls that make a replay last :data:`GRAPH_US`."""
    return max(1, min(MOST_GRAPH_CALLS, math.ceil(GRAPH_US / max(call_us, 0.1))))


def _batch(sample_us: float) -> int:
    """Samples to have in flight: fewer when they are long."""
    return max(1, min(BATCH, int(BATCH * GRAPH_US / max(sample_us, 1.0))))


def _on(stream: torch.cuda.Stream, work: Run, calls: int) -> Callable[[int], list[float]]:
    def take(count: int) -> list[float]:
        with torch.cuda.stream(stream):
            return [span / calls for span in elapsed_us(work, count)]

    return take


def elapsed_us(work: Run, count: int, before: Run | None = None) -> list[float]:
    """Microseconds between events around ``work``, ``count`` times, with ``before`` outside them; waits at the end."""
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, end in marks:
        if before is not None:
            before()
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in marks]


# --- cold ----------------------------------------------------------------------------------------------


def flush_bytes(device: int) -> int:
    """Size of a buffer that drives everything else out of the last-level cache."""
    return FLUSH_CACHES * last_level_bytes(torch.cuda.get_device_properties(device))


@lru_cache
def _flush_buffer(device: int) -> torch.Tensor:
    return torch.ones(flush_bytes(device) // 4, dtype=torch.float32, device=device)


def flush() -> None:
    """Write, then read, a buffer much larger than the last-level cache.

    The writing pushes everything out; the reading leaves clean lines, so that the timed call does not pay for
    writing the buffer back.
    """
    buffer = _flush_buffer(torch.cuda.current_device())
    buffer.fill_(1.0)
    buffer.sum()


def event_overhead_us(device: int) -> float:
    """What events and the launch of a graph add to one short kernel, beside what it takes in a row of its kind.

    Subtracted from cold samples, which hold one call each. Measured anew every :data:`OVERHEAD_EVERY_S`, so that it
    moves with the device as the samples do.
    """
    at, overhead_us = OVERHEADS.get(device, (-math.inf, 0.0))
    if time.monotonic() - at > OVERHEAD_EVERY_S:
        overhead_us = _measured_overhead_us()
        OVERHEADS[device] = time.monotonic(), overhead_us
    return overhead_us


def _measured_overhead_us() -> float:
    """With a kernel that touches no memory, on a device that is under way."""

    def spin() -> None:
        torch.cuda._sleep(CALIBRATION_CYCLES)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        spin()
        single, row = capture(spin, 1, stream), capture(spin, CALIBRATION_CALLS, stream)
        if single is None or row is None:
            return 0.0
        row_us = min(elapsed_us(row.replay, 2))
        elapsed_us(row.replay, max(1, int(RAMP_US / max(row_us, 1.0))))
        alone = median(elapsed_us(single.replay, CALIBRATION_SAMPLES, flush))
        together = median(elapsed_us(row.replay, BATCH)) / CALIBRATION_CALLS
    return max(0.0, alone - together)


def _cold_graph_sampler(single: torch.cuda.CUDAGraph, single_us: float, stream: torch.cuda.Stream) -> Sampler:
    overhead = event_overhead_us(torch.cuda.current_device())

    def take(count: int) -> list[float]:
        with torch.cuda.stream(stream):
            spans = elapsed_us(single.replay, count, flush)
        return [max(span - overhead, NO_KERNEL_US) for span in spans]

    take(_batch(single_us))
    return Sampler(take, 1, "cuda_graph", _batch(single_us), overhead_us=overhead)


# --- without graphs ------------------------------------------------------------------------------------


def block(microseconds: float) -> None:
    """Keep the stream busy for at least that long, so that the host can queue work behind it."""
    torch.cuda._sleep(int(min(microseconds, LONGEST_BLOCK_US) * cycles_per_us(torch.cuda.current_device())))


@lru_cache
def cycles_per_us(device: int) -> float:
    """Cycles that torch's waiting kernel counts in a microsecond, at most; on RDNA 3 those of a fixed clock."""
    target = str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", ""))
    return FIXED_CYCLES_PER_US if target.startswith("gfx11") else CYCLES_PER_US


def counted_clock(pause: Callable[[float], None]) -> CountedClock | None:
    """The clock of the current device, which rests first where it still feels the case before; None on AMD's.

    Those count with a clock of their own, or cannot say it.
    """
    if torch.version.hip:
        return None
    clock, device = CountedClock(), torch.cuda.current_device()
    clock.fastest_mhz = clock.mhz()
    if clock.fastest_mhz < (1.0 - FALL) * BOOST_MHZ.get(device, 0.0):
        pause(REST_S)
        clock.fastest_mhz = BOOST_MHZ[device] = clock.mhz()
    BOOST_MHZ[device] = max(BOOST_MHZ.get(device, 0.0), clock.fastest_mhz)
    return clock


@dataclass
class CountedClock:
    """The clock of the current device, by how long a kernel takes to count cycles.

    Unlike NVML's it is that under load: a reading of NVML takes milliseconds, in which the device idles.
    """

    fastest_mhz: float = 0.0

    def mhz(self) -> float:
        """The clock now, a per cent or two low: the span holds the launch."""
        return SPIN_CYCLES / min(elapsed_us(lambda: torch.cuda._sleep(SPIN_CYCLES), 2))


def _eager_sampler(run: Run, cache: str, call_us: float, host_us: float) -> Sampler:
    """Launched call by call, behind a kernel that keeps the device from running ahead of the host."""
    calls = 1 if cache == "cold" else max(1, min(MOST_EAGER_CALLS, math.ceil(GRAPH_US / max(call_us, 1.0))))

    def work() -> None:
        for _ in range(calls):
            run()

    def before() -> None:
        if cache == "cold":
            flush()
        block(margin * host_us * calls)

    def take(count: int) -> list[float]:
        return [elapsed_us(work, 1, before)[0] / calls for _ in range(count)]

    margin = MARGINS[0]
    while _host_is_late(before, work):
        if margin < MARGINS[-1]:
            margin = MARGINS[MARGINS.index(margin) + 1]
        elif calls > 1:
            calls = max(1, calls // 4)
        elif waits_for_device(run):
            break
        else:
            _refuse(host_us)
    return Sampler(take, calls, "cuda_event")


def _refuse(host_us: float) -> None:
    from .cases.base import Unsupported

    raise Unsupported(
        f"the host takes {host_us:.0f} us to launch the kernels of one call: more than the device's queue holds"
    )


def _host_is_late(before: Run, work: Run) -> bool:
    """Whether the device is through with what keeps it busy before the host has issued the work.

    Then the host is timed, which a full queue holds up.
    """

    def late() -> bool:
        before()
        through = torch.cuda.Event()
        through.record()
        work()
        done = bool(through.query())
        torch.cuda.synchronize()
        return done

    return all(late() for _ in range(LATE_TRIES))


def waits_for_device(run: Run) -> bool:
    """Whether a call itself waits for the device, so that the host's time is its own."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False
