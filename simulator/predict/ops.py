"""How long does one op take, and what does it draw? The engines' answer beside the roofline that bounds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...datasets.devices import Device, DeviceError
from ...datasets.ops import KINDS, Op, iterate_groups
from ...datasets.vocabulary import OpColumns
from ...models import analytical, power
from ..engines import Engine, ask
from ..engines.coverage import COVERAGE, above_roofline
from ..report.answer import OpPrediction
from ..timing.cold_products import bound_asked_products

MEMO = 100_000  # predictions that an engine keeps


def check_supported(op: Op, device: Device) -> None:
    """DeviceError when the device has no units for the op's dtype."""
    if KINDS[op.kind].family in ("gemm", "attention") and not device.supports(op.dtype):
        raise DeviceError(f"{device.name} has no {op.dtype} matrix units; it has {', '.join(device.tensor_tflops)}")


def predict_ops(ops: Sequence[Op], device: Device, engine: Engine, cache: str = "warm") -> list[OpPrediction]:
    """One prediction per op, in order; an engine with a memo answers an op it was asked before from there.

    DeviceError when the device lacks an op's dtype.
    """
    memo: dict[tuple[Op, str], OpPrediction] = getattr(engine, "memo", {})
    if len(memo) > MEMO:
        memo.clear()
    by_op = {op: memo.get((op, cache)) for op in ops}
    unknown = [op for op, answer in by_op.items() if answer is None]
    for op, prediction in zip(unknown, _predicted(unknown, device, engine, cache), strict=True):
        by_op[op] = memo[op, cache] = prediction
    return [answer for op in ops if (answer := by_op[op]) is not None]


def _predicted(ops: Sequence[Op], device: Device, engine: Engine, cache: str) -> list[OpPrediction]:
    for op in ops:
        check_supported(op, device)
    answers = ask(engine, ops, cache)
    roofline, bound = np.empty(len(ops)), np.empty(len(ops), dtype=object)
    for kind, dtype, out_dtype, positions, columns in iterate_groups(list(ops)):
        group = OpColumns(kind, columns, dtype, out_dtype)
        if cache == "cold":
            answers.put(positions, bound_asked_products(engine, group, answers.take(positions), device))
        roofline[positions] = analytical.roofline_us(group, device)
        bound[positions] = analytical.bound(group, device)
    low = above_roofline(answers.latency_us, answers.low_us, roofline, answers.engine)
    return [
        OpPrediction(
            op=op.to_dict(),
            device=device.id,
            latency_us=float(answers.latency_us[i]),
            low_us=float(low[i]),
            high_us=float(answers.high_us[i]),
            coverage=COVERAGE,
            engine=str(answers.engine[i]),
            predictor=answers.predictor[i],
            in_envelope=bool(answers.in_envelope[i]),
            roofline_us=float(roofline[i]),
            bound=str(bound[i]),
            cache=cache,
            clause=str(answers.clause[i]),
            source=str(answers.source[i]),
        )
        for i, op in enumerate(ops)
    ]


def with_power(
    predictions: Sequence[OpPrediction],
    ops: Sequence[Op],
    device: Device,
    registries: Sequence[Path] = (),
    limits: power.Limits | None = None,
    backend: str | None = None,
) -> list[OpPrediction]:
    """The same with watts and energy, and slower where ``limits`` bind.

    A device without a power model is answered by physics, outside the envelope; PowerError under limits when not even
    its TDP is known.
    """
    limits = (limits or power.Limits()).of(device)
    answers = list(predictions)
    for kind, dtype, out_dtype, positions, columns in iterate_groups(list(ops)):
        model = power.find(registries, kind, device.id, backend)
        if not power.answers(kind, device, limits):
            continue
        latency_us, cache = (
            np.array([answers[position].latency_us for position in positions]),
            answers[int(positions[0])].cache,
        )
        answer = power.drawn(model, OpColumns(kind, columns, dtype, out_dtype, cache), device, limits, latency_us)
        for position, watts, slower, inside in zip(
            positions.tolist(), answer.power_w, answer.slower, answer.in_envelope, strict=True
        ):
            prediction, factor = answers[position], float(slower)
            latency = prediction.latency_us * factor
            answers[position] = replace(
                prediction,
                latency_us=latency,
                low_us=prediction.low_us * factor,
                high_us=prediction.high_us * factor,
                in_envelope=prediction.in_envelope and factor == 1.0,
                power_w=float(watts),
                energy_mj=float(watts) * latency * 1e-3,
                energy_in_envelope=bool(inside) and prediction.in_envelope,
            )
    return answers
