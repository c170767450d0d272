"""Which framework ran a row: by what the row says about its source, to the name of a file in ``conf/stack``."""

from __future__ import annotations

import re

# Words of a row -> framework. The first that is found counts.
TRAINING = (
    (r"\bzero-?3\b.*\|.*zero-?3", "deepspeed"),
    (r"korthikanti", "megatron2022"),
    (r"vtrain|\bsc21\b|narayanan", "megatron2021"),
    (r"simumax", "megatron_core"),
    (r"megatron-bridge|megatron bridge", "megatron"),
    (r"nemo automodel", "nemo_automodel"),
    (r"mlperf|\bnemo\b", "nemo"),
    (r"torchtitan\b.*_2024\d\d", "torchtitan_2024"),
    (r"torchtitan|torchao", "torchtitan"),
    (r"llm-foundry", "llm_foundry"),
    (r"nanotron|ultrascale", "nanotron"),
    (r"llama 3 herd", "llama3"),
    (r"megatron", "megatron"),
    (r"neusight", "torch_2023"),
    (r"pytorch|\btorch\b", "torch"),
)
INFERENCE = (
    (r"tensorrt-llm.* v?0\.[5-7]\b", "trtllm_2023"),
    (r"tensorrt-llm\D*v0\.[0-7]\.", "trtllm_2023"),
    (r"tensorrt-llm|trt-llm|trtllm|\bnim\b|\bnemo\b", "trtllm"),
    (r"fastertransformer", "fastertransformer"),
    (r"vllm|koyeb", "vllm"),
    (r"neusight", "torch_2023"),
    (r"pytorch|\btorch\b", "torch"),
)


def training_framework(said: str) -> str:
    """The framework that a training row's words name, else Megatron."""
    return _first(TRAINING, said, "megatron")


def inference_framework(said: str) -> str:
    """The engine that an inference row's words name, else TensorRT-LLM."""
    return _first(INFERENCE, said, "trtllm")


def _first(known: tuple[tuple[str, str], ...], said: str, default: str) -> str:
    return next((name for pattern, name in known if re.search(pattern, said, re.IGNORECASE)), default)
