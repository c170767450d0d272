"""The highest load at which a way to serve gives users what they expect, by bisection over many ways at a time.

Requests come by chance. What a share of them (``slo.share``) has at most is what a queue before prompts makes of it
(:mod:`.waiting`), and sequences beside it: where ``n`` run on average, ``n + z √n`` do at most in such a share of the
time, as Poisson's numbers have it. Those that are more than a rank may run at a time wait until others have ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from ...question.request_classes import ServingTargets
from .waiting import waiting

HALVINGS = 14
LOADS = 32  # loads of a replica whose iterations are looked up; between them its times are linear
SURELY = 0.999  # share of the requests of which nobody asks for more


@dataclass(frozen=True)
class LoadCurve:
    """What a rank does where ``n`` sequences run on it [n, ascending]: microseconds of an output token and of a first
    token that waits for nobody, in which a prompt keeps the rank busy; requests a microsecond in steady state."""

    n: np.ndarray
    tpot_us: np.ndarray
    first_us: np.ndarray
    prompt_us: np.ndarray
    rate: np.ndarray

    def at(self, name: str, n: Any) -> np.ndarray:
        """A figure where so many run."""
        return np.asarray(np.interp(n, self.n, getattr(self, name)))

    def running(self, rate: Any) -> np.ndarray:
        """How many run at a rate of requests."""
        return np.asarray(np.interp(rate, self.rate, self.n))


def loads_up_to(batches: Sequence[int]) -> list[int]:
    """Numbers of sequences to look at: those asked for, and others between them."""
    most = max(batches)
    between = np.unique(np.geomspace(1, most, min(LOADS, most)).round().astype(int)).tolist()
    return sorted({*between, *batches})


def curve(n: Sequence[int], rows: Sequence[tuple[float, float, float]], output_len: int, decodes: bool) -> LoadCurve:
    """The curve of (TPOT, first token, prompt) in microseconds at each load; of a rank that ``decodes`` only, or does
    both."""
    tpot, first, prompt = np.array([rows[0], *rows], dtype=float).T  # with nobody there: as long, and none a second
    tpot, loads = np.maximum.accumulate(tpot), np.array([0.0, *n])
    stay = tpot * (output_len - 1) + (0.0 if decodes else first)
    return LoadCurve(loads, tpot, first, prompt, np.maximum.accumulate(loads / stay))


def beyond(slo: ServingTargets) -> float:
    """Standard deviations above the mean up to which the share of requests that must have all lies."""
    return NormalDist().inv_cdf(min(slo.share, SURELY))


@dataclass(frozen=True)
class Expected:
    """What users expect of an answer of so many tokens."""

    slo: ServingTargets
    output_len: int

    def met(self, ttft_us: np.ndarray, tpot_us: np.ndarray) -> np.ndarray:
        """Whether times are as expected [places]."""
        slo, e2e_us = self.slo, ttft_us + tpot_us * (self.output_len - 1)
        pairs = ((ttft_us, slo.ttft_ms), (tpot_us, slo.tpot_ms), (e2e_us, slo.e2e_ms))
        most = [us <= 1e3 * ms for us, ms in pairs if ms is not None]
        return np.logical_and.reduce(most) if most else np.isfinite(ttft_us)

    @property
    def waits(self) -> bool:
        """Whether it bounds how long a request may wait."""
        return self.slo.ttft_ms is not None or self.slo.e2e_ms is not None


def highest(most: np.ndarray, meets: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The largest loads up to ``most`` that meet what is asked; 0 where none does [places]."""
    low, high = np.zeros_like(most), most.astype(float)
    low = np.where(meets(high), high, low)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        good = meets(middle)
        low, high = np.where(good, middle, low), np.where(good, high, middle)
    return low


def crowd(curve: LoadCurve, n: np.ndarray, ranks: np.ndarray, batch: np.ndarray, z: float) -> tuple[Any, Any]:
    """(sequences beside a request at most, microseconds that it waits for a place) where ``n`` run on average on each
    of so many ranks, ``batch`` at most at a time."""
    most = n + z * np.sqrt(n / ranks)
    wait_us = np.maximum(most - batch, 0.0) / curve.at("rate", batch)
    return np.minimum(most, batch), wait_us


def together_load(curve: LoadCurve, ranks: np.ndarray, batch: np.ndarray, expected: Expected) -> np.ndarray:
    """How many sequences run on each rank of replicas that do both, on average, at the highest load [places]."""
    z = beyond(expected.slo)

    def meets(n: np.ndarray) -> np.ndarray:
        beside, place_us = crowd(curve, n, ranks, batch, z)
        prompt_us = curve.at("prompt_us", n)
        _, wait = waiting(ranks, curve.at("rate", n) * prompt_us, expected.slo.share)
        return expected.met(curve.at("first_us", beside) + wait * prompt_us + place_us, curve.at("tpot_us", beside))

    return highest(batch, meets)


@dataclass(frozen=True)
class PoolsApart:
    """Pools of replicas that prefill and that decode, many pairs of them [places]: ranks of both, what a rank that
    decodes does, how many sequences it may run; of a prompt the microseconds alone, of its share of a whole iteration,
    and of the way of its cache; the tokens of an answer; ``host_us`` is what the host adds at a rate with a stay."""

    first: np.ndarray
    second: np.ndarray
    decode: LoadCurve
    batch: np.ndarray
    alone_us: float
    service_us: float
    iteration_us: float
    moved_us: float
    outputs: int
    host_us: Callable[[np.ndarray, np.ndarray], np.ndarray]

    @property
    def most(self) -> tuple[np.ndarray, np.ndarray]:
        """Requests a microsecond that the pools prefill, and decode, at most."""
        return self.first / self.service_us, self.second * self.decode.at("rate", self.batch)

    def times(self, rate: np.ndarray, share: float, z: float) -> tuple[np.ndarray, ...]:
        """(mean, and at most in a share of the requests) microseconds of the queue before prompts, then of first tokens
        and of output tokens at most, and what a prompt takes."""
        busy = np.minimum(rate * self.service_us / self.first, 1.0)
        mean, most = (wait * self.service_us for wait in waiting(self.first, busy, share))
        n = self.decode.running(rate / self.second)
        beside, place_us = crowd(self.decode, n, self.second, self.batch, z)
        prompt_us = self.alone_us + np.minimum(mean, self.iteration_us - self.alone_us)  # those that waited, too
        tpot_us = self.decode.at("tpot_us", beside)
        before_us = most + prompt_us + self.moved_us + place_us
        return mean, before_us + self.host_us(rate, before_us + tpot_us * self.outputs), tpot_us, prompt_us


def apart_load(pools: PoolsApart, expected: Expected, busiest: float) -> np.ndarray:
    """The highest requests a microsecond of pools apart, 0 where none keep what is expected [places]."""
    prefills, decodes = pools.most
    most = np.minimum((1.0 if expected.waits else busiest) * prefills, decodes)
    z = beyond(expected.slo)

    def meets(rate: np.ndarray) -> np.ndarray:
        _, ttft_us, tpot_us, _ = pools.times(rate, expected.slo.share, z)
        return expected.met(ttft_us, tpot_us)

    return highest(most, meets)


def common(first: int, second: int) -> int:
    """Into how many alike parts pools can be cut."""
    return math.gcd(first, second) if first else second
