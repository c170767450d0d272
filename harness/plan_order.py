"""In which order a campaign measures: first something of every kernel, then what makes common steps surer by most.

The error of a table falls about as the root of its rows, so that the n-th row of a kernel is worth n^(-3/2) times what
is not known of a step by it: the share of its time, times how far answers may be off (:data:`GAIN`). Cases come in
falling order of that. A kernel of which more shapes are drawn needs more rows for the same error: n counts over the
root of their number.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Protocol, TypeVar

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
        of_backend, of_kernel = Counter[str](), Counter[tuple[str, str]]()
        first: list[Case] = []
        others: list[tuple[float, Case]] = []
        for case in shuffled:
            kernel = _kernel(case)
            of_backend[case.backend] += 1
            of_kernel[kernel] += 1
            if of_backend[case.backend] <= FIRST_OF_KIND:
                first.append(case)
            else:
                others.append((of_kernel[kernel] / totals[kernel] ** 0.5 / worth, case))
        others.sort(key=lambda item: item[0])
        batches.append((random.random() - 1, kind, first))
        count = max(-(-len(others) // batch_size), min(ROUNDS, len(others)))
        for i in range(count):
            batch = others[i * len(others) // count : (i + 1) * len(others) // count]
            batches.append((batch[len(batch) // 2][0], kind, [case for _, case in batch]))
    return [case for _, _, batch in sorted(batches, key=lambda item: item[:2]) for case in batch]


def _kernel(case: Measurable) -> tuple[str, str]:
    """What answers for itself within a kind: a backend and a format, those of 16 bits being alike."""
    return case.backend, "bf16" if case.op.dtype == "fp16" else case.op.dtype
