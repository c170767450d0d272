"""Which inference engine ran a row, and in which number formats.

Rows of encoders name engines such as ``PyTorch:EFF-FT-INT8-v2``: ``FT`` are FasterTransformer's kernels, with ``EFF``
without padding; ``TorchScript`` and ``TF`` are the frameworks' own. A format that a cell leaves out is in the name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .cells import Cells, precision_of
from .frameworks import inference_framework
from .rows import TruthError

ENCODERS = ((r"\bFT\b", "fastertransformer"), (r"torch", "torchscript"), (r"\bTF\b", "tensorflow"))
FUSED_WIDTH, FUSED_TOKENS = 64, 384  # of FasterTransformer's fused attention, in fp16 and int8 (docs/bert_guide.md)
PACKED = r"EFF-FT|triton"  # Triton's backend removes padding by itself: its rates would be above the chip's peak
REAL_TOKENS = 0.5  # of a padded batch, in its benchmarks of encoders
TOKENS_AT_ONCE = 4096  # that one stage of FasterTransformer's pipeline takes


@dataclass(frozen=True)
class Framework:
    """A framework of ``conf/stack``, formats of activations and products, and what a row has as options."""

    framework: str
    precision: str
    quantization: str
    options: Mapping[str, Any]


def encodes(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is an encoder's."""
    return config.get("model_type") == "bert"


def engine_of(cells: Cells, config: Mapping[str, Any]) -> Framework:
    """The engine of a row of a model; TruthError for one that nothing is known of."""
    if encodes(config):
        return encoder_engine(cells)
    cache = cells.text("kv_dtype").lower()  # where it is published, and another than the products'
    options = {"kv_dtype": cache} if cache in ("fp8", "int8") else {}
    return Framework(inference_framework(cells.said), *precision_of(cells.text("precision")), options)


def micro_batches(framework: str, batch: int, tokens: int, stages: int) -> int:
    """Parts in which a batch of sequences goes through pipeline stages (FasterTransformer's ``getLocalBatchSize``)."""
    if stages == 1 or not framework.startswith("fastertransformer"):
        return 1
    part = batch // stages if batch % stages == 0 else batch
    while part * tokens > TOKENS_AT_ONCE and part % 2 == 0:
        part //= 2
    return batch // part


def encoder_engine(cells: Cells) -> Framework:
    """The engine of an encoder's row; TruthError for sparse weights, too."""
    said = cells.text("engine")
    if re.search("sparse", said, re.IGNORECASE):
        raise TruthError(f"engine {said!r}: sparse weights, which no predictor covers")
    framework = next((name for pattern, name in ENCODERS if re.search(pattern, said, re.IGNORECASE)), "")
    if not framework:
        raise TruthError(f"engine {said!r}: neither FasterTransformer, PyTorch nor TensorFlow")
    named = re.search(r"INT8|FP16|FP32", said)
    precision, quantization = precision_of(cells.text("precision") or (named[0] if named else ""))
    half = precision == "fp16" and framework == "fastertransformer"
    if half and cells.whole("head_dim", 0) == FUSED_WIDTH and cells.needed("input_len_tokens") <= FUSED_TOKENS:
        framework = "fastertransformer_fused"
    return Framework(
        framework, precision, quantization, {"real_tokens": REAL_TOKENS} if re.search(PACKED, said) else {}
    )
