"""TensorRT-LLM with MAX_UTILIZATION: blocks for the prompt alone; the newest is paused for lack."""

from __future__ import annotations

from dataclasses import replace

from . import trtllm

POLICY = replace(trtllm.POLICY, name="trtllm_max_utilization", said=("MAX_UTILIZATION",), reserves=False)
