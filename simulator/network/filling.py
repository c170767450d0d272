"""The loops of :mod:`.sharing`: plain Python for few activities, compiled with numba, where it is installed, for many.

Arrays are as in :class:`.sharing.Activities`: ``a_start``, ``a_link``, ``a_weight`` list links by activity,
``l_start``, ``l_activity``, ``l_weight`` activities by link. A negative rate marks an activity that is to be filled;
inactive ones have rate 0. Types of lists follow from their first entry, as numba wants it.
"""

# mypy: disable-error-code="no-untyped-def,assignment,arg-type"

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

SAME = 1e-9  # relative difference of two times or levels that counts as none


def fill(a_start, a_link, a_weight, l_start, l_activity, l_weight, chosen, left, rate, level):
    """Raise the rates of ``chosen`` activities together until each meets a full link.

    ``left`` [links] is the capacity that is free for them and is used up; ``level`` [links] receives the rate at
    which each link filled (infinite where it did not).
    """
    weight = np.zeros(len(left))
    for each in chosen:
        rate[each] = -1.0
        for entry in range(a_start[each], a_start[each + 1]):
            weight[a_link[entry]] += a_weight[entry]
    seen = np.zeros(len(left), np.bool_)
    heap = [(0.0, np.int64(-1))]
    heap.pop()
    for each in chosen:
        if a_start[each] == a_start[each + 1]:
            rate[each] = np.inf
        for entry in range(a_start[each], a_start[each + 1]):
            link = a_link[entry]
            if not seen[link]:
                seen[link] = True
                heap.append((max(left[link], 0.0) / weight[link], np.int64(link)))
    heapq.heapify(heap)
    while len(heap) > 0:
        was, link = heapq.heappop(heap)
        if weight[link] <= 1e-12:
            continue
        now = max(left[link], 0.0) / weight[link]
        if now > was * (1.0 + SAME) and now > was:
            heapq.heappush(heap, (now, link))
            continue
        level[link] = now
        for position in range(l_start[link], l_start[link + 1]):
            each = l_activity[position]
            if rate[each] >= 0.0:
                continue
            rate[each] = now
            for entry in range(a_start[each], a_start[each + 1]):
                left[a_link[entry]] -= now * a_weight[entry]
                weight[a_link[entry]] -= a_weight[entry]
        weight[link] = 0.0


def simulate(
    a_start,
    a_link,
    a_weight,
    l_start,
    l_activity,
    l_weight,
    capacity,
    size,
    latency,
    release,
    waits,
    f_start,
    follower,
    tolerance,
):
    """Start and end of each activity, NaN for what never ran, and the bytes carried by each link.

    Events in order of (time, order of creation). An activity is released, waits out its latency, then shares links.
    One that would end within ``tolerance`` of the time it has been moving ends with the event before.
    """
    count, links = len(size), len(capacity)
    start, end = np.full(count, np.nan), np.full(count, np.nan)
    carried, level = np.zeros(links), np.full(links, np.inf)
    rate, remaining, rest = np.zeros(count), size.copy(), waits.copy()
    running, moving = np.zeros(count, np.bool_), np.zeros(count)
    heap = [(0.0, np.int64(0), np.int64(-1))]
    heap.pop()
    order = np.int64(0)
    for each in range(count):
        if rest[each] == 0:
            heap.append((release[each] + latency[each], order, np.int64(each)))
            start[each] = release[each]
            order += 1
    heapq.heapify(heap)
    live = [np.int64(0)]
    live.pop()
    now = 0.0
    while len(heap) > 0 or len(live) > 0:
        until = np.inf
        for each in live:
            until = min(until, now + remaining[each] / rate[each] if rate[each] > 0.0 else np.inf)
        if len(heap) > 0:
            until = min(until, heap[0][0])
        span = until - now
        now = until
        lowest = np.inf
        kept = [np.int64(0)]
        kept.pop()
        done = [np.int64(0)]
        done.pop()
        for each in live:
            remaining[each] -= rate[each] * span
            if remaining[each] <= size[each] * SAME or remaining[each] <= tolerance * rate[each] * (now - moving[each]):
                done.append(each)
            else:
                kept.append(each)
        live = kept
        fresh = [np.int64(0)]
        fresh.pop()
        while len(heap) > 0 and heap[0][0] <= now * (1.0 + SAME):
            _, _, each = heapq.heappop(heap)
            if remaining[each] > 0.0 and a_start[each] < a_start[each + 1]:
                fresh.append(each)
            else:
                done.append(each)
        for each in done:
            end[each] = now
            running[each] = False
            if rate[each] > 0.0:
                lowest = min(lowest, rate[each])
            rate[each] = 0.0
            for entry in range(a_start[each], a_start[each + 1]):
                carried[a_link[entry]] += size[each] * a_weight[entry]
            order = _wake(each, now, order, heap, start, latency, release, rest, f_start, follower)
        for each in fresh:
            running[each] = True
            moving[each] = now
            live.append(each)
        lowest = min(lowest, _level_of(fresh, a_start, a_link, l_start, l_activity, l_weight, capacity, running))
        if lowest < np.inf and len(live) > 0:
            _share_again(a_start, a_link, a_weight, l_start, l_activity, l_weight, capacity, live, rate, level, lowest)
        elif len(live) == 0:
            level[:] = np.inf
    return start, end, carried


def _wake(each, now, order, heap, start, latency, release, rest, f_start, follower):
    """Release what waited for an activity that ended; returns the order of the next event."""
    for position in range(f_start[each], f_start[each + 1]):
        next_one = follower[position]
        rest[next_one] -= 1
        if rest[next_one] == 0:
            start[next_one] = max(now, release[next_one])
            heapq.heappush(heap, (start[next_one] + latency[next_one], order, np.int64(next_one)))
            order += 1
    return order


def _level_of(fresh, a_start, a_link, l_start, l_activity, l_weight, capacity, running):
    """The lowest level at which links of fresh activities could fill: below it nothing changes."""
    lowest = np.inf
    for each in fresh:
        for entry in range(a_start[each], a_start[each + 1]):
            link = a_link[entry]
            total = 0.0
            for position in range(l_start[link], l_start[link + 1]):
                if running[l_activity[position]]:
                    total += l_weight[position]
            lowest = min(lowest, capacity[link] / total)
    return lowest


def _share_again(a_start, a_link, a_weight, l_start, l_activity, l_weight, capacity, live, rate, level, lowest):
    """Fill again all live activities whose rate is not below ``lowest``; the others keep theirs."""
    left = capacity.copy()
    chosen = [np.int64(0)]
    chosen.pop()
    bound = lowest * (1.0 - 1e-6)
    for each in live:
        if rate[each] > 0.0 and rate[each] < bound:
            for entry in range(a_start[each], a_start[each + 1]):
                left[a_link[entry]] -= rate[each] * a_weight[entry]
        else:
            chosen.append(each)
    for link in range(len(level)):
        if level[link] >= bound:
            level[link] = np.inf
    if len(chosen) > 0:
        fill(a_start, a_link, a_weight, l_start, l_activity, l_weight, np.array(chosen), left, rate, level)


@lru_cache
def compiled(name: str) -> Callable[..., Any]:
    """``fill`` or ``simulate`` as machine code, kept on disk after the first time; as they stand without numba."""
    functions: dict[str, Callable[..., Any]] = {"fill": fill, "simulate": simulate}
    try:
        import numba
    except ImportError:
        return functions[name]
    for callee in (fill, _share_again, _wake, _level_of):
        numba.extending.register_jitable(callee)
    made: Callable[..., Any] = numba.njit(cache=True)(functions[name])
    return made
