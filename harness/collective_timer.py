"""Blocks of back-to-back collectives on one rank: the mean time of a call, without what the host spends on it.

A block is timed as nccl-tests times its iterations: ranks aligned first, then calls one behind the other, and the time
from the first's start to the last's end over their number. nccl-tests launches them from C++ in about 3 us each, less
than the shortest collective takes; torch takes several times as long, so on a GPU the calls wait behind a kernel that
keeps the stream busy until all of them are issued, and events on the stream time them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .cuda_timer import block
from .sampler import Clock

HOST_MARGIN = 1.5  # the device is kept busy that many times as long as issuing the calls should take
HOST_TRIES = 5

Call = Callable[[], object]
Block = Callable[[int], float]  # calls -> mean microseconds of one


def make_block(call: Call, device: str, align: Call, now_ns: Clock = time.perf_counter_ns) -> Block:
    """A timer of blocks of ``call``, which has run before. ``align`` returns when every rank has come to it."""
    return _on_device(call, align, now_ns) if device == "cuda" else _on_host(call, align, now_ns)


def _on_host(call: Call, align: Call, now_ns: Clock) -> Block:
    def mean_us(calls: int) -> float:
        align()
        call()
        start = now_ns()
        for _ in range(calls):
            call()
        return (now_ns() - start) / 1e3 / calls

    return mean_us


def _on_device(call: Call, align: Call, now_ns: Clock) -> Block:
    """The first call is not timed: it waits for the slowest rank."""
    issue_us = min(_issue_us(call, now_ns) for _ in range(HOST_TRIES))

    def mean_us(calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        align()
        block(HOST_MARGIN * issue_us * (calls + 1))
        call()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / calls

    return mean_us


def _issue_us(call: Call, now_ns: Clock) -> float:
    """Microseconds until the host has issued one call, on an idle device."""
    torch.cuda.synchronize()
    start = now_ns()
    call()
    return (now_ns() - start) / 1e3
