"""Products with few rows: they wait for their weights, so that bytes over bandwidth is their law.

An engine with kernels of its own for them says in ``conf/stack`` what share of the bandwidth these reach. And a table
that times weights of few bits loses to that law where it contradicts it: a call of a plug-in or of a TensorRT engine
was timed with what it takes to launch it, 10 to 25 us at any size, and in a captured step nobody waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...datasets.devices import Device
from ...datasets.dtypes import WEIGHT_BITS, weight_itemsize
from ...models.analytical.matmul import RAMP_CLOCKS
from ...models.choice import BEYOND, FEWER_BYTES, MAT_VEC, OWN
from ..question.kernels import MatVec
from .answers import Answers, Columns, Engine, in_turn

MAT_VEC_ROWS = (
    16  # up to which kernels for few bits wait for weights (Marlin, arXiv 2408.11743, figure 1: up to 16 to 32)
)
CONTRADICTION = 1.5  # times as long as 16-bit weights of as many bytes: unpacking takes less. A judgement
WHOLE_BITS = 16
SIXTEEN_BITS = ("fp16", "bf16")
STACK_FILE = "conf/stack"  # who says so: the file of the stack has the source of each kernel
SPREAD = 1.25  # half of what mat-vec kernels of one engine and format are apart in, by shape and chip. A judgement


@dataclass(frozen=True)
class MatVecEngine:
    """Answers products with few rows by the kernels of a stack (:class:`..question.kernels.MatVec`); declines others.

    A kernel's shortest time, its ramp, and its weights over the bandwidth that it reaches.
    """

    device: Device
    kernels: Sequence[MatVec]
    name: str = "mat_vec"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        kernel = self.kernel(weight_itemsize(dtype) * 8) if kind == "gemm" and reads_weights(dtype) else None
        if kernel is None:
            return answers
        at = np.flatnonzero(columns["m"] <= kernel.most_rows)
        weights = columns["batch"][at] * columns["n"][at] * columns["k"][at] * weight_itemsize(dtype)
        rate = kernel.share * self.device.memory_gbps * 1e3
        fixed_us = kernel.launches * self.device.launch_us
        ramp_us = 0.0 if self.device.synchronous else RAMP_CLOCKS / self.device.clock_mhz
        answers.latency_us[at] = fixed_us + ramp_us + weights / rate
        answers.low_us[at], answers.high_us[at] = answers.latency_us[at] / SPREAD, answers.latency_us[at] * SPREAD
        answers.engine[at], answers.clause[at], answers.source[at] = self.name, MAT_VEC, STACK_FILE
        answers.predictor[at] = f"{kernel.share:.0%} of the bandwidth for weights of {kernel.bits:g} bits"
        answers.in_envelope[at] = True
        return answers

    def kernel(self, bits: float) -> MatVec | None:
        """The kernel for weights of so many bits: of this vendor's before any's, of those the nearest in bits.

        None where the stack names none for weights that are quantized, or for those that are not.
        """
        whole = bits >= WHOLE_BITS
        candidates = [
            kernel
            for kernel in self.kernels
            if kernel.vendor in ("", self.device.vendor) and (kernel.bits >= WHOLE_BITS) == whole
        ]
        return min(candidates, key=lambda kernel: (kernel.vendor == "", abs(kernel.bits - bits)), default=None)


@dataclass(frozen=True)
class FewBitsEngine:
    """Answers products with few rows whose weights alone have fewer bits, where who would answer contradicts bytes.

    That is where ``others`` take :data:`CONTRADICTION` times as long as for a 16-bit product of as many bytes of
    weights, of which the device knows more. Declines all else, and what was timed
    on this machine: they are asked then.
    """

    others: Sequence[Engine]
    name: str = "learned"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        if kind != "gemm" or dtype not in WEIGHT_BITS or not reads_weights(dtype):
            return answers
        at = np.flatnonzero(columns["m"] <= MAT_VEC_ROWS)
        if not len(at):
            return answers
        few_columns = {name: values[at] for name, values in columns.items()}
        share = weight_itemsize(dtype) / 2.0
        fewer_columns = {**few_columns, "n": np.maximum(np.ceil(few_columns["n"] * share), 1).astype(np.int64)}
        table_answers = in_turn(self.others, kind, few_columns, dtype, out_dtype, cache)
        bytes_alike = in_turn(self.others, kind, fewer_columns, SIXTEEN_BITS[0], out_dtype, cache)
        with np.errstate(invalid="ignore"):
            wrong = table_answers.latency_us > CONTRADICTION * bytes_alike.latency_us
        wrong &= (table_answers.engine != "measured") & ~np.isin(table_answers.clause.astype(str), (OWN, BEYOND))
        if wrong.any():
            bytes_alike.high_us[:] = np.fmin(
                bytes_alike.high_us * CONTRADICTION, np.fmax(table_answers.high_us, bytes_alike.high_us)
            )
            bytes_alike.by(FEWER_BYTES, "")
            answers.put(at[wrong], bytes_alike.take(np.flatnonzero(wrong)))
        return answers


def reads_weights(dtype: str) -> bool:
    """Whether products of a format compute in 16 bits, so that weights are most of what they read."""
    return dtype in SIXTEEN_BITS or dtype.endswith("a16")
