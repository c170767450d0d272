"""Which chips, and how well: for a chip, a kind of op and a format, who answers and how far such answers were off.

One op of each kind and format is asked, as ``opcast predict`` would. The error is that of the answer's predictor on
shapes that were held out when it learned; of an answer by kin, what kin missed of chips that were left out in turn
(``models/shipped/kinship.json``). Physics has no error of its own here: its interval says what it is worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...datasets.devices import Device, load_device
from ...datasets.ops import KINDS, make_op
from ...datasets.vocabulary import OpColumns
from ...models.kinship import median_error, tier
from ...models.registry import Registry
from ..engines import Engine, build_engine
from .columns import predict_columns


@dataclass(frozen=True)
class ChipQuestion:
    """One usual op for each of some formats: what a chip is asked."""

    label: str
    kind: str
    dims: Mapping[str, Any]
    dtypes: tuple[str, ...]


SIXTEEN_BITS = "bf16"  # fp16 on chips without
LLAMA_70B = {"heads_q": 64, "heads_kv": 8, "head_dim": 128, "v_head_dim": 128, "batch": 8}
QUESTIONS = (
    ChipQuestion("products", "gemm", {"m": 4096, "n": 4096, "k": 4096}, ("fp32", SIXTEEN_BITS)),
    ChipQuestion("products", "gemm", {"m": 4096, "n": 4096, "k": 4096}, ("fp8", "fp8_block", "int8", "mxfp4", "nvfp4")),
    ChipQuestion("products", "gemm", {"m": 16, "n": 4096, "k": 4096}, ("w4a16",)),
    ChipQuestion(
        "prefill attention", "attention_prefill", {**LLAMA_70B, "seq_q": 4096, "seq_kv": 4096}, (SIXTEEN_BITS,)
    ),
    ChipQuestion("decode attention", "attention_decode", {**LLAMA_70B, "seq_q": 1, "seq_kv": 4096}, (SIXTEEN_BITS,)),
    ChipQuestion(
        "experts",
        "fused_moe",
        {"tokens": 4096, "hidden": 4096, "inter": 1536, "topk": 8, "experts": 128, "tp": 1, "ep": 1},
        (SIXTEEN_BITS, "fp8_block", "mxfp4"),
    ),
    ChipQuestion("norms", "rms_norm", {"rows": 4096, "cols": 8192}, (SIXTEEN_BITS,)),
    ChipQuestion("elementwise", "silu_mul", {"rows": 4096, "cols": 8192}, (SIXTEEN_BITS,)),
)


@dataclass(frozen=True)
class ChipAnswer:
    """Who answers for one kind and format on a chip.

    ``how`` is ``measured``, ``learned``, ``kin`` or ``physics``, ``of`` whose measurements, ``error_percent`` the
    median error of such answers (None where nobody could tell), ``factor`` how far the 90 % interval reaches up.
    """

    device: str
    label: str
    kind: str
    dtype: str
    how: str
    of: str
    error_percent: float | None
    factor: float


HOW = {"measured": "measured", "learned": "learned", "transfer": "kin", "analytical": "physics"}


def chip_answers(devices: Sequence[Device], stores: Sequence[Path], registries: Sequence[Path]) -> list[ChipAnswer]:
    """What stands behind answers for some chips, an entry for each kind and format that they have units for."""
    cards = {
        f"{entry.kind}@{entry.backend}/{entry.device_id}@{entry.version}": entry.card
        for path in registries
        if path.is_dir()
        for entry in Registry(path).list()
    }
    return [
        answer for device in devices for answer in _ask_all(device, build_engine(device, stores, registries), cards)
    ]


def _ask_all(device: Device, engine: Engine, cards: Mapping[str, Mapping[str, Any]]) -> list[ChipAnswer]:
    """The answers for one chip."""
    formats = {SIXTEEN_BITS: SIXTEEN_BITS if device.supports(SIXTEEN_BITS) else "fp16"}
    return [
        _ask(question, formats.get(dtype, dtype), device, engine, cards)
        for question in QUESTIONS
        for dtype in question.dtypes
        if device.supports(formats.get(dtype, dtype))
    ]


def _ask(
    question: ChipQuestion, dtype: str, device: Device, engine: Engine, cards: Mapping[str, Mapping[str, Any]]
) -> ChipAnswer:
    """The answer for one op, and who gave it."""
    kind, op = question.kind, make_op(question.kind, dtype, **question.dims)
    columns = {name: np.array([value]) for name, value in zip(KINDS[kind].names, op.dims, strict=True)}
    answer = predict_columns(OpColumns(kind, columns, op.dtype, op.out_dtype), device, engine)
    how = HOW.get(str(answer.engine[0]), str(answer.engine[0]))
    predictors = str(answer.predictor[0] or "").split(" + ") if how in ("learned", "kin") else []
    devices = sorted({name.rpartition("/")[2].partition("@")[0] for name in predictors})
    return ChipAnswer(
        device.id,
        question.label,
        kind,
        dtype,
        how,
        ", ".join(devices),
        _error_percent(how, device, kind, dtype, [cards[name] for name in predictors if name in cards]),
        float(answer.high_us[0] / answer.latency_us[0]),
    )


def _error_percent(how: str, device: Device, kind: str, dtype: str, cards: Sequence[Mapping[str, Any]]) -> float | None:
    """The median error of answers such as this one; None where another kind or format answers."""
    if not cards or cards[0]["kind"] != kind or dtype not in cards[0]["dtypes"]:
        return None
    if how == "learned":
        evaluations: Sequence[Mapping[str, Any]] = list(cards[0].get("evaluations", {}).values())
        scores = evaluations[0].get("by_dtype", {}) if evaluations else {}
        return float(scores.get(dtype, {}).get("median_ape", cards[0]["test_median_ape"]))
    nearness = tier(device, load_device(cards[0]["device_id"]), dtype)
    return median_error(kind, nearness) if nearness else None
