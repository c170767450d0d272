"""Of the shipped models, one of every architecture that has a code of its own somewhere in the simulator."""

from __future__ import annotations

from typing import Any

import pytest

from opcast.simulator.trace import known_models
from opcast.simulator.trace.models import resolve

FAST = ("bert_base", "llama3_8b", "mpt_7b", "gemma2_2b", "gpt_oss_20b", "deepseek_v3_2", "mamba2_2_7b")
"""A kind of memory each."""
ENCODERS = ("bert_base", "bert_large")
"""Which generate nothing."""
ALIKE = (
    *("bloom", "cohere", "falcon", "gemma", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "granite"),
    *("mistral", "nemotron", "olmo", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3"),
    *("starcoder2", "ernie4_5_moe", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe"),
)
"""Model types that differ from ``llama`` or from ``qwen3_moe`` in sizes, norms, biases, positions and windows alone.
``tests/simulator/trace/test_models.py`` traces each of them."""


def architectures(left_out: tuple[str, ...] = ()) -> list[Any]:
    """Every shipped model but those, as parameters: one of each architecture in every run, all with --every-model."""
    seen = {*ALIKE}
    params = []
    for name in sorted(set(known_models()) - {*left_out}, key=lambda name: (name not in FAST, name)):
        family = str((resolve(name).config or {})["model_type"])
        marks = [pytest.mark.essential if name in FAST else pytest.mark.slow]
        marks += [pytest.mark.sibling] if family in seen else []
        seen.add(family)
        params.append(pytest.param(name, marks=marks))
    return params
