"""An event model of a CUDA device, put under ``torch.cuda``: what timers see without a GPU. The oracle of their tests.

Time is virtual. The host spends time on every launch and runs ahead; each stream works through its kernels in order
and starts none before it was launched; events note when a stream comes to them; a graph holds the kernels that were
launched on the captured stream and replays them back to back after one launch; a cache keeps what was touched last.
Tensors lie in the host's memory: what they hold is not modelled, only when kernels run.

A kernel is ``gpu.kernel(us)``. :meth:`ModelGPU.install` patches torch by ``setattr``: monkeypatch's in a test, the
plain one in a process of its own.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

MIB = 1 << 20
REST_US = 50_000.0
STICKY = "CUDA error: an illegal memory access was encountered"


class ModelStream:
    """An ordered queue: when its last kernel ends, and what is being captured from it."""

    def __init__(self, gpu: ModelGPU | None = None) -> None:
        self.free_us = 0.0
        self.ends: deque[float] = deque()  # of what was launched and is not through
        self.captured: list[float] | None = None

    def room_us(self, now_us: float, queue: int) -> float:
        """When the host may launch one more: at once, or when the oldest of a full queue is through."""
        while self.ends and self.ends[0] <= now_us:
            self.ends.popleft()
        return self.ends.popleft() if len(self.ends) >= queue else now_us

    def wait_stream(self, other: ModelStream) -> None:
        """Nothing here runs before what the other holds now."""
        self.free_us = max(self.free_us, other.free_us)


@dataclass
class ModelGPU:
    """One device and its host. Times in microseconds."""

    name: str = "NVIDIA H100 80GB HBM3"
    l2_bytes: int = 50 * MIB  # as the driver tells
    cache_bytes: int = 50 * MIB  # as it is
    capability: tuple[int, int] = (9, 0)
    gcn: str = ""
    launch_us: float = 4.0  # host time of a launch
    graph_us: float = 8.0  # of a graph's
    empty_graph_us: float = 3.0  # what a span over any replay holds beside its kernels
    mark_us: float = 0.5  # what an event costs the stream
    dram_gbps: float = 3000.0
    host_us: float = 0.0
    sticky: str = ""  # an error that every call raises from now on
    fails_to_free: str = ""  # what empty_cache raises
    replays: int = 0
    sync_mode: Any = 0
    busy_us: float = 0.0  # since the device last rested
    worked_us: float = 0.0  # when it was last busy
    queue: int = 1024  # launches that wait before the host must
    capped: float = 1.0  # share of the clock that the power limit leaves
    settles_us: float = 40_000.0  # of work without a rest until it takes hold
    cache: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.default = ModelStream()
        self.streams = [self.default]
        self.stream = self.default

    # --- what a test's kernels do ----------------------------------------------------------------------

    def kernel(self, us: float, on: ModelStream | None = None, reads: tuple[str, int] | None = None) -> None:
        """Launch a kernel of that duration, on the current stream or another; what it reads is slower from memory."""
        self.check()
        stream = on or self.stream
        self.host_us += self.launch_us
        if stream.captured is not None:
            stream.captured.append((us, reads))
            return
        self.run_on(stream, us, reads)

    def run_on(self, stream: ModelStream, us: float, reads: tuple[str, int] | None = None) -> None:
        """Put work on a stream that the host has issued by now."""
        if reads is not None:
            us += self.touch(*reads)
        self.host_us = max(self.host_us, stream.room_us(self.host_us, self.queue))
        if self.worked_us + REST_US < self.host_us:
            self.busy_us = 0.0
        self.busy_us += us
        speed = self.capped if self.busy_us > self.settles_us else 1.0
        stream.free_us = max(stream.free_us, self.host_us) + us / speed
        stream.ends.append(stream.free_us)
        self.worked_us = stream.free_us

    def touch(self, key: str, size: int) -> float:
        """Microseconds that reading takes beyond the kernel's own time; the cache then holds what was read last."""
        miss = 0.0 if key in self.cache else size / self.dram_gbps / 1e3
        self.cache.pop(key, None)
        self.cache[key] = size
        while sum(self.cache.values()) > self.cache_bytes:
            self.cache.popitem(last=False)
        return miss

    def wait(self) -> None:
        """The host waits for every stream."""
        self.check()
        self.host_us = max(self.host_us, *(stream.free_us for stream in self.streams))

    def check(self) -> None:
        """Raise the sticky error when there is one."""
        if self.sticky:
            raise RuntimeError(self.sticky)

    def now_ns(self) -> int:
        """The host's clock; looking at it takes a moment."""
        self.host_us += 0.05
        return round(self.host_us * 1e3)

    # --- under torch -----------------------------------------------------------------------------------

    def install(self, set_attribute: Callable[[Any, str, Any], None]) -> ModelGPU:
        """Patch torch and the harness so that they find this device."""
        import torch

        from opcast.harness import cases, cuda_timer
        from opcast.harness.cases.base import Inputs

        gpu, real_ones = self, torch.ones

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at_us = 0.0

            def record(self, stream: ModelStream | None = None) -> None:
                gpu.host_us += 0.5
                on = stream or gpu.stream
                on.free_us = self.at_us = max(on.free_us, gpu.host_us) + gpu.mark_us

            def query(self) -> bool:
                return self.at_us <= gpu.host_us

            def elapsed_time(self, end: Event) -> float:
                assert max(self.at_us, end.at_us) <= gpu.host_us, "read before the host waited"
                return (end.at_us - self.at_us) / 1e3

        class CUDAGraph:
            def __init__(self) -> None:
                self.kernels: list[tuple[float, Any]] = []

            def replay(self) -> None:
                gpu.check()
                gpu.replays += 1
                gpu.host_us += gpu.graph_us
                gpu.run_on(gpu.stream, gpu.empty_graph_us)
                for us, reads in self.kernels:
                    gpu.run_on(gpu.stream, us, reads)

        @contextlib.contextmanager
        def capture(graph: CUDAGraph, stream: ModelStream, **_: Any) -> Iterator[None]:
            stream.captured = []
            try:
                yield
                graph.kernels = stream.captured
            finally:
                stream.captured = None

        def new_stream() -> ModelStream:
            gpu.streams.append(ModelStream())
            return gpu.streams[-1]

        @contextlib.contextmanager
        def use(stream: ModelStream) -> Iterator[None]:
            before, gpu.stream = gpu.stream, stream
            try:
                yield
            finally:
                gpu.stream = before

        def synchronize() -> None:
            if gpu.stream.captured is not None:
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            if gpu.sync_mode == "error":
                raise RuntimeError("called a synchronizing CUDA operation")
            gpu.wait()

        def set_sync_mode(mode: Any) -> None:
            gpu.sync_mode = mode

        def empty_cache() -> None:
            gpu.check()
            if gpu.fails_to_free:
                raise RuntimeError(gpu.fails_to_free)

        def ones(*shape: Any, device: Any = None, **more: Any) -> Any:
            gpu.check()
            return real_ones(*shape, **more)

        properties = SimpleNamespace(
            name=self.name,
            L2_cache_size=self.l2_bytes,
            gcnArchName=self.gcn,
            multi_processor_count=132,
            total_memory=80 << 30,
            major=self.capability[0],
            minor=self.capability[1],
        )
        under_cuda = {
            "Event": Event,
            "CUDAGraph": CUDAGraph,
            "graph": capture,
            "Stream": new_stream,
            "stream": use,
            "current_stream": lambda: gpu.stream,
            "synchronize": synchronize,
            "empty_cache": empty_cache,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_properties": lambda *_: properties,
            "get_device_name": lambda *_: gpu.name,
            "get_device_capability": lambda *_: gpu.capability,
            "mem_get_info": lambda *_: (70 << 30, 80 << 30),
            "get_sync_debug_mode": lambda: gpu.sync_mode,
            "set_sync_debug_mode": set_sync_mode,
            "_sleep": lambda cycles: gpu.kernel(cycles / cuda_timer.CYCLES_PER_US),
        }
        for name, value in under_cuda.items():
            set_attribute(torch.cuda, name, value)
        set_attribute(torch, "ones", ones)
        set_attribute(cases, "Inputs", lambda device, seed: Inputs("cpu", seed))
        set_attribute(cuda_timer, "_flush_buffer", lambda device: FlushBuffer(gpu, cuda_timer.flush_bytes(device)))
        set_attribute(cuda_timer, "FAILED_CAPTURES", [])
        cuda_timer.OVERHEADS.clear()
        cuda_timer.BOOST_MHZ.clear()
        cuda_timer.cycles_per_us.cache_clear()
        return self


@dataclass
class FlushBuffer:
    """The buffer whose writing and reading empties the cache."""

    gpu: ModelGPU
    size: int

    def fill_(self, value: float) -> None:
        self.gpu.kernel(self.size / self.gpu.dram_gbps / 1e3, reads=("flush", self.size))

    def sum(self) -> None:
        self.gpu.kernel(self.size / self.gpu.dram_gbps / 1e3, reads=("flush", self.size))
