"""What the CPU at hand can do, measured in a few seconds: the figures of a Device that no data sheet gives.

Rates are the best of several tries, because a peak is a bound; times are medians. ``sources`` of the Device says
of each figure how it was measured.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from .launch import host_calls

if TYPE_CHECKING:
    from ..datasets.devices import Device

SYSTEM_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
FALLBACK_CACHE_BYTES = 32 << 20
MATRIX_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
MATRIX_SIDES = (256, 512, 1024, 2048)
MATRIX_SECONDS = 0.8  # for one dtype
ALONE_SECONDS = 0.1  # of one thread
VECTOR_SECONDS = 0.4
HOST_SAMPLES = 30  # of CALLS calls each
STREAM_CACHES = 4  # each array of the memory test is this many times what is had of the last-level cache
VECTOR_ELEMENTS = 1 << 15  # 128 KiB in fp32 for each thread: inside its own L2
STREAM_BYTES = 64 << 20  # and this large at least
SWEEP_BYTES = tuple(1 << power for power in range(20, 29))  # 1 MiB to 256 MiB
SWEEP_SECONDS = 0.06  # for one working set
FALL = 1.5  # times slower than the fastest working set is one that the cache does not hold
TRUSTED_CACHE_BYTES = 64 << 20  # a larger one is a whole socket's, of which a virtual machine may get a small part
CALLS = 200


def best_seconds(run: Callable[[], object], seconds: float, least: int = 3) -> float:
    """The shortest of repeated calls, for that many seconds and at least ``least`` of them after the first."""
    run()
    shortest, tries = float("inf"), 0
    end = time.perf_counter() + seconds
    while tries < least or time.perf_counter() < end:
        start = time.perf_counter_ns()
        run()
        shortest, tries = min(shortest, (time.perf_counter_ns() - start) / 1e9), tries + 1
    return shortest


@contextlib.contextmanager
def one_thread() -> Iterator[int]:
    """torch with one thread meanwhile; gives how many it had."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


# --- caches --------------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """Bytes of a size as sysfs writes it (``32768K``, ``1M``); 0 when it is none."""
    text = text.strip()
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    digits = text.rstrip("KMG")
    return int(digits) * scale if digits.isdigit() else 0


def reported_cache_bytes(directory: Path = SYSTEM_CACHES) -> int:
    """The largest data cache that the kernel lists for one processor; 0 when it lists none."""
    sizes = [0]
    for entry in directory.glob("index*"):
        try:
            if (entry / "type").read_text().strip() != "Instruction":
                sizes.append(parse_size((entry / "size").read_text()))
        except OSError:
            continue
    return max(sizes)


@lru_cache
def last_level_cache_bytes() -> int:
    """What a cold measurement has to leave: the size of the last-level cache that the kernel reports.

    :data:`FALLBACK_CACHE_BYTES` where it reports none. Above :data:`TRUSTED_CACHE_BYTES` what is really had is measured
    (a virtual machine of two cores had 4 MiB of 480): reading the whole before each cold call would take all the time.
    """
    nominal = reported_cache_bytes() or FALLBACK_CACHE_BYTES
    return nominal if nominal <= TRUSTED_CACHE_BYTES else min(nominal, effective_cache_bytes(*cache_sweep(nominal)))


def cache_sweep(nominal_bytes: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Working sets in bytes, ascending, and the rate of a triad over each, from :data:`SWEEP_BYTES` on.

    It goes on until the rate has fallen, or until twice the nominal size of the cache.
    """
    sizes = list(SWEEP_BYTES)
    rates = [triad_gbps(size // 3, SWEEP_SECONDS) for size in sizes]
    while not _fallen(rates) and sizes[-1] < 2 * nominal_bytes:
        sizes.append(2 * sizes[-1])
        rates.append(triad_gbps(sizes[-1] // 3, SWEEP_SECONDS))
    return tuple(sizes), tuple(rates)


def _fallen(rates: Sequence[float]) -> bool:
    return rates[-1] * FALL < max(rates)


def effective_cache_bytes(sizes: Sequence[int], rates: Sequence[float]) -> int:
    """The largest working set that still streams nearer to the cache's rate than to memory's; the last where none fell.

    ``rates`` in the order of ``sizes``, ascending. The border is the geometric mean of the fastest and the last.
    """
    if not _fallen(rates):
        return sizes[-1]
    border = (max(rates) * rates[-1]) ** 0.5
    inside = [size for size, rate in zip(sizes, rates, strict=True) if rate >= border]
    return max(inside)


# --- rates ---------------------------------------------------------------------------------------------


def matrix_tflops(dtype: str) -> float:
    """Best rate of square matrix products, tried in turn so that a busy moment of the machine spoils no size.

    Sides grow as long as the next product would not take the whole time. One thread alone is tried too: on a busy
    machine threads that wait for each other measure the scheduler.
    """
    products: list[tuple[float, Callable[[], object]]] = []
    for side in MATRIX_SIDES:
        run = _product(dtype, side)
        products.append((2.0 * side**3, run))
        if 8 * best_seconds(run, 0.0, least=1) > MATRIX_SECONDS / 4:
            break
    flops, run = products[0]
    with one_thread():
        best = flops / best_seconds(run, ALONE_SECONDS)
    rounds, end = 0, time.perf_counter() + MATRIX_SECONDS
    while not rounds or time.perf_counter() < end:
        rounds += 1
        best = max(best, *(flops / best_seconds(run, 0.0) for flops, run in products))
    return best / 1e12


def _product(dtype: str, side: int) -> Callable[[], object]:
    import torch

    if dtype == "int8":
        return partial(torch._int_mm, *(torch.randint(-100, 100, (side, side), dtype=torch.int8) for _ in range(2)))
    kind = getattr(torch, MATRIX_DTYPES[dtype])
    return partial(torch.mm, *(torch.randn(side, side).to(kind) for _ in range(2)))


def triad_gbps(array_bytes: int, seconds: float) -> float:
    """Rate of a = b + s·c on fp32 arrays of that size each: two read and one written, as STREAM counts them."""
    import torch

    numel = max(array_bytes // 4, 1)
    b, c, a = (torch.ones(numel) for _ in range(3))
    repeats = max(1, (4 << 20) // array_bytes)

    def run() -> None:
        for _ in range(repeats):
            torch.add(b, c, alpha=1.5, out=a)

    return 3 * 4 * numel * repeats / best_seconds(run, seconds) / 1e9


def vector_tflops() -> float:
    """Best fp32 rate of torch's vector loops in cache, by the FLOPs that opcast's elementwise kinds count.

    Tried: a product and sum of three tensors (2 an element) and silu (8, as ``elementwise`` counts exponentials). One
    thread's rate times the threads: vector loops share nothing, and on a busy machine two threads that wait for each
    other after each short loop would measure the scheduler.
    """
    import torch
    from torch.nn import functional

    x, y, z, out = (torch.rand(VECTOR_ELEMENTS) for _ in range(4))
    tries: tuple[tuple[float, Callable[[], object]], ...] = (
        (2.0, lambda: torch.addcmul(x, y, z, out=out)),
        (8.0, lambda: functional.silu(x)),
    )
    with one_thread() as threads:
        best = max(flops * VECTOR_ELEMENTS / best_seconds(run, VECTOR_SECONDS / len(tries)) for flops, run in tries)
    return best * threads / 1e12


def host_call_us(what: str, device: str = "cpu") -> float:
    """Median host time of one call of a choice of ``host_overhead``, on tensors of ``device``."""
    run = host_calls(what, CALLS, device)
    run()
    return median(best_seconds(run, 0.0, least=1) for _ in range(HOST_SAMPLES)) * 1e6 / CALLS


# --- the machine ---------------------------------------------------------------------------------------


def measure_cpu(device_id: str | None = None) -> Device:
    """The figures of the machine at hand with torch's present thread count, in under ten seconds.

    ``device_id`` defaults to the harness's name for this CPU and thread count.
    """
    import torch

    from ..datasets.devices import Device
    from .environment import clocks, cpu_device_id, cpu_name

    threads = torch.get_num_threads()
    with torch.no_grad():
        rates = {dtype: matrix_tflops(dtype) for dtype in MATRIX_DTYPES}
        rates["int8"] = matrix_tflops("int8")
        nominal = reported_cache_bytes() or FALLBACK_CACHE_BYTES
        sizes, sweep = cache_sweep(nominal)
        stream = max(STREAM_CACHES * min(nominal, effective_cache_bytes(sizes, sweep)), STREAM_BYTES)
        memory_gbps = triad_gbps(stream, 0.5)
        cache = min(nominal, effective_cache_bytes(sizes, (*sweep[:-1], min(sweep[-1], memory_gbps))))
        cache_gbps = float(np.interp(np.log2(max(cache // 2, sizes[0])), np.log2(sizes), sweep))
        vector = vector_tflops()
        launch_us, dispatch_us = host_call_us("launch"), host_call_us("dispatch")
    return Device(
        id=device_id or cpu_device_id(threads),
        name=cpu_name(),
        vendor="cpu",
        architecture=torch.backends.cpu.get_cpu_capability().lower(),
        compute_units=threads,
        clock_mhz=clocks("cpu").sm_clock_mhz or 1000.0,
        tensor_tflops=rates,
        vector_tflops=vector,
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        memory_gbps=memory_gbps,
        l2_mib=cache / 2**20,
        l2_gbps=max(cache_gbps, memory_gbps),
        launch_us=launch_us,
        dispatch_us=dispatch_us,
        sources=_sources(threads, nominal, stream),
    )


def _sources(threads: int, nominal: int, stream: int) -> dict[str, str]:
    tried = ", ".join(map(str, MATRIX_SIDES))
    return {
        "tensor_tflops": f"measured: best torch.mm (int8: _int_mm) of square matrices up to {tried}, {threads} threads",
        "vector_tflops": (
            "measured: best of torch.addcmul (2 FLOPs an element) and silu (8) in cache, one thread's times the threads"
        ),
        "memory_gbps": f"measured: triad on three arrays of {stream >> 20} MiB, 2 reads and 1 write",
        "l2_mib": f"measured: triad over growing working sets; the system reports {nominal >> 20} MiB",
        "l2_gbps": "measured: triad at half of the last-level cache",
        "launch_us": "measured: torch.add on one element, per call",
        "dispatch_us": "measured: torch.add on empty tensors, per call",
        "clock_mhz": "as the system reports it",
        "memory_gib": "as the system reports it",
        "compute_units": "torch threads in use",
    }
