"""Splitwise: the batches of vLLM v0, of at most 2,048 tokens of prompts."""

from __future__ import annotations

from .policy import Policy
from .vllm_v0 import vllm_v0

POLICY = Policy("splitwise", vllm_v0, max_tokens=2048, watermark=0.01, spare=1, mixed=False)
