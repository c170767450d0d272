"""When requests come and how long they are: drawn as traffic says, the same whatever the size of the chunks."""

from __future__ import annotations

import numpy as np

from ..question.traffic import Lengths, RequestTraffic
from .streams import SECOND_US

NEWTON = 12  # steps: with a swing of 0.99 ten leave 1e-13 of a turn


def generators(seed: int) -> list[np.random.Generator]:
    """Random numbers for each column."""
    return [np.random.Generator(np.random.PCG64(child_seed)) for child_seed in np.random.SeedSequence(seed).spawn(4)]


class ArrivalClock:
    """Times of arrival in microseconds, ascending from 0 on."""

    def __init__(self, traffic: RequestTraffic, random: np.random.Generator) -> None:
        self.traffic, self.random = traffic, random
        self.sum, self.done = 0.0, 0

    def take(self, count: int) -> np.ndarray:
        """The next so many times."""
        kind, rate = self.traffic.arrival, self.traffic.rate
        places = self.done + np.arange(1, count + 1)
        self.done += count
        if kind == "closed":
            return np.zeros(count)
        if kind == "constant":
            return (places - 1) * (SECOND_US / rate)
        if kind == "bursty":
            return self._bursts(places)
        if kind == "gamma":
            shape = self.traffic.cv**-2.0
            sums = self._sums(self.random.gamma(shape, 1 / shape, count))
        else:
            sums = self._sums(self.random.exponential(1.0, count))
        if kind == "daily":
            return daily(sums / rate, self.traffic.swing, self.traffic.day_s) * SECOND_US
        if kind != "ramp":
            return sums * (SECOND_US / rate)
        slope = (self.traffic.rate_end**2 - rate**2) / (2 * self.traffic.requests)
        root = np.sqrt(np.maximum(rate**2 + 2 * slope * sums, min(rate, self.traffic.rate_end) ** 2))
        return 2 * sums / (rate + root) * SECOND_US

    def _sums(self, gaps: np.ndarray) -> np.ndarray:
        gaps[0] += self.sum
        sums = np.cumsum(gaps)
        self.sum = float(sums[-1])
        return sums

    def _bursts(self, places: np.ndarray) -> np.ndarray:
        """Bursts by chance, ``burst`` requests in each."""
        burst = (places - 1) // self.traffic.burst
        first = burst[0] * self.traffic.burst == places[0] - 1
        bursts = int(burst[-1] - burst[0]) + int(first)
        before = self.sum
        sums = self._sums(self.random.exponential(1.0, bursts)) if bursts else np.zeros(0)
        sums = sums if first else np.concatenate([[before], sums])
        return sums[burst - burst[0]] * (SECOND_US * self.traffic.burst / self.traffic.rate)


def daily(mean_s: np.ndarray, swing: float, day_s: float) -> np.ndarray:
    """When requests come that came at ``mean_s`` were their rate always its mean: it is 1 - swing x cos(2 pi t / day)
    times that. Its sum is Kepler's equation, solved by Newton's steps from half a day on, which always converge."""
    turns, rest = np.divmod(2 * np.pi * mean_s / day_s, 2 * np.pi)
    angle = np.full(len(rest), np.pi)
    for _ in range(NEWTON):
        angle -= (angle - swing * np.sin(angle) - rest) / (1.0 - swing * np.cos(angle))
    return (turns + angle / (2 * np.pi)) * day_s


def lengths(kind: Lengths, random: np.random.Generator, count: int) -> np.ndarray:
    """So many lengths in tokens, int64."""
    if kind.kind == "fixed":
        return np.full(count, round(kind.mean), np.int64)
    if kind.kind == "normal":
        return np.clip(np.rint(random.normal(kind.mean, kind.std, count)), kind.low, kind.high).astype(np.int64)
    if kind.kind == "lognormal":  # of a mean and a deviation of its own, before the cut
        variance = np.log1p((kind.std / kind.mean) ** 2)
        tokens = random.lognormal(np.log(kind.mean) - variance / 2, np.sqrt(variance), count)
        return np.clip(np.rint(tokens), kind.low, kind.high).astype(np.int64)
    share = random.random(count)
    if kind.kind == "uniform":
        return kind.low + (share * (kind.high - kind.low + 1)).astype(np.int64)
    if kind.kind == "empirical":
        return np.array(kind.values, np.int64)[(share * len(kind.values)).astype(np.int64)]
    weights = np.cumsum(np.arange(1, kind.high - kind.low + 2, dtype=float) ** -kind.exponent)
    return kind.low + np.searchsorted(weights, share * weights[-1], side="right").astype(np.int64)
