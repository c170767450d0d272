"""Products with few rows: they wait for their weights, so that bytes over bandwidth is their law.

An engine with kernels of its own for them says in ``conf/stack`` what share of the bandwidth these reach. And a table
that contradicts that law loses to it: a call of a plug-in or of a TensorRT engine was timed with what it takes to
launch it, 10 to 25 us at any size, and in a captured step nobody waits for that; one row went to another kernel than
two; a table of another chip has small products alone; one of fp32 lanes says nothing of 16 bits on matrix units, and
sums of tensors on the same device say what its memory sustains (T4 and P100 0.75, V100 0.9 of the data sheet's).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...datasets.devices import Device
from ...datasets.dtypes import BITS, WEIGHT_BITS, weight_itemsize
from ...datasets.vocabulary import OpColumns
from ...models import analytical
from ...models.analytical.matmul import RAMP_CLOCKS
from ...models.choice import (
    BEYOND,
    FEWER_BYTES,
    KIN,
    MAT_VEC,
    MORE_ROWS,
    OTHER_FORMAT,
    OWN,
    SIXTEEN_BITS_FASTER,
    SUM_OF_BYTES,
)
from ...models.donors import as_elements
from ..question.kernels import MatVec
from .answers import Answers, Columns, Engine, in_turn

MAT_VEC_ROWS = (
    16  # up to which kernels for few bits wait for weights (Marlin, arXiv 2408.11743, figure 1: up to 16 to 32)
)
CONTRADICTION = 1.5  # times as long as other weights of as many bytes: unpacking takes less. A judgement
SLOWER_THAN_MORE_ROWS = (
    1.3  # times as long as MAT_VEC_ROWS rows of the same product, or a sum of as many bytes, which have all that work.
    # A judgement
)
WHOLE_BITS = 16
SIXTEEN_BITS = ("fp16", "bf16")
EIGHT_BITS = ("fp8_block", "fp8")  # whose tables tell how fast a chip reads weights where that of 16 bits is another's
STACK_FILE = "conf/stack"  # who says so: the file of the stack has the source of each kernel
SPREAD = 1.25  # half of what mat-vec kernels of one engine and format are apart in, by shape and chip. A judgement
Ask = Callable[[Columns, str], Answers]


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
class FewRowsEngine:
    """Answers products of few rows, and experts of few bits, where who would answer contradicts bytes over bandwidth.

    ``others`` are asked for these and for what has as much to read, in ``eight_bits`` for one: formats of the device.
    A product of more rows than ``kernels`` of the stack take is no faster than one that they take, and none that
    another of as many bytes answers is faster than the matrix units of the ``device``, where they are cut.
    """

    others: Sequence[Engine]
    eight_bits: Sequence[str] = ()
    kernels: MatVecEngine | None = None
    device: Device | None = None
    name: str = "learned"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        def ask(asked_columns: Columns, asked_dtype: str) -> Answers:
            return in_turn(self.others, kind, asked_columns, asked_dtype, out_dtype, cache)

        def ask_sum(asked_columns: Columns, asked_dtype: str) -> Answers:
            product = OpColumns(kind, asked_columns, asked_dtype, out_dtype, cache)
            return in_turn(
                self.others, "elementwise", as_elements(product, asked_dtype), asked_dtype, asked_dtype, cache
            )

        if kind == "gemm":
            answers = few_row_products(columns, dtype, self.eight_bits, ask, ask_sum)
            if self.device is not None:
                raise_to_roofline(answers, OpColumns(kind, columns, dtype, out_dtype, cache), self.device)
            if self.kernels is not None:
                one_row = {**columns, "m": np.ones_like(columns["m"])}
                raise_to(answers, self.kernels.answer(kind, one_row, dtype, out_dtype, cache))
            return answers
        if kind == "fused_moe" and dtype not in SIXTEEN_BITS and dtype not in WEIGHT_BITS and BITS[dtype] < WHOLE_BITS:
            return experts_of_few_bits(columns, dtype, ask)
        return Answers.declined(len(next(iter(columns.values()))))


def few_row_products(
    columns: Columns, dtype: str, eight_bits: Sequence[str], ask: Ask, ask_sum: Ask | None = None
) -> Answers:
    """Products of up to :data:`MAT_VEC_ROWS` rows whose answer contradicts that of as many bytes, by that one.

    A product of more rows reads the same weights and more. Weights of few bits are 16-bit ones of a smaller product.
    And 16-bit weights are 8-bit ones of a larger product, of which the device has a table of its own. Where it has one
    of fp32 products alone, they are a sum of tensors (``ask_sum``), which waits for memory as they do.
    """
    answers = Answers.declined(len(columns["m"]))
    at = np.flatnonzero(columns["m"] <= MAT_VEC_ROWS)
    if not len(at) or BITS[dtype] > WHOLE_BITS:
        return answers
    few_columns = {name: values[at] for name, values in columns.items()}
    table_answers = ask(few_columns, dtype)
    answers.put(at, table_answers)
    suspects = is_told(table_answers)
    if not suspects.any():
        return answers
    alike: list[tuple[str, float, Answers]] = []
    fewer_rows = few_columns["m"] < MAT_VEC_ROWS
    if fewer_rows.any():
        full_columns = {**few_columns, "m": np.full_like(few_columns["m"], MAT_VEC_ROWS)}
        alike.append((MORE_ROWS, SLOWER_THAN_MORE_ROWS, ask(full_columns, dtype)))
    if dtype in WEIGHT_BITS and reads_weights(dtype):
        columns_alike = with_share(few_columns, "n", weight_itemsize(dtype) / 2.0)
        alike.append((FEWER_BYTES, CONTRADICTION, ask(columns_alike, SIXTEEN_BITS[0])))
    elif dtype in SIXTEEN_BITS and (table_answers.clause.astype(str) == KIN).any():
        of_eight = (ask(with_share(few_columns, "n", 2.0), name) for name in eight_bits)
        answered = filter(is_of_the_device, of_eight)
        alike += [(FEWER_BYTES, CONTRADICTION, other) for other in [next(answered, None)] if other is not None]
    elif dtype in SIXTEEN_BITS and ask_sum is not None and (table_answers.clause.astype(str) == OTHER_FORMAT).all():
        alike += [
            (SUM_OF_BYTES, SLOWER_THAN_MORE_ROWS, other)
            for other in [ask_sum(few_columns, dtype)]
            if is_of_the_device(other)
        ]
    for clause, most, other in alike:
        with np.errstate(invalid="ignore"):
            wrong = suspects & (table_answers.latency_us > most * other.latency_us)
        put_wrong(answers, at, wrong, other, table_answers, clause)
        suspects &= ~wrong
    return answers


def experts_of_few_bits(columns: Columns, dtype: str, ask: Ask) -> Answers:
    """Experts that compute in few bits and take longer than in 16, by 16-bit ones of as many bytes and as much time.

    They have half the bytes and twice the rate of 16 bits; a kernel that was not tuned takes two to five times as long.
    """
    answers = Answers.declined(len(columns["tokens"]))
    table_answers, in_sixteen = ask(columns, dtype), ask(columns, "bf16")
    answers.put(slice(None), table_answers)
    with np.errstate(invalid="ignore"):
        wrong = is_told(table_answers) & (table_answers.latency_us > CONTRADICTION * in_sixteen.latency_us)
    if wrong.any():
        bytes_alike = ask(with_share(columns, "inter", BITS[dtype] / WHOLE_BITS), "bf16")
        put_wrong(answers, np.arange(len(wrong)), wrong, bytes_alike, table_answers, SIXTEEN_BITS_FASTER)
    return answers


def raise_to(answers: Answers, least: Answers) -> None:
    """Put ``least`` where a table or physics answers less."""
    with np.errstate(invalid="ignore"):
        at = np.flatnonzero(is_told(answers) & (answers.latency_us < least.latency_us))
    if len(at):
        answers.put(at, least.take(at))


def raise_to_roofline(answers: Answers, ops: OpColumns, device: Device) -> None:
    """Raise what another product answers for one of as many bytes [n], which has fewer FLOPs, to the roofline."""
    at = np.flatnonzero(answers.clause.astype(str) == FEWER_BYTES)
    if len(at):
        slower = np.maximum(analytical.roofline_us(ops.take(at), device) / answers.latency_us[at], 1.0)
        for values in (answers.latency_us, answers.low_us, answers.high_us):
            values[at] *= slower


def put_wrong(
    answers: Answers, at: np.ndarray, wrong: np.ndarray, other: Answers, table_answers: Answers, clause: str
) -> None:
    """The answers of ``other`` where a table is wrong; their interval reaches towards what the table says."""
    if not wrong.any():
        return
    chosen = other.take(np.flatnonzero(wrong))
    chosen.high_us[:] = np.fmin(chosen.high_us * CONTRADICTION, np.fmax(table_answers.high_us[wrong], chosen.high_us))
    answers.put(at[wrong], chosen.by(clause, ""))


def is_told(answers: Answers) -> np.ndarray:
    """Where a table or physics answers, and no row or correction of this machine."""
    of_this_machine = np.isin(answers.clause.astype(str), (OWN, BEYOND))
    return (answers.engine != "measured") & ~of_this_machine & ~np.isnan(answers.latency_us)


def is_of_the_device(answers: Answers) -> bool:
    """Whether tables of the device itself, and not of others, answer all."""
    return bool((answers.clause.astype(str) != KIN).all() and is_told(answers).all())


def with_share(columns: Columns, dim: str, share: float) -> Columns:
    """The columns with one of a share of the size."""
    return {**columns, dim: np.maximum(np.ceil(columns[dim] * share), 1).astype(np.int64)}


def reads_weights(dtype: str) -> bool:
    """Whether products of a format compute in 16 bits, so that weights are most of what they read."""
    return dtype in SIXTEEN_BITS or dtype.endswith("a16")
