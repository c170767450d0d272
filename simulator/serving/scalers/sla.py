"""The planner of NVIDIA Dynamo for targets of latency: ceil(requests a second / those that one replica can serve).

ai-dynamo/dynamo, ``components/src/dynamo/planner/core``: ``throughput_scaling.py`` (``_throughput_agg``, 0c9050c)
and ``perf_model/agg.py`` (``find_best_engine_agg_rps``, commit 518a70f): the largest batch at which TTFT and the time
between tokens keep their targets, and as many requests a second as it ends by Little's law. The next interval is
expected to be as the last one was (Dynamo's ``constant`` predictor; its usual one is ARIMA). Iteration times are those
of the replica itself, where Dynamo fits a line to measured ones.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, isnan

from ...question.request_classes import ServingTargets
from ..iteration import iteration_us
from ..replica import ServedReplica
from ..rules import SchedulerRules
from .signals import FleetSignals

TTFT_MS, TPOT_MS = 500.0, 50.0  # where nobody says (``ttft`` and ``itl`` of config/defaults.py)
MOST = 1024  # sequences of a batch that are tried (the fallback of perf_model/agg.py)


def sla_planner(slo: ServingTargets, replica: ServedReplica, rules: SchedulerRules) -> Callable[[FleetSignals], float]:
    """The planner for a replica: it knows the shapes of requests from the last interval in which any ended."""
    ttft_ms, tpot_ms = slo.ttft_ms or TTFT_MS, slo.tpot_ms or TPOT_MS
    lengths: list[tuple[float, float, float]] = []

    def plan(signals: FleetSignals) -> float:
        if not isnan(signals.input_tokens):
            lengths[:] = [(signals.input_tokens, signals.output_tokens, signals.hit_share)]
        if not lengths:
            return signals.replicas
        prompt, answer, hits = lengths[0]
        rate = largest_rate(prompt, answer, hits, rules, replica, (ttft_ms, tpot_ms))
        return ceil(signals.arrived / signals.interval_s / rate)

    return plan


def largest_rate(
    prompt: float,
    answer: float,
    hits: float,
    rules: SchedulerRules,
    replica: ServedReplica,
    targets_ms: tuple[float, float],
) -> float:
    """Requests a second of ``prompt`` and ``answer`` tokens that a replica serves within its targets of TTFT and time
    between tokens; those of one sequence at a time where even these miss them. ``hits`` is the share of prompts that is
    cached."""
    computed, context = prompt * (1.0 - hits), prompt + answer / 2
    rate = 0.0
    for batch in range(1, largest_batch(prompt, answer, rules) + 1):
        tokens = min(batch * computed / max(1.0, answer), rules.max_tokens)
        tpot_ms = iteration_ms(replica, batch, context, tokens, computed)
        ttft_ms, left = 0.0, tokens + computed
        while left > 0:
            ttft_ms += iteration_ms(replica, batch, context, min(left, rules.max_tokens), computed)
            left -= rules.max_tokens
        missed = tpot_ms > targets_ms[1] or ttft_ms > targets_ms[0]
        if missed and batch > 1:
            break
        rate = 1e3 * batch / (answer * tpot_ms)
        if missed:
            break
    return rate


def largest_batch(prompt: float, answer: float, rules: SchedulerRules) -> int:
    """The most sequences: by KV memory, by the scheduler, and where prompts keep pace with answers that end."""
    fit = int(rules.blocks * rules.block_tokens / max(1.0, prompt + answer / 2))
    keeps_pace = rules.max_tokens - prompt / answer
    return max(1, int(min(fit, rules.max_seqs, rules.max_tokens - 1, keeps_pace, MOST)))


def iteration_ms(replica: ServedReplica, batch: int, context: float, tokens: float, prompt: float) -> float:
    """Milliseconds of an iteration of so many sequences with ``context`` tokens each, beside so many of prompts."""
    pairs = tokens * (min(tokens, prompt) + 1) / 2
    gpu_us = iteration_us(replica.tables, batch, int(batch * context), int(tokens), pairs, 0, batch)
    return 1e-3 * (gpu_us + float(replica.host.step_us) + float(replica.host.seq_us) * batch)
