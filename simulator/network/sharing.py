"""Max-min fair rates of activities that share links, and how long they take: the fluid model of a network.

An *activity* moves bytes at one rate over a set of links at once, each with a weight: a plain flow uses the links of
its path with weight one; a ring collective is a single activity whose rate is that of the ring, and which uses a link
as often as edges of the ring cross it. Rates rise together until a link is full; its activities stop there and the
others rise on (progressive filling: Bertsekas and Gallager, "Data Networks", sec. 6.5.2, with weights).

An event loop moves time from start to start and end to end. After an event only activities at or above the lowest
level that the event can touch are shared out again: links that fill below that level do not carry what changed.
Many activities run compiled where numba is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...datasets.traces.machine_code import compile_loop
from . import filling

END_TOLERANCE = 1e-3  # of an activity's own time
MAX_PLAIN_WORK = 1_000_000  # activities times their links: about a second of plain Python


@dataclass(frozen=True, eq=False)
class Activities:
    """n activities: ``start`` int64 [n + 1] and ``links``, ``weights`` as CSR; ``size_bytes``, ``latency_us`` [n].

    ``waits`` CSR (``waits_start`` [n + 1], ``waits``) lists the activities that each one waits for; ``release_us`` [n]
    is the earliest start. An activity starts, lasts its latency, then moves its bytes.
    """

    start: np.ndarray
    links: np.ndarray
    weights: np.ndarray
    size_bytes: np.ndarray
    latency_us: np.ndarray
    release_us: np.ndarray
    waits_start: np.ndarray
    waits: np.ndarray

    def __len__(self) -> int:
        return len(self.size_bytes)


@dataclass(frozen=True, eq=False)
class SharedTimes:
    """``start_us``, ``end_us`` float64 [n] of activities; bytes that each link carried."""

    start_us: np.ndarray
    end_us: np.ndarray
    carried_bytes: np.ndarray

    @property
    def total_us(self) -> float:
        return float(self.end_us.max(initial=0.0))


def max_min(activities: Activities, capacity: np.ndarray, active: np.ndarray | None = None) -> np.ndarray:
    """Rates [n] of activities (those ``active`` only) on links of ``capacity`` [links], in its unit a time.

    An activity that uses no link has an infinite rate.
    """
    count = len(activities)
    raised = np.arange(count) if active is None else np.flatnonzero(active)
    rate = np.zeros(count)
    by_link = _by_link(activities, len(capacity))
    free = np.asarray(capacity, dtype=np.float64).copy()
    level = np.full(len(capacity), np.inf)
    _pick_loop(filling.fill, activities)(
        activities.start, activities.links, activities.weights, *by_link, raised, free, rate, level
    )
    return rate


def run_activities(activities: Activities, bandwidth_gbps: np.ndarray, tolerance: float = END_TOLERANCE) -> SharedTimes:
    """Let all activities run on links of ``bandwidth_gbps`` [links]. ValueError for a circle of waiting.

    An activity may end early by ``tolerance`` of its own time, so that near ends share one event; 0 is exact.
    """
    capacity = np.asarray(bandwidth_gbps, dtype=np.float64) * 1e3  # bytes a microsecond
    merged, sample_link, sort_of_link = _merge_links(activities, capacity)
    followers = _followers(activities)
    start, end, carried = _pick_loop(filling.simulate, merged)(
        merged.start,
        merged.links,
        merged.weights,
        *_by_link(merged, len(sample_link)),
        capacity[sample_link],
        activities.size_bytes.astype(np.float64),
        activities.latency_us.astype(np.float64),
        activities.release_us.astype(np.float64),
        np.diff(activities.waits_start),
        *followers,
        tolerance,
    )
    if np.isnan(end).any():
        raise ValueError(f"{int(np.isnan(end).sum())} activities wait for each other in a circle")
    return SharedTimes(start, end, carried[sort_of_link])


def _merge_links(activities: Activities, capacity: np.ndarray) -> tuple[Activities, np.ndarray, np.ndarray]:
    """The activities on one link of each sort that they use alike; those links, and the sort of each link [links]."""
    owner = np.repeat(np.arange(len(activities)), np.diff(activities.start))
    random = np.random.default_rng(0)
    words, word = random.random(len(activities)), float(random.random())
    mark = np.bincount(activities.links, words[owner] * activities.weights, len(capacity)) + word * capacity
    _, sample_link, sort_of_link = np.unique(mark, return_index=True, return_inverse=True)
    representative = sample_link[sort_of_link[activities.links]] == activities.links
    if representative.all():
        return activities, np.arange(len(capacity)), np.arange(len(capacity))
    start = np.concatenate([[0], np.cumsum(representative)])[activities.start]
    merged = replace(
        activities,
        start=start,
        links=sort_of_link[activities.links[representative]],
        weights=activities.weights[representative],
    )
    return merged, sample_link, sort_of_link


def _pick_loop(loop: Callable[..., Any], activities: Activities) -> Callable[..., Any]:
    """A loop of :mod:`.filling`: compiled once there is so much to do that loading numba pays, and from then on."""
    loaded = compile_loop.cache_info().currsize > 0
    large = len(activities) * len(activities.links) > MAX_PLAIN_WORK
    return compile_loop(loop, filling.CALLEES) if loaded or large else loop


def _by_link(activities: Activities, links: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The usage by link instead of by activity: CSR of activities and weights."""
    owner = np.repeat(np.arange(len(activities)), np.diff(activities.start))
    order = np.argsort(activities.links, kind="stable")
    start = np.concatenate([[0], np.cumsum(np.bincount(activities.links, minlength=links))])
    return start, owner[order], activities.weights[order]


def _followers(activities: Activities) -> tuple[np.ndarray, np.ndarray]:
    """Which activities wait for each one: CSR."""
    waiting = np.repeat(np.arange(len(activities)), np.diff(activities.waits_start))
    order = np.argsort(activities.waits, kind="stable")
    counts = np.bincount(activities.waits, minlength=len(activities))
    return np.concatenate([[0], np.cumsum(counts)]), waiting[order]
