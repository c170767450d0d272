"""A rank's timeline as PyTorch's profiler writes it, so that HolisticTraceAnalysis and TensorBoard open it.

HTA wants of a kernel a stream, and a launch of the same correlation on the host; ``ProfilerStep#N`` around a step;
whole microseconds; names of collectives that begin with ``nccl``; the rank, with a blank after the colon. Starts and
ends are rounded each to the nearest microsecond, so that what follows without a gap still does; what is then of no
length is left out.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...datasets.files import write_atomically
from .perfetto import TimelineError

HOST, DEVICE = 1, 0
THREAD = 1
LAUNCH_US = 1
NAMES = {"compute": "{}", "memory": "Memcpy {}", "network": "ncclDevKernel_{}"}
CATEGORIES = {"compute": "kernel", "memory": "gpu_memcpy", "network": "kernel"}


class KernelSpan(NamedTuple):
    """What ran on a stream: ``sort`` is compute, memory or network. Times in us."""

    name: str
    sort: str
    stream: int
    start_us: float
    end_us: float


def write_kineto(path: Path, rank: int, ranks: int, spans: Sequence[KernelSpan], total_us: float) -> Path:
    """Write a rank's timeline (``.json`` or ``.json.gz``). TimelineError where that cannot be."""
    head = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks},
            "displayTimeUnit": "ms"}  # fmt: skip
    text = json.dumps({**head, "traceEvents": list(events(spans, total_us))})
    packed = gzip.compress(text.encode(), 4, mtime=0) if path.name.endswith(".gz") else text.encode()
    return write_atomically(path, lambda unfinished: unfinished.write_bytes(packed), TimelineError, "the timeline ")


def events(spans: Iterable[KernelSpan], total_us: float) -> Iterator[dict[str, Any]]:
    """The events: one step on the host, and of each kernel its launch and itself."""
    yield {"ph": "M", "name": "process_name", "pid": HOST, "tid": 0, "ts": 0, "args": {"name": "python"}}
    yield {"ph": "M", "name": "process_name", "pid": DEVICE, "tid": 0, "ts": 0, "args": {"name": "GPU 0"}}
    yield {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#0", "pid": HOST, "tid": THREAD, "ts": 0,
           "dur": max(round(total_us), 1) + LAUNCH_US, "args": {"External id": 1}}  # fmt: skip
    for number, span in enumerate(spans, 1):
        start, end = round(span.start_us), round(span.end_us)
        if end <= start:
            continue
        yield {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": HOST, "tid": THREAD, "ts": start,
               "dur": LAUNCH_US, "args": {"correlation": number, "External id": number}}  # fmt: skip
        yield {"ph": "X", "cat": CATEGORIES[span.sort], "name": NAMES[span.sort].format(span.name), "pid": DEVICE,
               "tid": span.stream, "ts": start, "dur": end - start,
               "args": {"device": 0, "context": 1, "stream": span.stream, "correlation": number,
                        "External id": number}}  # fmt: skip
