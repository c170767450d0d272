"""Attention that sees all keys, as encoders of text and images have it, beside attention that later keys are masked in.

A serving engine runs them by different kernels: prompts read keys from the pages of a cache, to which they were written
first, and images have no cache. Tables time them apart. On H100, 32 sequences of 512 tokens and 16 heads of 64 take
134 us without a mask by vLLM's table of its attention for images, and 254 by what its table of prompts makes of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...models.choice import CAUSAL, HEAD_SIZE
from .answers import Answers, Columns


def each_mask(engine: Any, kind: str, columns: Columns, *formats: str) -> Answers | None:
    """The answers for ops with columns [n] some of which see all keys; None where ``engine`` answers them all itself.

    Those are asked of the same engine for one head size without a mask at a time (``unmasked``), of which it keeps one
    each in ``of_head``.
    """
    if engine.unmasked or CAUSAL not in columns or HEAD_SIZE not in columns or columns[CAUSAL].all():
        return None
    head_sizes = np.where(columns[CAUSAL] > 0, 0, columns[HEAD_SIZE])
    answers = Answers.declined(len(head_sizes))
    for head_size in np.unique(head_sizes).tolist():
        at = np.flatnonzero(head_sizes == head_size)
        if head_size and head_size not in engine.of_head:
            engine.of_head[head_size] = replace(engine, unmasked=head_size)
        by_size = engine.of_head.get(head_size, engine)
        answers.put(at, by_size.answer(kind, {name: values[at] for name, values in columns.items()}, *formats))
    return answers
