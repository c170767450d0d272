"""Communications of a whole timeline on the links they share: how long each takes when others want the same links.

A *pattern* is all that an op moves at once (the rings of every data-parallel group of a stage, all sends from one stage
to the next): how much of each link it uses when nothing is in its way, its fullest link wholly. Patterns that run at
the same time rise together, each flow at the same rate, until a link is full (max-min, as in :mod:`.sharing`). Rates
depend only on which patterns run, so they are worked out once for each such set, and a timeline of a hundred thousand
communications over thousands of links is walked in a second. Before its bytes move, a communication stands still for
its latency and uses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

SHARED = 1e-9  # of a link's capacity: less is no use of it


class Usage(NamedTuple):
    """What a pattern moves for one byte of its op: bytes over each link [links], and bytes of its largest flow."""

    load: np.ndarray
    flow: float


class Traffic(NamedTuple):
    """n communications: their pattern, when they start, how long they stand still and how long bytes move alone."""

    pattern: np.ndarray
    start_us: np.ndarray
    still_us: np.ndarray
    moving_us: np.ndarray

    @property
    def alone_us(self) -> np.ndarray:
        """When each ends if nothing is in its way [n]."""
        return self.start_us + self.still_us + self.moving_us


@dataclass(frozen=True, eq=False)
class Patterns:
    """Patterns on links of ``bandwidth_gbps`` [links]."""

    usages: Sequence[Usage]
    bandwidth_gbps: np.ndarray
    _speeds: dict[tuple[int, ...], dict[int, float]] = field(default_factory=dict, repr=False)

    @cached_property
    def us_per_byte(self) -> np.ndarray:
        """What the fullest link of each pattern takes for one byte of its op [patterns]."""
        return np.array([(each.load / self.bandwidth_gbps).max(initial=0.0) / 1e3 for each in self.usages])

    @cached_property
    def share(self) -> np.ndarray:
        """Part of a link's capacity that each pattern uses alone, by class of links [patterns, classes].

        Links that are used alike are one class; those that a single pattern uses are left out.
        """
        count, links = len(self.usages), len(self.bandwidth_gbps)
        users, mark = np.zeros(links, dtype=np.int64), np.zeros(links)
        words = np.random.default_rng(0).random(count)
        used = []
        for word, each, fullest in zip(words, self.usages, self.us_per_byte, strict=True):
            part = each.load / (self.bandwidth_gbps * 1e3 * max(fullest, 1e-300))
            part[part < SHARED] = 0.0
            users += part > 0
            mark += word * np.round(part, 9)
            used.append(part)
        shared = np.flatnonzero(users > 1)
        first = shared[np.unique(np.round(mark[shared], 9), return_index=True)[1]]
        return np.array([part[first] for part in used]).reshape(count, len(first))

    @cached_property
    def alone(self) -> np.ndarray:
        """Which patterns share no link with another [patterns]."""
        found: np.ndarray = ~np.any(self.share > 0, axis=1)
        return found

    def speeds(self, running: tuple[int, ...]) -> dict[int, float]:
        """How fast each of the ``running`` patterns (sorted, one entry a communication) is: 1 is as if alone."""
        if running not in self._speeds:
            self._speeds[running] = self._shared_out(running)
        return self._speeds[running]

    def _shared_out(self, running: tuple[int, ...]) -> dict[int, float]:
        names, copies = np.unique(np.array(running, dtype=np.int64), return_counts=True)
        share = self.share[names] * copies[:, None]
        share = share[:, share.any(axis=0)]
        flows = np.array([self.usages[name].flow for name in names.tolist()])
        rate = flows / np.maximum(self.us_per_byte[names], 1e-300)  # bytes a microsecond of a flow, alone
        speed, rising = np.zeros(len(names)), np.ones(len(names), dtype=bool)
        while rising.any():
            wanted = (share[rising] / rate[rising, None]).sum(axis=0)
            free = 1.0 - (share[~rising] * speed[~rising, None]).sum(axis=0)
            levels = np.divide(np.maximum(free, 0.0), wanted, out=np.full(len(free), np.inf), where=wanted > 0)
            own = rate / copies  # at which a pattern alone fills its own fullest link
            level = min(levels.min(initial=np.inf), own[rising].min())
            full = (share[:, levels <= level * (1 + SHARED)] > 0).any(axis=1) | (own <= level * (1 + SHARED))
            speed[rising & full] = level / rate[rising & full]
            rising &= ~full
        return dict(zip(names.tolist(), speed.tolist(), strict=True))


def ends(patterns: Patterns, traffic: Traffic) -> np.ndarray:
    """When each communication ends, us [n], all sharing the links. Starts stay as they are given."""
    end = traffic.alone_us.copy()
    begin = traffic.start_us + traffic.still_us
    contended = np.flatnonzero(~_unhindered(patterns, traffic, begin, end))
    order = contended[np.argsort(begin[contended], kind="stable")]
    starts, kinds = [*begin[order].tolist(), np.inf], traffic.pattern[order].tolist()
    left = traffic.moving_us[order].tolist()
    found = [0.0] * len(order)
    running: list[int] = []
    now, at, count = 0.0, 0, len(order)
    while at < count or running:
        speeds = patterns.speeds(tuple(sorted(kinds[each] for each in running))) if running else {}
        until = starts[at]
        for each in running:
            until = min(until, now + left[each] / speeds[kinds[each]])
        still = []
        for each in running:
            left[each] -= (until - now) * speeds[kinds[each]]
            if left[each] <= 1e-9 * max(until, 1.0):
                found[each] = until
            else:
                still.append(each)
        running, now = still, until
        while starts[at] <= now and at < count:
            running.append(at)
            at += 1
    end[order] = found
    return end


def _unhindered(patterns: Patterns, traffic: Traffic, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Communications whose pattern shares no link with another and never runs twice at once [n]."""
    order = np.lexsort((begin, traffic.pattern))
    pattern = traffic.pattern[order]
    same = pattern[1:] == pattern[:-1]
    late = np.maximum.accumulate(end[order] + pattern * (end.max(initial=0.0) + 1.0))  # never across patterns
    over = same & (late[:-1] > (begin[order] + pattern * (end.max(initial=0.0) + 1.0))[1:] * (1 + 1e-12))
    twice = np.zeros(len(patterns.usages), dtype=bool)
    twice[pattern[1:][over]] = True
    free: np.ndarray = patterns.alone[traffic.pattern] & ~twice[traffic.pattern]
    return free


class Shared(NamedTuple):
    """What links saw of a timeline of ``total_us``: patterns, traffic, bytes of each op [n], and when each ended [n].

    ``rounds`` of placing were needed, of which the last changed the timeline by ``residual`` (relative). With links of
    its own for every communication it would have lasted ``apart_us``.
    """

    patterns: Patterns
    traffic: Traffic
    size_bytes: np.ndarray
    end_us: np.ndarray
    total_us: float
    apart_us: float
    rounds: int = 1
    residual: float = 0.0

    def load(self) -> np.ndarray:
        """Share of each link's capacity in use over the whole time [links]."""
        return self.over_time(np.arange(len(self.patterns.bandwidth_gbps)), 1)[0]

    def over_time(self, links: np.ndarray, bins: int) -> np.ndarray:
        """Share of the capacity of some links in use, over equal spans of the whole time [bins, len(links)]."""
        width = max(self.total_us, 1e-12) / bins
        capacity = self.patterns.bandwidth_gbps[links] * 1e3 * width
        moved = self._moved(width, bins)
        found = np.zeros((bins, len(links)))
        for each, by_bin in zip(self.patterns.usages, moved, strict=True):
            found += by_bin[:, None] * each.load[links]
        return found / capacity

    def _moved(self, width: float, bins: int) -> np.ndarray:
        """Bytes of each pattern's ops by span of time, evenly from the first moving byte to the last."""
        begin = np.minimum(self.traffic.start_us + self.traffic.still_us, self.end_us)
        rate = self.size_bytes / np.maximum(self.end_us - begin, 1e-9)
        moved = np.zeros((len(self.patterns.usages), bins))
        for at in range(bins):
            inside = np.clip(np.minimum(self.end_us, (at + 1) * width) - np.maximum(begin, at * width), 0.0, None)
            moved[:, at] = np.bincount(self.traffic.pattern, inside * rate, len(self.patterns.usages))
        return moved
