"""What a batch of a rank takes: the time of its iteration, guesses, adapters, and the host's part."""

from __future__ import annotations

from typing import Any

from .iteration import drafting_us, iteration_us, piece_of
from .rules import IterationTiming


def batch_us(timing: IterationTiming, sums: Any) -> float:
    """Microseconds of a rank's batch, host time included; decodes alone are padded to the next CUDA graph."""
    decodes = sums.decodes
    if sums.prefill_tokens == 0 and len(timing.graphs) > 0 and decodes <= timing.graphs[-1]:
        size = piece_of(timing.graphs, decodes)
        decodes = float(timing.graphs[size] if timing.graphs[size] >= decodes else timing.graphs[size + 1])
    gpu_us = iteration_us(
        timing.tables,
        decodes,
        sums.decode_context,
        sums.prefill_tokens,
        sums.prefill_pairs,
        sums.prefill_context,
        sums.samples,
        timing.drafts,
    )
    if timing.drafts > 0:
        gpu_us += timing.drafts * drafting_us(timing.tables, decodes, sums.decode_context, timing.draft_share)
    if len(timing.adapter_counts) > 0:
        gpu_us += sums.adapter_us
    host_us = timing.host_us + timing.host_seq_us * sums.size
    return gpu_us + host_us
