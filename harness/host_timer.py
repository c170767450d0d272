"""Timing on the host's clock: what runs on a CPU, cold or warm, and what only the host does."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import repeat
from typing import TYPE_CHECKING

import torch

from .sampler import Clock, Sampler, warm_up

if TYPE_CHECKING:
    from .cases.base import Prepared

SHORT_US = 20.0  # calls shorter than this are timed several at a time
HOST_SAMPLE_US = 100.0  # what a sample of short calls lasts
FLUSH_BELOW_US = 1000.0  # of a cold call: a longer one hardly notices that its code has to be read again


def calls_per_sample(call_us: float) -> int:
    """How many calls one sample on the host's clock averages over."""
    return 1 if call_us >= SHORT_US else math.ceil(HOST_SAMPLE_US / max(call_us, 0.01))


def _samples(sample: Callable[[], float], calls: int) -> Sampler:
    return Sampler(lambda count: [sample() for _ in range(count)], calls, "cpu_clock")


def warm_sampler(run: Callable[[], object], warmup_s: float, now_ns: Clock) -> Sampler:
    """The same inputs again and again; each result is dropped at once, so its memory is reused."""
    calls = calls_per_sample(warm_up(run, warmup_s, now_ns))

    def sample() -> float:
        start = now_ns()
        for _ in repeat(None, calls):
            run()
        return (now_ns() - start) / 1e3 / calls

    return _samples(sample, calls)


def host_work_sampler(prepared: Prepared, warmup_s: float, now_ns: Clock) -> Sampler:
    """What only the host does. On a GPU each sample starts with the device idle, and leaves its work behind."""
    if prepared.device != "cuda":
        return warm_sampler(prepared.run, warmup_s, now_ns)
    run = prepared.run

    def sample() -> float:
        torch.cuda.synchronize()
        start = now_ns()
        run()
        return (now_ns() - start) / 1e3

    warm_up(sample, warmup_s, now_ns)
    return _samples(sample, 1)


def cold_sampler(prepared: Prepared, warmup_s: float, now_ns: Clock) -> Sampler:
    """Distinct inputs in turn; each result lives until its inputs come up again.

    A long call finds nothing of its inputs in the cache once they have all been through. Before a short one, or where
    all the inputs together are too small for that, a buffer larger than the cache is read: it also drives out the code
    of the operator, the dispatcher and the interpreter, which a model finds cold after every large operator (an
    addition of 768 elements took 1.4 us in a loop and 12 us after 64 MiB had been read, with a cache of 32 MiB).
    """
    runs = prepared.rotate
    results: list[object] = [None] * len(runs)
    call_us = warm_up(runs[0], warmup_s, now_ns)
    for i, run in enumerate(runs):
        results[i] = run()
    flush = flusher() if call_us < FLUSH_BELOW_US or not prepared.rotation_is_cold else None
    position = 0

    def sample() -> float:
        nonlocal position
        position = (position + 1) % len(runs)
        if flush is not None:
            flush()
        start = now_ns()
        results[position] = runs[position]()
        return (now_ns() - start) / 1e3

    return _samples(sample, 1)


def flusher() -> Callable[[], object]:
    """A call that reads more than the last-level cache holds, with every thread."""
    from .cases.base import COLD_CACHES, cache_bytes

    return torch.ones(COLD_CACHES * cache_bytes("cpu") // 4).sum
