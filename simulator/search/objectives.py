"""What a search can look for: names of objectives, the figure that each reads, and which way is better."""

from __future__ import annotations

OBJECTIVES: dict[str, tuple[str, int]] = {  # -> (figure of a point, +1 where less is better, -1 where more is)
    "step_time": ("step_time_s", 1),
    "tokens_per_s_per_gpu": ("tokens_per_s_per_gpu", -1),
    "tokens_per_s": ("tokens_per_s", -1),
    "mfu": ("mfu", -1),
    "cost": ("cost", 1),
    "energy": ("energy_j", 1),
    "memory": ("peak_gib", 1),
    "gpus": ("devices", 1),
}
OF_SERVING: dict[str, tuple[str, int]] = {
    "tokens_per_s_per_gpu": ("tokens_per_s_per_gpu", -1),
    "tokens_per_s_per_user": ("tokens_per_s_per_user", -1),
    "tokens_per_s": ("tokens_per_s", -1),
    "goodput": ("goodput", -1),
    "ttft": ("ttft_ms", 1),
    "tpot": ("tpot_ms", 1),
    "e2e": ("e2e_ms", 1),
    "token_cost": ("cost_per_million_tokens", 1),
    "hourly_cost": ("hourly_cost", 1),
    "gpus": ("devices", 1),
    "chance": ("p_p99_ttft_met", -1),
}
KNOWN = OBJECTIVES | OF_SERVING
