"""What users saw of requests that ended, as distributions: memory does not grow with them unless they are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..question.request_classes import TARGETS, RequestClass, ServingTargets
from .histogram import Histogram
from .state import NONE

TIMES = ("ttft", "tpot", "e2e", "queue", "normalised", "kv_transfer", "prefill_e2e", "decode_e2e")
OF_ADAPTER = ("requests", "output_tokens", "ttft_us")
SCALE = 1e6  # a target met just so, in the bins of times


class Tally:
    """Times of requests that ended, as distributions; and their records where they are kept. ``host_us`` is what the
    host adds to a first token. Each of the ``classes`` has a tally of its own (``parts``), and its own targets.

    ``by_adapter`` [:data:`OF_ADAPTER`, adapters] are sums over the requests of each."""

    def __init__(
        self,
        host_us: float,
        targets: ServingTargets,
        keep: bool,
        warmup: int = 0,
        classes: Sequence[RequestClass] = (),
        adapters: int = 0,
    ) -> None:
        self.host_us, self.keep, self.warmup = host_us, keep, warmup
        self.limits_us = {name: limits_us(name, targets, classes) for name in TARGETS}
        self.parts = [Tally(host_us, targets_of(kind, targets), False, warmup) for kind in classes]
        self.ended, self.output_tokens = 0, 0
        self.kinds: list[Tally] = []  # of two kinds of replicas,
        self.first_other = 0  # the second of which begins with this rank
        self.by_adapter = np.zeros((len(OF_ADAPTER), adapters))
        self.times = {name: Histogram() for name in TIMES}
        self.needed = Histogram()  # how many times as long as the targets each may take that it has all of them
        self.good = 0
        self.rows: list[np.ndarray] = []

    def add(self, ended: np.ndarray) -> None:
        """Count requests that ended; those rejected and those of the warm-up have no times."""
        if self.keep:
            self.rows.append(ended.copy())
        for second, part in enumerate(self.kinds):
            part.add(ended[((ended["rank"] >= self.first_other) == second) & (ended["rank"] != NONE)])
        counted = ended["request"] >= self.warmup
        self.ended += int(np.count_nonzero(counted))
        done = ended[(ended["rank"] != NONE) & counted]
        ttft = done["first_token_us"] - done["arrival_us"] + self.host_us
        decode = done["finish_us"] - done["first_token_us"]
        times = {"ttft": ttft, "e2e": ttft + decode, "queue": done["admitted_us"] - done["arrival_us"]}
        outputs = done["output_tokens"]
        self.output_tokens += int(outputs.sum())
        several = outputs > 1
        tpot = np.zeros(len(done))
        np.divide(decode, outputs - 1, out=tpot, where=several)
        self.times["normalised"].add(times["e2e"] / outputs)
        moved = done["moved_us"] > 0
        if moved.any():
            on_way = done[moved]
            self.times["kv_transfer"].add(on_way["moved_us"])
            self.times["prefill_e2e"].add(on_way["prefilled_us"] - on_way["arrival_us"] + self.host_us)
            self.times["decode_e2e"].add(on_way["finish_us"] - on_way["prefilled_us"] - on_way["moved_us"])
        if self.by_adapter.size:
            self._add_adapters(done, ttft)
        self._count(times, tpot, several, done["kind"] if self.parts else np.zeros(len(done), np.int64))
        for kind, part in enumerate(self.parts):
            mine, counts = done["kind"] == kind, counted & (ended["kind"] == kind)
            part.ended += int(np.count_nonzero(counts))
            times_of_class = {name: taken_us[mine] for name, taken_us in times.items()}
            part._count(times_of_class, tpot[mine], several[mine], np.zeros(int(np.count_nonzero(mine)), np.int64))

    def _count(self, times: Mapping[str, np.ndarray], tpot: np.ndarray, several: np.ndarray, kinds: np.ndarray) -> None:
        """Count the times that users see, and whether they are within the targets of their kinds; TPOT where there are
        ``several`` tokens."""
        for name, taken_us in times.items():
            self.times[name].add(taken_us)
        self.times["tpot"].add(tpot[several])
        needed = self._needed((times["ttft"], tpot, times["e2e"]), kinds)
        self.good += int(np.count_nonzero(needed <= 1.0))
        self.needed.add(needed * SCALE)

    def _add_adapters(self, done: np.ndarray, ttft_us: np.ndarray) -> None:
        """Count what requests with adapters had: their number, tokens of answers, times to the first token."""
        with_one = done["adapter"] != NONE
        columns = np.ones(len(done)), done["output_tokens"], ttft_us
        for sums, column in zip(self.by_adapter, columns, strict=True):
            sums += np.bincount(done["adapter"][with_one], column[with_one], len(sums))

    def _needed(self, times_us: tuple[np.ndarray, ...], kinds: np.ndarray) -> np.ndarray:
        """Times over their targets, the largest of each request."""
        needed = np.zeros(len(kinds))
        for taken_us, name in zip(times_us, TARGETS, strict=True):
            if np.isfinite(self.limits_us[name]).any():
                needed = np.maximum(needed, taken_us / self.limits_us[name][kinds])
        return needed


def targets_of(kind: RequestClass, targets: ServingTargets) -> ServingTargets:
    """What a class expects: its own targets, and those of all where it has none."""
    limits = {name: getattr(kind, name) for name in TARGETS if getattr(kind, name) is not None}
    return replace(targets, **limits)


def limits_us(name: str, targets: ServingTargets, classes: Sequence[RequestClass]) -> np.ndarray:
    """A target in microseconds, class by class; infinity where there is none."""
    limits_ms = [getattr(targets_of(kind, targets), name) for kind in classes] or [getattr(targets, name)]
    return np.array([np.inf if most is None else max(1e3 * most, 1e-9) for most in limits_ms])
