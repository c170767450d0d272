"""Which cores of this machine other work leaves free.

Two threads of one operator wait for each other. Where one of them shares its core with other work, the operator takes
as long as the scheduler's slices say, and a step of many operators takes something else again: neither predicts the
other. So a core that is busy is left out, and the rest of the machine is measured.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .environment import physical_cores

STAT = Path("/proc/stat")
LOOK_S = 1.0
IDLE = (3, 4)  # fields of a processor's line in /proc/stat: idle, and waiting for a disk (man 5 proc_stat)
COUNTED = 8  # user, nice, system, idle, iowait, irq, softirq, steal


def free_cores(cores: Sequence[Sequence[int]], loads: Mapping[int, float]) -> list[int]:
    """The first processor of each core that is left where as many cores are left out as the load of all would fill.

    ``cores`` [n]: the processors of each core. ``loads``: the busy share of each processor, 0 to 1, nothing for an
    unknown one. The busiest are left out first, and one is always kept.
    """
    load = [max((loads.get(cpu, 0.0) for cpu in core), default=0.0) for core in cores]
    count = max(1, len(cores) - round(sum(load)))
    order = sorted(range(len(cores)), key=lambda at: (load[at], at))
    return [cores[at][0] for at in sorted(order[:count])]


def processor_loads(seconds: float = LOOK_S) -> dict[int, float]:
    """The busy share of each processor over the next seconds, of all processes; nothing where the system tells none."""
    before = _times()
    if not before:
        return {}
    time.sleep(seconds)
    loads = {}
    for processor, (idle, total) in _times().items():
        idle_before, total_before = before.get(processor, (idle, total))
        if total > total_before:
            loads[processor] = 1.0 - (idle - idle_before) / (total - total_before)
    return loads


def _times() -> dict[int, tuple[int, int]]:
    """Idle and total ticks of each processor since the machine started."""
    if not STAT.is_file():
        return {}
    times = {}
    for line in STAT.read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(tick) for tick in fields[:COUNTED]]
            times[int(name[3:])] = (sum(ticks[at] for at in IDLE), sum(ticks))
    return times


@contextlib.contextmanager
def on_free_cores() -> Iterator[tuple[int, int]]:
    """Keep this process, and those that it starts meanwhile, to the cores that are free now; gives their count of all.

    Where the system binds no process (macOS, Windows) all count as free.
    """
    cores = physical_cores()
    if not hasattr(os, "sched_setaffinity"):
        yield len(cores), len(cores)
        return
    before = os.sched_getaffinity(0)
    free = free_cores(cores, processor_loads() if len(cores) > 1 else {})
    if len(free) < len(cores):
        os.sched_setaffinity(0, free)
    try:
        yield len(free), len(cores)
    finally:
        os.sched_setaffinity(0, before)
