"""Products of many rows whose weights are unpacked first: no faster than in 16 bits where arithmetic binds.

Weights of few bits are multiplied in 16. So a product gains what it reads less, and nothing where its units are busy.
TensorRT-LLM's table of A100 has both: at 2,048 rows and more, weights of 4 bits take 1.02 times as long, those of 8
bits 1.00. No other table has weights of few bits, and corrections learned on 16 bits promise a gain of a fifth there.

Kernels that unpack may reach the units by an older instruction than the library's
(:class:`..question.kernels.Unpacking`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...datasets.devices import Device
from ...datasets.dtypes import WEIGHT_BITS
from ...datasets.vocabulary import OpColumns
from ...models import analytical
from ...models.choice import SIXTEEN_BITS_RATE
from ..question.kernels import Unpacking
from .answers import Answers, Columns, Engine, in_turn
from .mat_vec import MAT_VEC_ROWS, SIXTEEN_BITS, is_told, reads_weights

SLOWEST = 1.7  # upwards: times the law, as long as Marlin's experts take whose tiles are full (aiconfigurator's tables:
# 299 TFLOP/s on B200, 279 on H100, 160 on A100, 170 to 218 on L40S; 16-bit products there 1600, 780, 265 and 230)


@dataclass(frozen=True)
class UnpackedEngine:
    """Raises what ``others`` answer for products of unpacked weights to the law above; declines others.

    The 16-bit product's time, times the roofline of one over that of the other. ``unpackings`` are the stack's.
    """

    device: Device
    others: Sequence[Engine]
    unpackings: Sequence[Unpacking] = ()
    name: str = "learned"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        if kind != "gemm" or dtype not in WEIGHT_BITS or not reads_weights(dtype):
            return answers
        many = np.flatnonzero(columns["m"] > MAT_VEC_ROWS)
        if not len(many):
            return answers
        columns = {name: values[many] for name, values in columns.items()}
        packed = in_turn(self.others, kind, columns, dtype, out_dtype, cache)
        in_sixteen = in_turn(self.others, kind, columns, SIXTEEN_BITS[0], out_dtype, cache)
        answers.put(many, packed)
        share = self.share
        least, likely = (self._gain(columns, dtype, out_dtype, cache, rate) for rate in (max(share, 1.0), share))
        with np.errstate(invalid="ignore"):
            at = np.flatnonzero(is_told(packed) & (packed.latency_us < likely * in_sixteen.latency_us))
        if len(at):
            raised = in_sixteen.take(at).by(SIXTEEN_BITS_RATE, "")
            raised.low_us[:] = raised.low_us * least[at]
            raised.high_us[:] = np.fmax(raised.high_us * likely[at] * SLOWEST, packed.high_us[at])
            raised.latency_us[:] = raised.latency_us * likely[at]
            raised.in_envelope[:] = False
            answers.put(many[at], raised)
        return answers

    @property
    def share(self) -> float:
        """The share of the 16-bit rate that the stack's kernels reach on the device."""
        fits = (kernel.share for kernel in self.unpackings if self.device.sm and kernel.sm in (0, self.device.sm))
        return next(fits, 1.0)

    def _gain(self, columns: Columns, dtype: str, out_dtype: str, cache: str, share: float) -> np.ndarray:
        """The roofline [n] with units at a share of their rate, over that of the 16-bit product."""
        slowed = replace(
            self.device, tensor_tflops={name: rate * share for name, rate in self.device.tensor_tflops.items()}
        )
        packed_us = analytical.roofline_us(OpColumns("gemm", columns, dtype, out_dtype, cache), slowed)
        return packed_us / analytical.roofline_us(
            OpColumns("gemm", columns, SIXTEEN_BITS[0], out_dtype, cache), self.device
        )
