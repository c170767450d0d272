"""The most memory a step holds: by torch's own allocator, and by the lifetimes of a graph's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from opcast.simulator.graph import Graph


def torch_peak(run: Callable[[], object]) -> int:
    """The most bytes that torch's allocator held in a call, beyond what was there at its start."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as recorded:
        kept = run()
    del kept
    return peak_of_events(recorded.profiler.kineto_results.experimental_event_tree())


def peak_of_events(events: Iterable[Any]) -> int:
    """The same of a call that was profiled already, from its tree of events."""
    changes: list[tuple[int, int]] = []
    stack = list(events)
    while stack:
        event = stack.pop()
        stack += event.children
        if event.name == "[memory]":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    living = peak = 0
    for _, change in sorted(changes):
        living += change
        peak = max(peak, living)
    return peak


def peak_of_new_tensors(graph: Graph) -> int:
    """The most bytes that tensors written in a graph take at once."""
    sizes, living, peak = graph.tensor_bytes, 0, 0
    there: set[int] = set()
    for node in graph.nodes():
        living += sum(int(sizes[t]) for t in node.writes if t not in there and t not in node.reads)
        there |= {*node.reads, *node.writes}
        peak = max(peak, living)
        living -= sum(int(sizes[t]) for t in node.frees)
    return peak
