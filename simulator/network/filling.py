"""The loops of :mod:`.sharing`: plain Python for few activities, compiled with numba, where it is installed, for many.

Arrays are as in :class:`.sharing.Activities`: ``a_start``, ``a_link``, ``a_weight`` list links by activity,
``l_start``, ``l_activity``, ``l_weight`` activities by link. A negative rate marks an activity that is to be filled;
inactive ones have rate 0. Types of lists follow from their first entry, as numba wants it.
"""

# mypy: disable-error-code="no-untyped-def,assignment,arg-type"

from __future__ import annotations

import heapq

import numpy as np

RELATIVE_TOLERANCE = 1e-9  # relative difference of two times or levels that counts as none


def fill(a_start, a_link, a_weight, l_start, l_activity, l_weight, raised, free, rate, level):
    """Raise the rates of ``raised`` activities together until each meets a full link.

    ``free`` [links] is the capacity that is free for them and is used up; ``level`` [links] receives the rate at
    which each link filled (infinite where it did not).
    """
    weight = np.zeros(len(free))
    for activity in raised:
        rate[activity] = -1.0
        for entry in range(a_start[activity], a_start[activity + 1]):
            weight[a_link[entry]] += a_weight[entry]
    seen = np.zeros(len(free), np.bool_)
    heap = [(0.0, np.int64(-1))]
    heap.pop()
    for activity in raised:
        if a_start[activity] == a_start[activity + 1]:
            rate[activity] = np.inf
        for entry in range(a_start[activity], a_start[activity + 1]):
            link = a_link[entry]
            if not seen[link]:
                seen[link] = True
                heap.append((max(free[link], 0.0) / weight[link], np.int64(link)))
    heapq.heapify(heap)
    while len(heap) > 0:
        queued, link = heapq.heappop(heap)
        if weight[link] <= 1e-12:
            continue
        now = max(free[link], 0.0) / weight[link]
        if now > queued * (1.0 + RELATIVE_TOLERANCE) and now > queued:
            heapq.heappush(heap, (now, link))
            continue
        level[link] = now
        for position in range(l_start[link], l_start[link + 1]):
            activity = l_activity[position]
            if rate[activity] >= 0.0:
                continue
            rate[activity] = now
            for entry in range(a_start[activity], a_start[activity + 1]):
                free[a_link[entry]] -= now * a_weight[entry]
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
    rate, remaining, pending = np.zeros(count), size.copy(), waits.copy()
    running, moving = np.zeros(count, np.bool_), np.zeros(count)
    heap = [(0.0, np.int64(0), np.int64(-1))]
    heap.pop()
    order = np.int64(0)
    for activity in range(count):
        if pending[activity] == 0:
            heap.append((release[activity] + latency[activity], order, np.int64(activity)))
            start[activity] = release[activity]
            order += 1
    heapq.heapify(heap)
    live = [np.int64(0)]
    live.pop()
    now = 0.0
    while len(heap) > 0 or len(live) > 0:
        until = np.inf
        for activity in live:
            until = min(until, now + remaining[activity] / rate[activity] if rate[activity] > 0.0 else np.inf)
        if len(heap) > 0:
            until = min(until, heap[0][0])
        span = until - now
        now = until
        lowest = np.inf
        live, done = _advance(live, span, now, rate, remaining, size, moving, tolerance)
        fresh = _due(heap, now, remaining, a_start, done)
        for activity in done:
            end[activity] = now
            running[activity] = False
            if rate[activity] > 0.0:
                lowest = min(lowest, rate[activity])
            rate[activity] = 0.0
            for entry in range(a_start[activity], a_start[activity + 1]):
                carried[a_link[entry]] += size[activity] * a_weight[entry]
            order = _release_followers(activity, now, order, heap, start, latency, release, pending, f_start, follower)
        for activity in fresh:
            running[activity] = True
            moving[activity] = now
            live.append(activity)
        lowest = min(lowest, _lowest_level(fresh, a_start, a_link, l_start, l_activity, l_weight, capacity, running))
        if lowest < np.inf and len(live) > 0:
            _refill(a_start, a_link, a_weight, l_start, l_activity, l_weight, capacity, live, rate, level, lowest)
        elif len(live) == 0:
            level[:] = np.inf
    return start, end, carried


def _advance(live, span, now, rate, remaining, size, moving, tolerance):
    """Moves live activities on by a span; returns those that go on after it, and those that have ended."""
    going, done = [np.int64(0)], [np.int64(0)]
    going.pop()
    done.pop()
    for activity in live:
        remaining[activity] -= rate[activity] * span
        little = tolerance * rate[activity] * (now - moving[activity])
        if remaining[activity] <= size[activity] * RELATIVE_TOLERANCE or remaining[activity] <= little:
            done.append(activity)
        else:
            going.append(activity)
    return going, done


def _due(heap, now, remaining, a_start, done):
    """The activities that begin to share links now; those of them that have nothing to move go to ``done``."""
    fresh = [np.int64(0)]
    fresh.pop()
    while len(heap) > 0 and heap[0][0] <= now * (1.0 + RELATIVE_TOLERANCE):
        _, _, activity = heapq.heappop(heap)
        if remaining[activity] > 0.0 and a_start[activity] < a_start[activity + 1]:
            fresh.append(activity)
        else:
            done.append(activity)
    return fresh


def _release_followers(activity, now, order, heap, start, latency, release, pending, f_start, follower):
    """Release what waited for an activity that ended; returns the order of the next event."""
    for position in range(f_start[activity], f_start[activity + 1]):
        waiter = follower[position]
        pending[waiter] -= 1
        if pending[waiter] == 0:
            start[waiter] = max(now, release[waiter])
            heapq.heappush(heap, (start[waiter] + latency[waiter], order, np.int64(waiter)))
            order += 1
    return order


def _lowest_level(fresh, a_start, a_link, l_start, l_activity, l_weight, capacity, running):
    """The lowest level at which links of fresh activities could fill: below it nothing changes."""
    lowest = np.inf
    for activity in fresh:
        for entry in range(a_start[activity], a_start[activity + 1]):
            link = a_link[entry]
            total = 0.0
            for position in range(l_start[link], l_start[link + 1]):
                if running[l_activity[position]]:
                    total += l_weight[position]
            lowest = min(lowest, capacity[link] / total)
    return lowest


def _refill(a_start, a_link, a_weight, l_start, l_activity, l_weight, capacity, live, rate, level, lowest):
    """Fill again all live activities whose rate is not below ``lowest``; the others keep theirs."""
    free = capacity.copy()
    raised = [np.int64(0)]
    raised.pop()
    bound = lowest * (1.0 - 1e-6)
    for activity in live:
        if rate[activity] > 0.0 and rate[activity] < bound:
            for entry in range(a_start[activity], a_start[activity + 1]):
                free[a_link[entry]] -= rate[activity] * a_weight[entry]
        else:
            raised.append(activity)
    for link in range(len(level)):
        if level[link] >= bound:
            level[link] = np.inf
    if len(raised) > 0:
        fill(a_start, a_link, a_weight, l_start, l_activity, l_weight, np.array(raised), free, rate, level)


CALLEES = (fill, _refill, _advance, _due, _release_followers, _lowest_level)
"""What the loops call, for :func:`....datasets.traces.machine_code.compile_loop`."""
