"""What the GPU at hand can do, measured in seconds: the figures of a Device that has no file in ``conf/device``.

Units, caches and memory are those that the driver tells, clock and power limit those of NVML; rates are the best of
several sizes, as on a CPU (:mod:`.probe`): what the device sustains, not what a data sheet promises. ``sources`` of the
Device says of each figure where it comes from.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .amd import native_float8
from .cuda_timer import FIXED_CYCLES_PER_US, RAMP_US, Run, capture, cycles_per_us, elapsed_us
from .environment import boost_clock_mhz, clocks, gpu_device_id, has_nvlink, is_slice, power_limit_w
from .gpu_cache import last_level_bytes
from .probe import host_call_us

if TYPE_CHECKING:
    from ..datasets.devices import Device

ARCHITECTURES = {6: "pascal", 7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell", 11: "blackwell", 12: "blackwell"}
BETWEEN = {(7, 5): "turing", (8, 9): "ada"}  # named apart from others of their major compute capability
FORMATS = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SIDES = (1024, 2048, 4096, 8192)
LONG_ENOUGH_US = 20_000.0  # of one product: larger ones are not tried
TRIES = 5
SAMPLE_US = 2000.0
LONGEST_ROW = 200  # calls: the launch queue holds 1024
MOST_OVER_ALONE = 2.0
MEMORY_CACHES = 8  # the arrays of the memory test together are this many times the L2
LEAST_MEMORY_BYTES = 256 << 20
CLOCK_CYCLES = 2_000_000
PLAUSIBLE_MHZ = (200.0, 5000.0)
ROW_OF_LAUNCHES = 200
PCIE_BYTES = 64 << 20
GUESSED_CLOCK_MHZ = 1500.0


def best_us(run: Run) -> float:
    """The shortest of several samples of one call, each a row of them.

    A row waits behind a kernel that spins until the host has queued it: else the launches of short calls are timed.
    """
    run()
    once = min(elapsed_us(run, 2))
    calls = max(1, min(LONGEST_ROW, int(SAMPLE_US / max(once, 1.0))))

    def row() -> None:
        for _ in range(calls):
            run()

    began = time.perf_counter()
    row()
    host_us = (time.perf_counter() - began) * 1e6
    torch.cuda.synchronize()
    cycles = int(host_us * PLAUSIBLE_MHZ[1])
    return min(elapsed_us(row, TRIES, lambda: torch.cuda._sleep(cycles))) / calls


def product_tflops(dtype: str) -> float | None:
    """Best rate of square products in a format; None where the device or torch refuses it."""
    best = 0.0
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        for side in SIDES:
            us = best_us(_product(dtype, side))
            best = max(best, 2.0 * side**3 / us / 1e6)
            if 8 * us > LONG_ENOUGH_US:
                break
    except torch.OutOfMemoryError:
        return best or None
    except (
        RuntimeError,
        NotImplementedError,
        ValueError,
    ):  # refused; what is broken shows in fp32
        torch.cuda.synchronize()
        return best or None
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return best


def _product(dtype: str, side: int) -> Run:
    def drawn(kind: Any) -> torch.Tensor:
        return torch.randn(side, side, device="cuda").to(kind)

    if dtype == "int8":
        return partial(torch._int_mm, drawn(torch.int8), drawn(torch.int8).t())
    if dtype == "fp8":
        one = torch.ones((), device="cuda")
        narrow = getattr(torch, native_float8("float8_e4m3fn"))
        first, right = drawn(narrow), drawn(narrow).t()
        return partial(torch._scaled_mm, first, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    kind = getattr(torch, FORMATS[dtype])
    return partial(torch.mm, drawn(kind), drawn(kind))


def formats_of(major: int, minor: int, hip: bool) -> list[str]:
    """Formats whose products are tried: those that the compute capability has units for."""
    if hip:
        return ["fp64", "fp32", "bf16", "fp16", "fp8", "int8"]
    formats = ["fp64", "fp32", *(["tf32", "bf16"] if major >= 8 else []), "fp16"]
    if (major, minor) >= (8, 9):
        formats.append("fp8")
    return [*formats, "int8"] if (major, minor) >= (7, 5) else formats


def triad_gbps(total_bytes: int) -> float:
    """Rate of a = b + s·c on fp32 arrays of that size together: two read and one written, as STREAM counts them."""
    numel = max(total_bytes // 12, 1)
    b, c, a = (torch.ones(numel, device="cuda") for _ in range(3))
    return 12 * numel / best_us(lambda: torch.add(b, c, alpha=1.5, out=a)) / 1e3


def cache_gbps(l2_bytes: int) -> float:
    """Rate of the triad within the L2: of what three quarters take longer than a quarter, and of them alone at least.

    A small cache is read through in the time that any kernel takes; the difference leaves that out.
    """

    def us(total_bytes: int) -> float:
        b, c, a = (torch.ones(total_bytes // 12, device="cuda") for _ in range(3))
        return best_us(lambda: torch.add(b, c, alpha=1.5, out=a))

    less, more = l2_bytes // 4, 3 * l2_bytes // 4
    short, long = us(less), us(more)
    alone = more / long / 1e3
    return max(alone, min((more - less) / max(long - short, 1e-3) / 1e3, MOST_OVER_ALONE * alone))


def spin_clock_mhz() -> float | None:
    """The clock by the time that a kernel of so many cycles takes; None where that makes no sense."""
    if cycles_per_us(torch.cuda.current_device()) == FIXED_CYCLES_PER_US:
        return None
    us = min(elapsed_us(lambda: torch.cuda._sleep(CLOCK_CYCLES), TRIES))
    mhz = CLOCK_CYCLES / us
    return mhz if PLAUSIBLE_MHZ[0] < mhz < PLAUSIBLE_MHZ[1] else None


def launch_us() -> float:
    """The shortest kernel in a row of a graph's; the shortest eager one where graphs cannot be had."""
    one = torch.ones(1, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        one.add_(1.0)
        graph = capture(lambda: one.add_(1.0), ROW_OF_LAUNCHES, stream)
        if graph is not None:
            return min(elapsed_us(graph.replay, TRIES)) / ROW_OF_LAUNCHES
    return best_us(lambda: one.add_(1.0))


def host_gbps() -> float:
    """Rate of a copy from pinned host memory."""
    host = torch.empty(PCIE_BYTES, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(PCIE_BYTES, dtype=torch.uint8, device="cuda")
    return PCIE_BYTES / min(elapsed_us(lambda: here.copy_(host, non_blocking=True), TRIES)) / 1e3


def measure_gpu(device_id: str | None = None) -> Device:
    """The figures of the current GPU in under half a minute; ``device_id`` defaults to its usual name.

    Raises RuntimeError where even fp32 products fail.
    """
    from ..datasets.devices import Device

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    hip = bool(torch.version.hip)
    with torch.no_grad():
        _warm_up()
        rates = {dtype: product_tflops(dtype) for dtype in formats_of(properties.major, properties.minor, hip)}
        if not rates["fp32"]:
            raise RuntimeError(f"{properties.name} runs no fp32 products")
        l2_bytes = last_level_bytes(properties)
        memory_gbps = triad_gbps(max(MEMORY_CACHES * l2_bytes, LEAST_MEMORY_BYTES))
        l2_gbps = max(cache_gbps(l2_bytes), 1.01 * memory_gbps)
        spun = spin_clock_mhz()
        launch, dispatch, bus = launch_us(), host_call_us("dispatch", device="cuda"), host_gbps()
    boost, limit = boost_clock_mhz(), power_limit_w()
    return Device(
        id=device_id or gpu_device_id(),
        name=properties.name,
        vendor="amd" if hip else "nvidia",
        architecture=architecture(properties, hip),
        compute_units=properties.multi_processor_count,
        clock_mhz=boost or spun or clocks().sm_clock_mhz or GUESSED_CLOCK_MHZ,
        tensor_tflops={dtype: rate for dtype, rate in rates.items() if rate},
        vector_tflops=rates["fp32"],
        memory_gib=properties.total_memory / 2**30,
        memory_gbps=memory_gbps,
        l2_mib=l2_bytes / 2**20,
        l2_gbps=l2_gbps,
        shared_kib=getattr(properties, "shared_memory_per_multiprocessor", 0) / 2**10,
        pcie_gbps=bus,
        launch_us=launch,
        dispatch_us=dispatch,
        tdp_w=limit or 0.0,
        sm=0.0 if hip else float(f"{properties.major}.{properties.minor}"),
        sources=_sources(boost, spun, limit),
    )


def _warm_up() -> None:
    """Work until the clocks are up."""
    x = torch.randn(2048, 2048, device="cuda")
    torch.mm(x, x)  # loads the library
    worked = 0.0
    while worked < RAMP_US:
        worked += sum(elapsed_us(lambda: torch.mm(x, x), 20))


def architecture(properties: Any, hip: bool) -> str:
    """The architecture's name by compute capability; of AMD's devices the name that the compiler has for it."""
    if hip:
        return str(getattr(properties, "gcnArchName", "")).partition(":")[0] or "amd"
    return BETWEEN.get(
        (properties.major, properties.minor),
        ARCHITECTURES.get(properties.major, f"sm{properties.major}{properties.minor}"),
    )


def _sources(boost: float | None, spun: float | None, limit: float | None) -> dict[str, str]:
    library = "amdsmi" if torch.version.hip else "NVML"
    links = {
        True: "unknown: NVML shows NVLink, whose rate takes two devices to measure",
        False: "none, as NVML shows it",
        None: f"unknown: {library} does not answer",
    }
    sides = ", ".join(map(str, SIDES))
    unknown_limit = "unknown: a slice has no limit of its own" if is_slice() else f"unknown: no {library}"
    clock = "NVML: highest clock" if boost else "measured: cycles of a spinning kernel" if spun else "assumed"
    return {
        "tensor_tflops": f"measured: best torch.mm (fp8: _scaled_mm, int8: _int_mm) of sides {sides}",
        "vector_tflops": "measured: products in fp32, which run on ordinary lanes unless TF32 is allowed",
        "compute_units": "as the driver reports it",
        "clock_mhz": clock,
        "memory_gib": "as the driver reports it",
        "memory_gbps": f"measured: triad on arrays of {MEMORY_CACHES} times the L2, 2 reads and 1 write",
        "l2_mib": "as the driver reports it",
        "l2_gbps": "measured: triad on a quarter and on three quarters of the L2",
        "shared_kib": "as the driver reports it",
        "link_gbps": "none: no other GPU reaches a slice" if is_slice() else links[has_nvlink()],
        "pcie_gbps": "measured: copies of pinned memory to the device",
        "launch_us": "measured: a row of one-element additions in a graph, per call",
        "dispatch_us": "measured: torch.add on empty tensors, per call",
        "tdp_w": f"{library}: the power limit in force" if limit else unknown_limit,
    }
