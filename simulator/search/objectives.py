"""What a search can look for: names of objectives, the figure that each reads, which way is better, how it is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Objective(NamedTuple):
    """The figure of a point that is read, +1 where less of it is better (-1: more), and its axis of a picture: the
    words, and what figures are multiplied by."""

    figure: str
    sign: int
    heading: str
    factor: float = 1.0


OBJECTIVES = {
    "step_time": Objective("step_time_s", 1, "step time, s"),
    "tokens_per_s_per_gpu": Objective("tokens_per_s_per_gpu", -1, "tokens/s per GPU"),
    "tokens_per_s": Objective("tokens_per_s", -1, "tokens/s"),
    "mfu": Objective("mfu", -1, "MFU, %", 100.0),
    "cost": Objective("cost", 1, "cost of a step"),
    "energy": Objective("energy_j", 1, "energy of a step, MJ", 1e-6),
    "memory": Objective("peak_gib", 1, "peak memory, GiB"),
    "gpus": Objective("devices", 1, "GPUs"),
}
OF_SERVING = {
    "tokens_per_s_per_gpu": Objective("tokens_per_s_per_gpu", -1, "output tokens/s per GPU"),
    "tokens_per_s_per_user": Objective("tokens_per_s_per_user", -1, "output tokens/s per user"),
    "tokens_per_s": Objective("tokens_per_s", -1, "output tokens/s"),
    "goodput": Objective("goodput", -1, "requests/s that have all of slo"),
    "ttft": Objective("ttft_ms", 1, "TTFT, ms"),
    "tpot": Objective("tpot_ms", 1, "TPOT, ms"),
    "e2e": Objective("e2e_ms", 1, "end to end, ms"),
    "token_cost": Objective("cost_per_million_tokens", 1, "cost of a million tokens"),
    "hourly_cost": Objective("hourly_cost", 1, "cost of an hour"),
    "gpus": OBJECTIVES["gpus"],
    "chance": Objective("p_p99_ttft_met", -1, "chance that TTFT is within slo"),
}
KNOWN: Mapping[str, Objective] = OBJECTIVES | OF_SERVING
