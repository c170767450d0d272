"""In which order a campaign measures: first something of every kernel, then what makes common steps surer by most.

The error of a table falls about as the root of its rows, so that the n-th row of a kernel is worth n^(-3/2) times what
is not known of a step by it: the share of its time, times how far answers may be off (:data:`GAIN`). Cases come in
falling order of that. A kernel of which more shapes are drawn needs more rows for the same error: n counts over the
root of their number.

The first few rows of a kernel lie far apart, and far from those of the other kernels of its kind, with which they are
learned (``models/together.py``): drawn at random, eight rows of latent attention may all have so many heads that
products bound them, and say nothing of a step whose caches do.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Protocol, TypeVar

import numpy as np

from ..datasets.vocabulary import Op


class Measurable(Protocol):
    """An op on a backend."""

    @property
    def op(self) -> Op: ...

    @property
    def backend(self) -> str: ...


Case = TypeVar("Case", bound=Measurable)

# Cases of each kind and backend that come before all others: enough to learn from, however early the end.
FIRST_OF_KIND = 8
ROUNDS = 8  # batches that the other cases of each kind are cut into at the least
# Share of a step's time times the half-width in ln of its interval before anything is measured, by kind: the mean of
# the steps of three worlds (`python tests/benchmarks/worlds.py --gain`). Attention is set higher, for longer contexts
# than these; grouped products, exchanges of experts and layers of other models, which they lack, to what seems alike.
GAIN = {
    "gemm": 0.25,
    "fused_moe": 0.16,
    "grouped_gemm": 0.03,
    **dict.fromkeys(("attention_prefill", "attention_decode", "attention_backward", "mla_decode", "mla_prefill"), 0.03),
    "all_reduce": 0.037,
    "all_gather": 0.021,
    "reduce_scatter": 0.019,
    "all_to_all": 0.02,
    "send_recv": 0.005,
    "ep_dispatch": 0.02,
    "ep_combine": 0.02,
    "linear_attention_prefill": 0.01,
    "linear_attention_decode": 0.01,
    "elementwise": 0.034,
    "quantize": 0.01,
    "copy": 0.009,
    "rms_norm": 0.0055,
    "moe_route": 0.0045,
    "silu_mul": 0.003,
    "silu_mul_backward": 0.003,
    "rope": 0.003,
    "rms_norm_backward": 0.0024,
    "adamw": 0.0023,
}
LEAST_GAIN = 1e-3  # of any other kind


def in_order(cases: Sequence[Case], seed: int, batch_size: int) -> list[Case]:
    """Sorted cases, shuffled within each kernel: the first few of all, then batches of one kind by what they are worth.

    The order depends on the seed and the set of cases alone.
    """
    batches: list[tuple[float, str, list[Case]]] = []
    for kind, group in itertools.groupby(cases, key=lambda case: case.op.kind):
        random = Random(f"{seed} {kind}")
        shuffled = list(group)
        random.shuffle(shuffled)
        totals = Counter(map(_kernel, shuffled))
        worth = GAIN.get(kind, LEAST_GAIN) ** (2 / 3)
        first_places = _far_apart(shuffled)
        first = [shuffled[place] for place in first_places]
        of_kernel, taken = Counter(map(_kernel, first)), set(first_places)
        others: list[tuple[float, Case]] = []
        for place, case in enumerate(shuffled):
            if place not in taken:
                kernel = _kernel(case)
                of_kernel[kernel] += 1
                others.append((of_kernel[kernel] / totals[kernel] ** 0.5 / worth, case))
        others.sort(key=lambda item: item[0])
        batches.append((random.random() - 1, kind, first))
        count = max(-(-len(others) // batch_size), min(ROUNDS, len(others)))
        for i in range(count):
            batch = others[i * len(others) // count : (i + 1) * len(others) // count]
            batches.append((batch[len(batch) // 2][0], kind, [case for _, case in batch]))
    return [case for _, _, batch in sorted(batches, key=lambda item: item[:2]) for case in batch]


def _far_apart(cases: Sequence[Measurable]) -> list[int]:
    """Places of the first cases of each backend, one of each in turn: the first at all, then each where the distances
    to the nearest of its own and of all that were taken are largest together (as Gonzalez, 1985)."""
    points = _points(cases)
    nearest, backends = np.full(len(cases), np.inf), dict.fromkeys(case.backend for case in cases)
    own = {name: np.array([place for place, case in enumerate(cases) if case.backend == name]) for name in backends}
    nearest_own, taken = np.full(len(cases), np.inf), list[int]()
    for _ in range(FIRST_OF_KIND):
        for places in own.values():
            left = places[~np.isin(places, taken)]
            if len(left):
                worth = np.nan_to_num(nearest[left], posinf=0.0) + np.nan_to_num(nearest_own[left], posinf=0.0)
                pick = int(left[np.argmax(worth)])
                away = np.sqrt(((points - points[pick]) ** 2).sum(axis=1))
                nearest = np.minimum(nearest, away)
                nearest_own[places] = np.minimum(nearest_own[places], away[places])
                taken.append(pick)
    return taken


def _points(cases: Sequence[Measurable]) -> np.ndarray:
    """Cases of one kind in space [n, d]: octaves of their dims, and formats, each over its spread."""
    formats = np.array([case.op.dtype for case in cases])
    octaves = np.log2(np.maximum(np.array([case.op.dims for case in cases], dtype=np.float64), 0.5))
    points = np.concatenate([octaves, formats[:, None] == np.unique(formats)], axis=1)
    spread = points.std(axis=0)
    return np.asarray(points[:, spread > 0] / spread[spread > 0])


def _kernel(case: Measurable) -> tuple[str, str]:
    """What answers for itself within a kind: a backend and a format, those of 16 bits being alike."""
    return case.backend, "bf16" if case.op.dtype == "fp16" else case.op.dtype
