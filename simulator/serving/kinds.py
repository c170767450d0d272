"""Replicas of two kinds in one pool: what each served, how busy it was, and what it cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..question.serving import ServingRequest
from ..report.served_times import TimeSpread
from .histogram import Histogram
from .rules import ServingSetup, first_decode_rank
from .state import LoopState

if TYPE_CHECKING:
    from .replica import ServedReplica
    from .tally import Tally

KINDS = "first", "second"


def kind_figures(
    request: ServingRequest,
    setup: ServingSetup,
    state: LoopState,
    tally: Tally,
    replicas: tuple[ServedReplica, ServedReplica],
    spread: Callable[[Histogram], TimeSpread],
) -> dict[str, dict[str, Any]]:
    """The figures of each kind: requests and tokens of answers after the warm-up, times in milliseconds, the share of
    the time that it computes, KV memory, and the price of a million tokens (None without one)."""
    first, seconds = first_decode_rank(setup), max(float(state.totals["now_us"][0]) / 1e6, 1e-9)
    figures = {}
    for index, (name, tally_of_kind, replica) in enumerate(zip(KINDS, tally.kinds, replicas, strict=True)):
        ranks = state.ranks[slice(first, None) if index else slice(0, first)]
        rules = setup.decode_rules if index else setup.rules
        count = request.second_kind.replicas if index else request.replicas
        price = count * replica.devices * replica.price_per_hour * seconds / 3600
        million = max(tally_of_kind.output_tokens, 1) / 1e6
        figures[name] = {
            "device": replica.run.get("system", ""),
            "replicas": count,
            "devices": count * replica.devices,
            "completed": tally_of_kind.ended,
            "output_tokens": tally_of_kind.output_tokens,
            "output_tokens_per_s_per_gpu": tally_of_kind.output_tokens / seconds / max(count * replica.devices, 1),
            "slo_attainment": tally_of_kind.good / tally_of_kind.ended if tally_of_kind.ended else 0.0,
            "ttft_ms": spread(tally_of_kind.times["ttft"]).to_dict(),
            "tpot_ms": spread(tally_of_kind.times["tpot"]).to_dict(),
            "utilisation": float(ranks["busy_us"].mean()) / (seconds * 1e6),
            "kv_tokens": rules.blocks * rules.block_tokens * (request.second_dp if index else request.attention_dp),
            "kv_peak": float(ranks["peak"].max()) / rules.blocks,
            "price": price or None,
            "cost_per_million_tokens": price / million if price else None,
        }
    return figures
