"""What users saw of requests that ended, as distributions: memory does not grow with them unless they are kept."""

from __future__ import annotations

import numpy as np

from ..question.serving import ServingTargets
from .histogram import Histogram
from .state import NONE

TIMES = ("ttft", "tpot", "e2e", "queue", "normalised", "kv_transfer", "prefill_e2e", "decode_e2e")
SCALE = 1e6  # a target met just so, in the bins of times


class Tally:
    """Times of requests that ended, as distributions; and their records where they are kept. ``host_us`` is what the
    host adds to a first token."""

    def __init__(self, host_us: float, targets: ServingTargets, keep: bool, warmup: int = 0) -> None:
        self.host_us, self.targets, self.keep, self.warmup = host_us, targets, keep, warmup
        self.times = {name: Histogram() for name in TIMES}
        self.needed = Histogram()  # how many times as long as the targets each may take that it has all of them
        self.good = 0
        self.rows: list[np.ndarray] = []

    def add(self, ended: np.ndarray) -> None:
        """Count requests that ended; those rejected and those of the warm-up have no times."""
        if self.keep:
            self.rows.append(ended.copy())
        done = ended[(ended["rank"] != NONE) & (ended["request"] >= self.warmup)]
        ttft = done["first_token_us"] - done["arrival_us"] + self.host_us
        decode = done["finish_us"] - done["first_token_us"]
        outputs = done["output_tokens"]
        several = outputs > 1
        tpot = np.zeros(len(done))
        np.divide(decode, outputs - 1, out=tpot, where=several)
        self.times["ttft"].add(ttft)
        self.times["tpot"].add(tpot[several])
        self.times["e2e"].add(ttft + decode)
        self.times["queue"].add(done["admitted_us"] - done["arrival_us"])
        self.times["normalised"].add((ttft + decode) / outputs)
        moved = done["moved_us"] > 0
        prefill = done["prefilled_us"] - done["arrival_us"] + self.host_us
        self.times["kv_transfer"].add(done["moved_us"][moved])
        self.times["prefill_e2e"].add(prefill[moved])
        self.times["decode_e2e"].add((done["finish_us"] - done["prefilled_us"] - done["moved_us"])[moved])
        needed = self._needed(ttft, tpot, ttft + decode)
        self.good += int(np.count_nonzero(needed <= 1.0))
        self.needed.add(needed * SCALE)

    def _needed(self, ttft: np.ndarray, tpot: np.ndarray, e2e: np.ndarray) -> np.ndarray:
        """Times over their targets, the largest of each request."""
        needed, targets = np.zeros(len(ttft)), self.targets
        for times_us, most_ms in ((ttft, targets.ttft_ms), (tpot, targets.tpot_ms), (e2e, targets.e2e_ms)):
            if most_ms is not None:
                needed = np.maximum(needed, times_us / max(1e3 * most_ms, 1e-9))
        return needed
