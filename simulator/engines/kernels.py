"""Kernels that a framework runs and another one's table timed: who answers for them in its place.

A serving engine takes its kernels from libraries (FlashInfer, TensorRT-LLM's own, OpenAI's Triton experts, CUTLASS).
The table of its own name may have timed another one: untuned, by another backend, or with the rounding of its input. A
:class:`..question.kernels.KernelChoice` of ``conf/stack`` names the reading that the framework runs, with its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...datasets.backends import framework
from ...datasets.ops import KINDS, KV_DTYPE
from ...models.features import alike
from ..question.kernels import KernelChoice
from .answers import Answers, Columns
from .learned import LearnedEngine
from .transfer import TransferEngine

MIN_SHARE_LEFT = 0.3  # of what a table says is left where the rounding is taken out of it
ROUNDING_PARTS = ("scale", "apply")


@dataclass(frozen=True)
class KernelsEngine:
    """Answers ops that a choice is of by the predictor that it names; declines others.

    ``tables`` are those of the device itself, or of its kin, for devices that nobody timed.
    """

    tables: LearnedEngine | TransferEngine
    choices: Sequence[KernelChoice]
    name: str = "learned"
    _engines: dict[KernelChoice, LearnedEngine | TransferEngine | None] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        for choice in self.choices:
            if (choice.kind, choice.dtype) != (kind, dtype):
                continue
            engine = self.of(choice)
            open_ = answers.open
            rows = columns[KINDS[kind].names[0]][open_]
            matches = (rows >= choice.least_tokens) & ((rows <= choice.most_tokens) | (choice.most_tokens == 0))
            if choice.most_ep:
                matches &= columns["ep"][open_] <= choice.most_ep
            if choice.unaligned:
                matches &= columns["hidden"][open_] % choice.unaligned > 0
            if choice.kv_dtype:
                matches &= columns["kv_dtype"][open_] == KV_DTYPE.choices.index(choice.kv_dtype)
            open_ = open_[matches]
            if engine is None or not len(open_):
                continue
            open_columns = {name: column[open_] for name, column in columns.items()}
            chosen_answers = engine.answer(kind, open_columns, dtype, out_dtype, cache)
            if choice.without:
                self._subtract_rounding(chosen_answers, engine, open_columns, dtype, cache)
            answers.put(open_, chosen_answers)
        return answers

    def of(self, choice: KernelChoice) -> LearnedEngine | TransferEngine | None:
        """The engine of the backend that a choice names; None where neither the device nor its kin have it."""
        if choice not in self._engines:
            self._engines[choice] = self._find(choice)
        return self._engines[choice]

    def _find(self, choice: KernelChoice) -> LearnedEngine | TransferEngine | None:
        device = self.tables.device
        if choice.architecture and not device.architecture.startswith(choice.architecture):
            return None
        if choice.sm and choice.sm != device.sm:
            return None
        framework_name, _, words = choice.backend.partition(":")
        if isinstance(self.tables, TransferEngine):
            transfer = replace(self.tables, backend=framework_name, calls=words, named=True)
            kin = transfer.kin(choice.kind, choice.dtype)
            return transfer if kin is not None and alike(kin.dtype) == alike(choice.dtype) else None
        for device_id in filter(None, (device.id, device.variant_of)):
            for registry in self.tables.registries:
                for backend in sorted(registry.backends(choice.kind, device_id), reverse=True):
                    if framework(backend) != framework_name or words not in backend.partition(":")[2]:
                        continue
                    if registry.learned(choice.kind, device_id, backend, choice.dtype) == backend:
                        return replace(self.tables, backend=backend)
        return None

    def _subtract_rounding(
        self, answers: Answers, engine: LearnedEngine | TransferEngine, columns: Columns, dtype: str, cache: str
    ) -> None:
        """Takes the rounding of the input [m, k] off the answers of products, by the tables of the same framework."""
        same_framework = replace(self.tables, backend=framework(engine.backend or ""))
        rounding_us = np.zeros(len(answers.latency_us))
        for rounding in ROUNDING_PARTS:
            part_us = same_framework.answer(
                "quantize", rounding_columns(columns, rounding), "bf16", dtype, cache
            ).latency_us
            rounding_us += np.nan_to_num(part_us)
        share_left = np.maximum(1.0 - rounding_us / answers.latency_us, MIN_SHARE_LEFT)
        for name in ("latency_us", "low_us", "high_us"):
            setattr(answers, name, getattr(answers, name) * share_left)


def rounding_columns(columns: Columns, rounding: str) -> Columns:
    """Columns of one part of the rounding of the input of products."""
    shape = {"rows": columns["m"] * columns["batch"], "cols": columns["k"]}
    count = len(columns["m"])
    values = {}
    for dim in KINDS["quantize"].dims:
        value = dim.choices.index(rounding) if dim.name == "part" else dim.default or 0
        values[dim.name] = shape.get(dim.name, np.full(count, value, np.int64))
    return values
