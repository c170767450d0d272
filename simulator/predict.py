"""How long does one op take? The engines' answer beside the roofline that bounds it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..datasets.devices import Device, DeviceError
from ..datasets.ops import KINDS, Op, iterate_groups
from ..models import analytical
from .engines import Engine, ask
from .report import OpPrediction


def check_supported(op: Op, device: Device) -> None:
    """DeviceError when the device has no units for the op's dtype."""
    if KINDS[op.kind].family in ("gemm", "attention") and not device.supports(op.dtype):
        raise DeviceError(f"{device.name} has no {op.dtype} matrix units; it has {', '.join(device.tensor_tflops)}")


def predict_ops(ops: Sequence[Op], device: Device, engine: Engine, cache: str = "warm") -> list[OpPrediction]:
    """One prediction per op, in order. DeviceError when the device lacks an op's dtype."""
    for op in ops:
        check_supported(op, device)
    answers = ask(engine, ops, cache)
    roofline, bound = np.empty(len(ops)), np.empty(len(ops), dtype=object)
    for kind, dtype, out_dtype, positions, columns in iterate_groups(list(ops)):
        roofline[positions] = analytical.roofline_us(kind, columns, dtype, out_dtype, device)
        bound[positions] = analytical.bound(kind, columns, dtype, out_dtype, device)
    return [
        OpPrediction(
            op=op.to_dict(),
            device=device.id,
            latency_us=float(answers.latency_us[i]),
            low_us=float(answers.low_us[i]),
            high_us=float(answers.high_us[i]),
            coverage=float(answers.coverage[i]),
            engine=str(answers.engine[i]),
            predictor=answers.predictor[i],
            in_envelope=bool(answers.in_envelope[i]),
            roofline_us=float(roofline[i]),
            bound=str(bound[i]),
            cache=cache,
        )
        for i, op in enumerate(ops)
    ]
