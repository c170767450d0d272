"""What a decode step streams, weights and caches: no table is faster than the memory they lie in.

TensorRT-LLM's table of A100 reads caches in 16 bits at 3.4 TB/s, where the memory has 2.0: they were kept in 8. And
rows of MI300X were timed with weights in its cache of 256 MiB. Such an answer is raised to what memory sustains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...datasets.devices import Device
from ...datasets.dtypes import weight_itemsize
from ...datasets.vocabulary import OpColumns
from ...models import analytical
from ...models.choice import BEYOND_MEMORY
from .answers import Answers, Columns, Engine, in_turn
from .mat_vec import is_told

CACHES = ("attention_decode", "mla_decode")  # kinds that read each byte of a cache once
SUSTAINED = 0.95  # of a data sheet's bandwidth: the best that tables of products reach (RTX PRO 6000, L40S)
SUSTAINED_BY = {  # architectures that are further from it, which vendors admit
    "cdna3": 0.81  # BabelStream on MI300X: 4.3 of 5.3 TB/s; AMD accepts a node from 4.18 (copy) and 3.66 (dot) on
}
WIDER = 1.3  # upwards, of what is raised: kernels reach less than streams do. A judgement


@dataclass(frozen=True)
class StreamEngine:
    """Raises what ``others`` answer to what the memory of ``device`` sustains; declines what streams nothing.

    Products stream their weights where these are cold, decode attention its cache as far as none keeps it.
    """

    device: Device
    others: Sequence[Engine]
    name: str = "learned"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        if kind not in CACHES and not (kind == "gemm" and cache == "cold"):
            return answers
        answers.put(slice(None), in_turn(self.others, kind, columns, dtype, out_dtype, cache))
        at_peak_us = self.peak_us(kind, columns, dtype, out_dtype)
        least_us = at_peak_us / SUSTAINED_BY.get(self.device.architecture, SUSTAINED)
        with np.errstate(invalid="ignore"):
            at = np.flatnonzero(is_told(answers) & (answers.latency_us < least_us))
        if len(at):
            floor = answers.take(at).by(BEYOND_MEMORY, "")
            floor.latency_us[:], floor.low_us[:] = least_us[at], np.fmax(floor.low_us, at_peak_us[at])
            floor.high_us[:] = np.fmax(floor.high_us, least_us[at] * WIDER)
            answers.put(at, floor)
        return answers

    def peak_us(self, kind: str, columns: Columns, dtype: str, out_dtype: str) -> np.ndarray:
        """What the stream takes at the data sheet's bandwidth."""
        if kind == "gemm":
            weights = 1.0 * columns["batch"] * columns["n"] * columns["k"] * weight_itemsize(dtype)
            return np.asarray(weights / (self.device.memory_gbps * 1e3))
        return analytical.roofline_us(OpColumns(kind, columns, dtype, out_dtype, "warm"), self.device)
