"""What a scaler sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FleetSignals:
    """A fleet at a time, and what came and ended in the interval before. Means are of replicas that serve, or of
    requests that ended; NaN where there were none."""

    time_s: float
    interval_s: float
    replicas: int  # replicas that are on and to stay,
    ready: int  # and those of them that serve
    starting: int  # or will soon
    requests: float  # of a replica, not ended
    kv: float  # share of its blocks in use
    busy: float  # share of the interval in which it computed
    waiting: int  # requests in all queues, and those held
    arrived: int
    input_tokens: float
    output_tokens: float
    hit_share: float  # of prompts that were cached
