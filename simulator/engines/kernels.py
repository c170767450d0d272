"""Kernels that a framework runs and another one's table timed: who answers for them in its place.

A serving engine takes its kernels from libraries (FlashInfer, TensorRT-LLM's own, OpenAI's Triton experts, CUTLASS).
The table of its own name may have timed another one: untuned, by another backend, or with the rounding of its input. A
:class:`..question.plan.KernelChoice` of ``conf/stack`` names the reading that the framework runs, with its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...datasets.backends import framework
from ...datasets.ops import KINDS
from ..question.plan import KernelChoice
from .answers import Answers, Columns
from .learned import LearnedEngine

LEAST = 0.3  # of what a table says is left where the rounding is taken out of it
PARTS = ("scale", "apply")


@dataclass(frozen=True)
class KernelsEngine:
    """Answers ops that a choice is of by the predictor that it names; declines others."""

    learned: LearnedEngine
    choices: Sequence[KernelChoice]
    name: str = "learned"
    _engines: dict[tuple[str, str, str], LearnedEngine | None] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        for each in self.choices:
            if (each.kind, each.dtype) != (kind, dtype):
                continue
            engine = self.of(each)
            open_ = answers.open
            rows = columns[KINDS[kind].names[0]][open_]
            wanted = (rows >= each.least_tokens) & ((rows <= each.most_tokens) | (each.most_tokens == 0))
            if each.most_ep:
                wanted &= columns["ep"][open_] <= each.most_ep
            open_ = open_[wanted]
            if engine is None or not len(open_):
                continue
            part = {name: column[open_] for name, column in columns.items()}
            found = engine.answer(kind, part, dtype, out_dtype, cache)
            if each.without:
                self._rounding_off(found, engine, part, dtype, cache)
            answers.put(open_, found)
        return answers

    def of(self, choice: KernelChoice) -> LearnedEngine | None:
        """The engine of the backend that a choice names; None where the device has none of it."""
        key = choice.kind, choice.dtype, choice.backend
        if key not in self._engines:
            self._engines[key] = self._find(choice)
        return self._engines[key]

    def _find(self, choice: KernelChoice) -> LearnedEngine | None:
        device = self.learned.device
        if choice.architecture and not device.architecture.startswith(choice.architecture):
            return None
        who, _, words = choice.backend.partition(":")
        for device_id in filter(None, (device.id, device.variant_of)):
            for registry in self.learned.registries:
                for backend in sorted(registry.backends(choice.kind, device_id), reverse=True):
                    if framework(backend) != who or words not in backend.partition(":")[2]:
                        continue
                    if registry.learned(choice.kind, device_id, backend, choice.dtype) == backend:
                        return replace(self.learned, backend=backend)
        return None

    def _rounding_off(self, found: Answers, engine: LearnedEngine, columns: Columns, dtype: str, cache: str) -> None:
        """Takes the rounding of the input [m, k] off the answers of products, by the tables of the same framework."""
        own = replace(self.learned, backend=framework(engine.backend or ""))
        spent = np.zeros(len(found.latency_us))
        for part in PARTS:
            rounded = own.answer("quantize", rounding(columns, part), "bf16", dtype, cache).latency_us
            spent += np.nan_to_num(rounded)
        left = np.maximum(1.0 - spent / found.latency_us, LEAST)
        for name in ("latency_us", "low_us", "high_us"):
            setattr(found, name, getattr(found, name) * left)


def rounding(columns: Columns, part: str) -> Columns:
    """Columns of one part of the rounding of the input of products."""
    known = {"rows": columns["m"] * columns["batch"], "cols": columns["k"]}
    count = len(columns["m"])
    made = {}
    for dim in KINDS["quantize"].dims:
        value = dim.choices.index(part) if dim.name == "part" else dim.default or 0
        made[dim.name] = known.get(dim.name, np.full(count, value, np.int64))
    return made
