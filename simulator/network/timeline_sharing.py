"""Communications of a whole timeline on the links they share: how long each takes when others want the same links.

A *pattern* is all that an op moves at once (the rings of every data-parallel group of a stage, all sends from one stage
to the next): how much of each link it uses when nothing is in its way, its fullest link wholly. Patterns that run at
the same time rise together, each flow at the same rate, until a link is full (max-min, as in :mod:`.sharing`). Rates
depend only on which patterns run, so they are worked out once for each such set, and a timeline of a hundred thousand
communications over thousands of links is walked in a second. Before its bytes move, a communication stands still for
its latency and uses nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

MIN_SHARE = 1e-9  # of a link's capacity: less is no use of it
EVENT_TOLERANCE = 1e-9  # relative: ends nearer than this are one event


class Usage(NamedTuple):
    """What a pattern moves for one byte of its op: bytes over each link [links], and bytes of its largest flow."""

    load: np.ndarray
    flow: float


class Traffic(NamedTuple):
    """n communications: their pattern, when they may start, how long they stand still and how long bytes move alone.

    ``previous`` is the one before it on the same stream, which has to end first (-1: none).
    """

    pattern: np.ndarray
    start_us: np.ndarray
    still_us: np.ndarray
    moving_us: np.ndarray
    previous: np.ndarray

    @property
    def alone_us(self) -> np.ndarray:
        """How long each takes if nothing is in its way [n]."""
        return self.still_us + self.moving_us


@dataclass(frozen=True, eq=False)
class Patterns:
    """Patterns on links of ``bandwidth_gbps`` [links]."""

    usages: Sequence[Usage]
    bandwidth_gbps: np.ndarray
    _speeds: dict[tuple[int, ...], dict[int, float]] = field(default_factory=dict, repr=False)

    @cached_property
    def us_per_byte(self) -> np.ndarray:
        """What the fullest link of each pattern takes for one byte of its op [patterns]."""
        return np.array([(usage.load / self.bandwidth_gbps).max(initial=0.0) / 1e3 for usage in self.usages])

    @cached_property
    def share(self) -> np.ndarray:
        """Part of a link's capacity that each pattern uses alone, by class of links [patterns, classes].

        Links that are used alike are one class; those that a single pattern uses are left out.
        """
        count, links = len(self.usages), len(self.bandwidth_gbps)
        users, mark = np.zeros(links, dtype=np.int64), np.zeros(links)
        words = np.random.default_rng(0).random(count)
        used = []
        for word, usage, fullest in zip(words, self.usages, self.us_per_byte, strict=True):
            share = usage.load / (self.bandwidth_gbps * 1e3 * max(fullest, 1e-300))
            share[share < MIN_SHARE] = 0.0
            users += share > 0
            mark += word * np.round(share, 9)
            used.append(share)
        shared = np.flatnonzero(users > 1)
        first = shared[np.unique(np.round(mark[shared], 9), return_index=True)[1]]
        return np.array([share[first] for share in used]).reshape(count, len(first))

    def speeds(self, running: tuple[int, ...]) -> dict[int, float]:
        """How fast each of the ``running`` patterns (sorted, one entry a communication) is: 1 is as if alone."""
        if running not in self._speeds:
            self._speeds[running] = self._share_out(running)
        return self._speeds[running]

    def _share_out(self, running: tuple[int, ...]) -> dict[int, float]:
        names, copies = np.unique(np.array(running, dtype=np.int64), return_counts=True)
        share = self.share[names] * copies[:, None]
        share = share[:, share.any(axis=0)]
        flows = np.array([self.usages[name].flow for name in names.tolist()])
        alone = self.us_per_byte[names]
        rate = np.divide(flows, alone, out=np.ones(len(names)), where=(alone > 0) & (flows > 0))  # bytes/us, alone
        speed, rising = np.zeros(len(names)), np.ones(len(names), dtype=bool)
        while rising.any():
            demand = (share[rising] / rate[rising, None]).sum(axis=0)
            free = 1.0 - (share[~rising] * speed[~rising, None]).sum(axis=0)
            levels = np.divide(np.maximum(free, 0.0), demand, out=np.full(len(free), np.inf), where=demand > 0)
            own_level = rate / copies  # at which a pattern alone fills its own fullest link
            level = min(levels.min(initial=np.inf), own_level[rising].min())
            full = (share[:, levels <= level * (1 + MIN_SHARE)] > 0).any(axis=1) | (
                own_level <= level * (1 + MIN_SHARE)
            )
            speed[rising & full] = level / rate[rising & full]
            rising &= ~full
        return dict(zip(names.tolist(), speed.tolist(), strict=True))


def run_traffic(patterns: Patterns, traffic: Traffic) -> tuple[np.ndarray, np.ndarray]:
    """When each communication starts and ends, us [n], all sharing the links.

    Only streams in whose way others are need be walked; who is in the way is looked up again in what was found.
    """
    lanes = _find_lanes(patterns, traffic)
    start, end = traffic.start_us, traffic.start_us + traffic.alone_us
    walked = np.zeros(len(start), dtype=bool)
    while not np.array_equal(walked, grown := walked | _find_disturbed(lanes, traffic, start, end)):
        walked = grown
        start, end = _walk(patterns, traffic, walked)
    return start, end


def _walk(patterns: Patterns, traffic: Traffic, walked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends where those ``walked`` share links from event to event, and all others are alone."""
    kinds, moving, still = traffic.pattern.tolist(), traffic.moving_us.tolist(), traffic.still_us.tolist()
    starts, ends, remaining_us = traffic.start_us.tolist(), (traffic.start_us + traffic.alone_us).tolist(), list(moving)
    follower = np.full(len(kinds), -1)
    follower[traffic.previous[traffic.previous >= 0]] = np.flatnonzero(traffic.previous >= 0)
    followers = follower.tolist()
    heap = [(starts[i] + still[i], i) for i in np.flatnonzero(walked & (traffic.previous < 0)).tolist()]
    heapq.heapify(heap)
    running: list[int] = []
    now = 0.0
    while heap or running:
        speeds = patterns.speeds(tuple(sorted(kinds[i] for i in running))) if running else {}
        until = heap[0][0] if heap else np.inf
        for i in running:
            until = min(until, now + remaining_us[i] / speeds[kinds[i]])
        done: list[int] = []
        still_running: list[int] = []
        for i in running:
            remaining_us[i] -= (until - now) * speeds[kinds[i]]
            (done if remaining_us[i] <= EVENT_TOLERANCE * max(until, 1.0) else still_running).append(i)
        running, now = still_running, until
        while heap and heap[0][0] <= now:
            _, i = heapq.heappop(heap)
            (running if moving[i] > 0.0 else done).append(i)
        for i in done:
            ends[i] = now
            waiter = followers[i]
            if waiter >= 0:
                starts[waiter] = max(starts[waiter], now)
                heapq.heappush(heap, (starts[waiter] + still[waiter], waiter))
    return np.array(starts), np.array(ends)


class _Lanes(NamedTuple):
    """The first communication of each one's stream [n]; sets of the same pattern and stream; pairs that share links.

    Communications without a stream make a set for each pattern.
    """

    stream: np.ndarray
    sets: list[np.ndarray]
    pairs: list[tuple[int, int]]


def _find_lanes(patterns: Patterns, traffic: Traffic) -> _Lanes:
    count = len(traffic.previous)
    stream = np.where(traffic.previous >= 0, traffic.previous, np.arange(count))
    while not np.array_equal(stream, stream[stream]):
        stream = stream[stream]
    lane = np.where(np.bincount(stream, minlength=count)[stream] > 1, stream, -1)
    order = np.lexsort((lane, traffic.pattern))
    borders = (np.diff(traffic.pattern[order]) != 0) | (np.diff(lane[order]) != 0)
    sets = np.split(order, np.flatnonzero(borders) + 1) if count else []
    first = [members[0] for members in sets]
    used, pattern, own_lane = (patterns.share[traffic.pattern[first]] > 0) * 1.0, traffic.pattern[first], lane[first]
    common = (used @ used.T > 0) | (pattern[:, None] == pattern)
    pairs = np.argwhere(common & ((own_lane[:, None] != own_lane) | (own_lane == -1)))
    return _Lanes(stream, sets, [(first_set, second_set) for first_set, second_set in pairs.tolist()])


def _find_disturbed(lanes: _Lanes, traffic: Traffic, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Communications of streams in whose way others are, or that are placed into themselves [n]."""
    touched = np.zeros(len(start), dtype=bool)
    touched[lanes.stream[(traffic.previous >= 0) & (start < end[traffic.previous] * (1.0 - EVENT_TOLERANCE))]] = True
    sets = [members[np.argsort(start[members], kind="stable")] for members in lanes.sets]
    for first_set, second_set in lanes.pairs:
        touched[lanes.stream[sets[first_set][_overlaps(start, end, sets[first_set], sets[second_set])]]] = True
    return touched[lanes.stream]


def _overlaps(start: np.ndarray, end: np.ndarray, members: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which of some communications meet one of others, or another of their own; both in order of their starts."""
    before = np.searchsorted(start[others], end[members])
    latest_end = np.concatenate([[-np.inf], np.maximum.accumulate(end[others])])
    if members is not others:
        return np.asarray(latest_end[before] > start[members])
    position = np.arange(len(members))
    return (latest_end[position] > start[members]) | (before > position + 1)


@dataclass(frozen=True, eq=False)
class SharedTimeline:
    """What links saw of a timeline of ``total_us``: patterns, traffic, bytes of each op, its start and end [n].

    ``rounds`` of placing were needed, of which the last changed the timeline by ``residual`` (relative). With links of
    its own for every communication it would have lasted ``apart_us``.
    """

    patterns: Patterns
    traffic: Traffic
    size_bytes: np.ndarray
    start_us: np.ndarray
    end_us: np.ndarray
    total_us: float
    apart_us: float
    rounds: int = 1
    residual: float = 0.0
    _moved: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    def load(self) -> np.ndarray:
        """Share of each link's capacity in use over the whole time [links]."""
        carried = np.zeros(len(self.patterns.bandwidth_gbps))
        for usage, size in zip(self.patterns.usages, self.moved(1)[:, 0].tolist(), strict=True):
            carried += usage.load * size
        return carried / (self.patterns.bandwidth_gbps * 1e3 * max(self.total_us, 1e-12))

    def over_time(self, links: np.ndarray, bins: int) -> np.ndarray:
        """Share of the capacity of some links in use, over equal spans of the whole time [bins, len(links)]."""
        capacity = self.patterns.bandwidth_gbps[links] * 1e3 * max(self.total_us, 1e-12) / bins
        used = np.array([usage.load[links] for usage in self.patterns.usages]).reshape(-1, len(links))
        return self.moved(bins).T @ (used / capacity)

    def mean_over_time(self, links: np.ndarray, bins: int) -> np.ndarray:
        """The mean of :meth:`over_time` over some links [bins]."""
        share = 1.0 / (self.patterns.bandwidth_gbps[links] * 1e3 * max(self.total_us, 1e-12) / bins)
        used = np.array([usage.load[links] @ share for usage in self.patterns.usages])
        return self.moved(bins).T @ (used / max(len(links), 1))

    def moved(self, bins: int) -> np.ndarray:
        """Bytes of each pattern's ops by span, evenly from the first moving byte to the last [patterns, bins]."""
        if bins not in self._moved:
            self._moved[bins] = self._by_span(bins)
        return self._moved[bins]

    def _by_span(self, bins: int) -> np.ndarray:
        width = max(self.total_us, 1e-12) / bins
        begin = np.minimum(self.start_us + self.traffic.still_us, self.end_us)
        rate = self.size_bytes / np.maximum(self.end_us - begin, 1e-9)
        moved = np.zeros((len(self.patterns.usages), bins))
        for span in range(bins):
            inside = np.clip(np.minimum(self.end_us, (span + 1) * width) - np.maximum(begin, span * width), 0.0, None)
            moved[:, span] = np.bincount(self.traffic.pattern, inside * rate, len(self.patterns.usages))
        return moved
